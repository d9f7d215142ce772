// SPDX-License-Identifier: Apache-2.0
// The header is read through the parser's events instead of a JSON document. A document silently keeps the last of two
// equal keys, takes 1e3 for an integer, and builds nesting of any depth before it can be checked.
#include "io/safetensors_header.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

namespace tessera::io {
namespace {

constexpr std::array<SafetensorsDtype, 22> kDtypes{{
    {"BOOL", 8, {}},
    {"F4", 4, {}},
    {"F6_E2M3", 6, {}},
    {"F6_E3M2", 6, {}},
    {"U8", 8, {}},
    {"I8", 8, {}},
    {"F8_E5M2", 8, {}},
    {"F8_E4M3", 8, {}},
    {"F8_E8M0", 8, {}},
    {"F8_E4M3FNUZ", 8, {}},
    {"F8_E5M2FNUZ", 8, {}},
    {"I16", 16, {}},
    {"U16", 16, {}},
    {"F16", 16, DType::fp16},
    {"BF16", 16, DType::bf16},
    {"I32", 32, DType::int32},
    {"U32", 32, {}},
    {"F32", 32, DType::fp32},
    {"C64", 64, {}},
    {"F64", 64, DType::fp64},
    {"I64", 64, DType::int64},
    {"U64", 64, {}},
}};

/// Receives the parser's events and accepts exactly the grammar of the format. Every method returns true or throws, so
/// that the first error ends the parse. The grammar has no nesting beyond a tensor's arrays, so the depth never exceeds
/// 3.
class HeaderHandler {
 public:
    using Json = nlohmann::json;

    HeaderHandler(Header& header, const std::string& origin, const SafetensorsLimits& limits)
        : header_(header), origin_(origin), limits_(limits) {}

    bool null() { unexpected("null"); }
    bool boolean(bool) { unexpected("a boolean"); }
    bool number_integer(Json::number_integer_t value) { unexpected(fmt::format("the number {}", value)); }
    bool number_float(Json::number_float_t, const Json::string_t& text) {
        unexpected(fmt::format("the number {}", printable(text)));
    }
    bool binary(Json::binary_t&) { unexpected("binary data"); }

    bool number_unsigned(Json::number_unsigned_t value) {
        if (value > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) {
            fail(fmt::format("expected numbers below 2^63, got {}", value));
        }
        if (context_ == Context::shape) {
            auto& shape = entry().tensor.shape;
            if (shape.size() == kMaxFileRank) fail(fmt::format("expected rank <= {}, got more", kMaxFileRank));
            shape.push_back(static_cast<std::int64_t>(value));
        } else if (context_ == Context::offsets) {
            if (offsets_ == 2) fail("expected 2 data_offsets, got more");
            (offsets_ == 0 ? entry().begin : entry().end) = value;
            ++offsets_;
        } else {
            unexpected(fmt::format("the number {}", value));
        }
        return true;
    }

    bool string(Json::string_t& value) {
        if (context_ == Context::metadata) {
            header_.metadata[key_] = value;
        } else if (context_ == Context::tensor && key_ == "dtype") {
            entry().tensor.file_dtype = value;
        } else {
            unexpected(fmt::format("the string {}", printable(value)));
        }
        return true;
    }

    bool key(Json::string_t& name) {
        if (name.size() > limits_.name_bytes) {
            fail(fmt::format("expected names of at most {} bytes, got {}", limits_.name_bytes, printable(name)));
        }
        const bool fresh = context_ == Context::metadata ? !header_.metadata.contains(name)
                           : context_ == Context::root   ? root_keys_.insert(name).second
                                                         : tensor_keys_.insert(name).second;
        if (!fresh) fail(fmt::format("expected each key once, got {} twice", printable(name)));
        if (context_ == Context::metadata && header_.metadata.size() == limits_.metadata) {
            fail(fmt::format("expected at most {} entries in __metadata__, got more", limits_.metadata));
        }
        if (context_ == Context::tensor && name != "dtype" && name != "shape" && name != "data_offsets") {
            fail(fmt::format("expected the keys dtype, shape and data_offsets, got {}", printable(name)));
        }
        key_ = name;
        return true;
    }

    bool start_object(std::size_t) {
        if (context_ == Context::document) {
            context_ = Context::root;
        } else if (context_ == Context::root && key_ == "__metadata__") {
            context_ = Context::metadata;
        } else if (context_ == Context::root) {
            if (header_.entries.size() == limits_.tensors) {
                fail(fmt::format("expected at most {} tensors, got more", limits_.tensors));
            }
            header_.entries.emplace_back().tensor.name = key_;
            tensor_keys_.clear();
            context_ = Context::tensor;
        } else {
            unexpected("an object");
        }
        return true;
    }

    bool end_object() {
        // Three keys, all known and distinct, are all that a tensor has.
        if (context_ == Context::tensor && tensor_keys_.size() != 3) {
            fail("expected the keys dtype, shape and data_offsets, got fewer");
        }
        context_ = context_ == Context::root ? Context::document : Context::root;
        return true;
    }

    bool start_array(std::size_t) {
        if (context_ == Context::tensor && key_ == "shape") {
            context_ = Context::shape;
        } else if (context_ == Context::tensor && key_ == "data_offsets") {
            context_ = Context::offsets;
            offsets_ = 0;
        } else {
            unexpected("an array");
        }
        return true;
    }

    bool end_array() {
        if (context_ == Context::offsets && offsets_ != 2)
            fail(fmt::format("expected 2 data_offsets, got {}", offsets_));
        context_ = Context::tensor;
        return true;
    }

    bool parse_error(std::size_t position, const std::string&, const Json::exception&) {
        fail(fmt::format("expected valid JSON in UTF-8, got an error at byte {}", position));
    }

 private:
    enum class Context { document, root, metadata, tensor, shape, offsets };

    HeaderEntry& entry() { return header_.entries.back(); }

    [[noreturn]] void fail(const std::string& message) const {
        const bool in_tensor =
            context_ == Context::tensor || context_ == Context::shape || context_ == Context::offsets;
        const std::string where =
            in_tensor ? fmt::format("tensor {}", printable(header_.entries.back().tensor.name)) : std::string("header");
        bad_data(origin_, where + ": " + message);
    }

    [[noreturn]] void unexpected(const std::string& what) const {
        switch (context_) {
            case Context::document: fail("expected an object, got " + what);
            case Context::root: fail(fmt::format("expected an object for {}, got {}", printable(key_), what));
            case Context::metadata:
                fail(fmt::format("expected a string for {} of __metadata__, got {}", printable(key_), what));
            case Context::tensor:
                fail(fmt::format("expected {} for {}, got {}", key_ == "dtype" ? "a string" : "an array", key_, what));
            case Context::shape:
            case Context::offsets:
                fail(fmt::format("expected non-negative integers below 2^63 in {}, got {}", key_, what));
        }
        fail("got " + what);
    }

    Header& header_;
    const std::string& origin_;
    const SafetensorsLimits& limits_;
    Context context_ = Context::document;
    std::string key_;  // the last key
    int offsets_ = 0;  // numbers seen in data_offsets
    std::set<std::string> root_keys_, tensor_keys_;
};

}  // namespace

const SafetensorsDtype* find_dtype(std::string_view name) {
    const auto* found = std::find_if(kDtypes.begin(), kDtypes.end(), [&](const auto& row) { return row.name == name; });
    return found == kDtypes.end() ? nullptr : found;
}

std::string_view dtype_name(DType dtype) {
    return std::find_if(kDtypes.begin(), kDtypes.end(), [&](const auto& row) { return row.known == dtype; })->name;
}

Header parse_header(std::string_view text, const std::string& origin, const SafetensorsLimits& limits) {
    Header header;
    HeaderHandler handler(header, origin, limits);
    nlohmann::json::sax_parse(text.begin(), text.end(), &handler);
    return header;
}

}  // namespace tessera::io
