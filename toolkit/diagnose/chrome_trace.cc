// SPDX-License-Identifier: Apache-2.0
//
// Reads traces in Chrome's format, as PyTorch's profiler and JAX write them: one JSON document, event by event.
#include <istream>
#include <nlohmann/json.hpp>
#include <streambuf>
#include <unordered_set>

#include "diagnose/chrome_event.hpp"
#include "diagnose/trace.hpp"
#include "tessera/error.hpp"

namespace tessera::diagnose {
namespace {

constexpr std::size_t kPiece = std::size_t{1} << 18;
// The most bytes between two values. A file with a longer text is no trace.
constexpr std::size_t kLongestValue = std::size_t{64} << 20;

/// Passes the bytes to the parser, and ends the stream before a single value fills the memory.
class StreamBuffer final : public std::streambuf {
 public:
    explicit StreamBuffer(ByteStream& stream) : stream_(stream), buffer_(kPiece) {}
    void value_ended() { since_value_ = 0; }
    bool value_too_long() const { return since_value_ > kLongestValue; }

 protected:
    int_type underflow() override {
        since_value_ += buffer_.size();
        if (value_too_long()) return traits_type::eof();
        const std::size_t count = stream_.read(buffer_);
        if (count == 0) return traits_type::eof();
        setg(buffer_.data(), buffer_.data(), buffer_.data() + count);
        return traits_type::to_int_type(buffer_.front());
    }

 private:
    ByteStream& stream_;
    std::vector<char> buffer_;
    std::size_t since_value_ = 0;
};

/// Walks through the document and assigns each value to its event.
class Walker final : public nlohmann::json_sax<nlohmann::json> {
 public:
    Walker(EventSink& sink, StreamBuffer& buffer) : sink_(sink), buffer_(buffer) {}

    std::size_t error_at = 0;
    std::string error_text;
    bool saw_events = false;

    bool null() override { return scalar({}); }
    bool boolean(bool value) override { return scalar(value ? "true" : "false"); }
    bool number_integer(number_integer_t value) override { return number(static_cast<double>(value), value); }
    bool number_unsigned(number_unsigned_t value) override {
        return number(static_cast<double>(value), static_cast<std::int64_t>(value & INT64_MAX));
    }
    bool number_float(number_float_t value, const string_t& /*text*/) override {
        const bool whole = value > -9e18 && value < 9e18;
        return number(value, whole ? static_cast<std::int64_t>(value) : -1);
    }
    bool string(string_t& value) override {
        buffer_.value_ended();
        if (capturing_) return capture_text(value);
        if (in_event() && depth_ == events_depth_ + 1) sink_.text(key_, value);
        else if (in_args()) sink_.argument_text(key_, value);
        else if (in_device()) sink_.device_text(key_, value);
        else if (depth_ == 1) sink_.header_text(key_, value);
        return true;
    }
    bool binary(binary_t& /*value*/) override { return true; }

    bool start_object(std::size_t /*size*/) override {
        buffer_.value_ended();
        ++depth_;
        if (capturing_) capture("{");
        else if (in_events_ && depth_ == events_depth_ + 1) sink_.begin_event();
        else if (in_events_ && depth_ == events_depth_ + 2) args_ = key_ == "args";
        else if (in_devices_ && depth_ == 3) sink_.begin_device();
        return true;
    }
    bool end_object() override {
        if (capturing_) capture("}");
        else if (in_events_ && depth_ == events_depth_ + 1) sink_.end_event();
        else if (in_events_ && depth_ == events_depth_ + 2) args_ = false;
        --depth_;
        return true;
    }
    bool start_array(std::size_t /*size*/) override {
        buffer_.value_ended();
        const bool top = depth_ == 0 || (depth_ == 1 && key_ == "traceEvents");
        if (!capturing_ && in_args() && sink_.wants(key_)) {
            capturing_ = true;
            capture_depth_ = depth_;
            captured_.clear();
        }
        ++depth_;
        if (capturing_) capture("[");
        else if (!in_events_ && top) {
            in_events_ = saw_events = true;
            events_depth_ = depth_;
        } else if (depth_ == 2 && key_ == "deviceProperties") {
            in_devices_ = true;
        }
        return true;
    }
    bool end_array() override {
        --depth_;
        if (capturing_) {
            capture("]");
            if (depth_ == capture_depth_) {
                capturing_ = false;
                sink_.argument_list(key_, captured_);
            }
        } else if (in_events_ && depth_ < events_depth_) {
            in_events_ = false;
        } else if (in_devices_ && depth_ == 1) {
            in_devices_ = false;
        }
        return true;
    }
    bool key(string_t& value) override {
        buffer_.value_ended();
        if (!capturing_) key_ = value.size() < 256 ? value : std::string();
        return true;
    }
    bool parse_error(std::size_t position, const std::string& /*token*/,
                     const nlohmann::detail::exception& error) override {
        error_at = position;
        error_text = error.what();
        return false;
    }

 private:
    bool in_event() const { return in_events_ && depth_ > events_depth_; }
    bool in_args() const { return in_events_ && args_ && depth_ == events_depth_ + 2; }
    bool in_device() const { return in_devices_ && depth_ == 3; }

    bool scalar(std::string_view text) {
        buffer_.value_ended();
        if (capturing_) capture(text.empty() ? "null" : text), capture(",");
        return true;
    }
    bool number(double value, std::int64_t whole) {
        buffer_.value_ended();
        if (capturing_) {
            capture(whole == -1 && value != -1 ? std::to_string(value) : std::to_string(whole));
            capture(",");
        } else if (in_event() && depth_ == events_depth_ + 1) {
            sink_.number(key_, value, whole);
        } else if (in_args()) {
            sink_.argument_number(key_, whole);
        } else if (in_device()) {
            sink_.device_number(key_, whole);
        } else if (depth_ == 1) {
            sink_.header_number(key_, whole);
        }
        return true;
    }
    bool capture_text(const std::string& value) {
        capture("\"");
        for (const char c : value) {
            if (c != '"' && c != '\\' && static_cast<unsigned char>(c) >= 0x20) capture(std::string_view(&c, 1));
        }
        capture("\",");
        return true;
    }
    /// Keeps lists as text, with a comma after each value; the reader of a list drops one that is too long.
    void capture(std::string_view text) {
        constexpr std::size_t kMost = 8192;
        if (captured_.size() < kMost) captured_ += text;
        if (text == "]" || text == "}") captured_ += ',';
    }

    EventSink& sink_;
    StreamBuffer& buffer_;
    int depth_ = 0;
    int events_depth_ = 0;
    int capture_depth_ = 0;
    bool in_events_ = false;
    bool in_devices_ = false;
    bool args_ = false;
    bool capturing_ = false;
    std::string key_;
    std::string captured_;
};

}  // namespace

Trace read_chrome_trace(ByteStream& stream, const std::string& origin) {
    Trace trace;
    trace.file = origin;
    EventSink sink(trace);
    StreamBuffer buffer(stream);
    std::istream input(&buffer);
    Walker walker(sink, buffer);
    const bool whole = nlohmann::json::sax_parse(input, &walker, nlohmann::json::input_format_t::json, false);
    sink.finish();
    if (!walker.saw_events || sink.events() == 0) {
        throw Error(ErrorCode::bad_data, origin,
                    walker.saw_events || walker.error_text.empty()
                        ? "expected a trace with events in \"traceEvents\", got JSON without any"
                        : "expected a trace, got JSON that ends or breaks at byte " + std::to_string(walker.error_at));
    }
    if (!whole) {
        const std::string trouble = stream.trouble();
        trace.notes.push_back((trouble.empty() ? buffer.value_too_long() ? "the file has a value of more than 64 MB"
                                                                         : "the file is cut off or damaged"
                                               : trouble) +
                              ": the part before byte " + std::to_string(walker.error_at) + " was read");
    }
    return trace;
}

}  // namespace tessera::diagnose
