// SPDX-License-Identifier: Apache-2.0
#include "io/npy_header.hpp"

#include <fmt/format.h>

#include "io/tensor_file.hpp"

namespace tessera::io {
namespace {

class HeaderParser {
 public:
    HeaderParser(std::string_view text, const std::string& origin) : text_(text), origin_(origin) {}

    NpyHeader run() {
        expect('{');
        while (!take('}')) {
            parse_entry();
            if (take('}')) break;
            expect(',');
        }
        if (!(has_descr_ && has_order_ && has_shape_)) fail("the keys descr, fortran_order and shape");
        while (position_ < text_.size() && (text_[position_] == ' ' || text_[position_] == '\n')) ++position_;
        if (position_ != text_.size()) fail("spaces and a newline after the dict");
        return header_;
    }

 private:
    void parse_entry() {
        const std::string_view key = parse_string();
        expect(':');
        if (key == "descr" && !has_descr_) {
            has_descr_ = true;
            header_.descr = parse_string();
        } else if (key == "fortran_order" && !has_order_) {
            has_order_ = true;
            header_.fortran_order = parse_bool();
        } else if (key == "shape" && !has_shape_) {
            has_shape_ = true;
            parse_shape();
        } else {
            bad_data(origin_, fmt::format("header: expected the keys descr, fortran_order and shape once each, got {}",
                                          printable(key)));
        }
    }

    /// Parses a string without escapes, because no legal key or dtype has one.
    std::string_view parse_string() {
        skip_spaces();
        const char quote = position_ < text_.size() ? text_[position_] : '\0';
        if (quote != '\'' && quote != '"') fail("a string");
        const std::size_t begin = position_ + 1;
        const std::size_t end = text_.find(quote, begin);
        if (end == std::string_view::npos) fail("the end of this string");
        const std::string_view value = text_.substr(begin, end - begin);
        if (value.find('\\') != std::string_view::npos) fail("a string without escapes");
        position_ = end + 1;
        return value;
    }

    bool parse_bool() {
        skip_spaces();
        for (const bool value : {true, false}) {
            const std::string_view word = value ? "True" : "False";
            if (text_.substr(position_, word.size()) == word) {
                position_ += word.size();
                return value;
            }
        }
        fail("True or False");
    }

    /// Parses "()", "(3,)", "(3, 4)" or "(3, 4,)"; "(3)" is a number in Python and no tuple.
    void parse_shape() {
        expect('(');
        if (take(')')) return;
        while (true) {
            if (header_.shape.size() == kMaxFileRank) fail(fmt::format("rank <= {}", kMaxFileRank));
            header_.shape.push_back(parse_size());
            const bool comma = take(',');
            if (take(')')) {
                if (header_.shape.size() == 1 && !comma) fail("a comma in a tuple of one size");
                return;
            }
            if (!comma) fail("',' or ')'");
        }
    }

    std::int64_t parse_size() {
        skip_spaces();
        const std::size_t begin = position_;
        std::int64_t value = 0;
        while (position_ < text_.size() && text_[position_] >= '0' && text_[position_] <= '9') {
            const int digit = text_[position_] - '0';
            if (__builtin_mul_overflow(value, 10, &value) || __builtin_add_overflow(value, digit, &value)) {
                fail("a size below 2^63");
            }
            ++position_;
        }
        const std::size_t digits = position_ - begin;
        if (digits == 0) fail("a non-negative integer");
        if (digits > 1 && text_[begin] == '0') fail("a number without leading zeros");
        // Python 2 writes a long integer with an L after it.
        if (position_ < text_.size() && text_[position_] == 'L') ++position_;
        return value;
    }

    void skip_spaces() {
        while (position_ < text_.size() && text_[position_] == ' ') ++position_;
    }

    bool take(char wanted) {
        skip_spaces();
        if (position_ == text_.size() || text_[position_] != wanted) return false;
        ++position_;
        return true;
    }

    void expect(char wanted) {
        if (!take(wanted)) fail(fmt::format("'{}'", wanted));
    }

    [[noreturn]] void fail(const std::string& wanted) const {
        constexpr std::size_t kShown = 24;
        const std::string came =
            position_ == text_.size() ? std::string("its end") : printable(text_.substr(position_, kShown));
        bad_data(origin_, fmt::format("header: expected {} at byte {}, got {}", wanted, position_, came));
    }

    std::string_view text_;
    const std::string& origin_;
    std::size_t position_ = 0;
    NpyHeader header_;
    bool has_descr_ = false, has_order_ = false, has_shape_ = false;
};

}  // namespace

NpyHeader parse_npy_header(std::string_view text, const std::string& origin) {
    return HeaderParser(text, origin).run();
}

}  // namespace tessera::io
