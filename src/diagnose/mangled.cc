// SPDX-License-Identifier: Apache-2.0
#include "diagnose/mangled.hpp"

#include <algorithm>
#include <vector>

namespace tessera::diagnose {
namespace {

bool is_digit(char c) { return c >= '0' && c <= '9'; }

class MangledReader {
 public:
    explicit MangledReader(std::string_view text) : text_(text) {}

    std::string read() {
        if (text_.substr(0, 2) == "_Z") at_ = 2;
        while (at_ < text_.size()) step();
        return result_;
    }

 private:
    enum class Open : char { nested, arguments };

    void step() {
        const char c = text_[at_];
        if (is_digit(c)) return name();
        if (c == 'L') return literal();
        ++at_;
        switch (c) {
            case 'N': open_.push_back(Open::nested); break;
            case 'I':
                open_.push_back(Open::arguments);
                result_ += '<';
                fresh_ = true;
                break;
            case 'S':  // a reference back: S_, S1_, St
                while (at_ < text_.size() && (is_digit(text_[at_]) || (text_[at_] >= 'A' && text_[at_] <= 'Z'))) ++at_;
                if (at_ < text_.size()) ++at_;
                break;
            case 'E':
                if (open_.empty()) break;
                if (open_.back() == Open::arguments) result_ += '>';
                open_.pop_back();
                fresh_ = false;
                break;
            default: break;  // a built-in type or a qualifier
        }
    }

    void separate() {
        if (!fresh_ && !result_.empty()) {
            const bool argument = !open_.empty() && open_.back() == Open::arguments;
            result_ += argument ? "," : "::";
        }
        fresh_ = false;
    }

    /// "16flash_fwd_kernel"
    void name() {
        std::size_t length = 0;
        while (at_ < text_.size() && is_digit(text_[at_])) {
            length = std::min<std::size_t>(length * 10 + static_cast<std::size_t>(text_[at_] - '0'), text_.size());
            ++at_;
        }
        const std::string_view word = text_.substr(at_, length);
        at_ += word.size();
        if (word.substr(0, 12) == "_GLOBAL__N_1") return;
        // The first name of a nested one stands among arguments; those after it are joined to it.
        const bool begins_nested = !open_.empty() && open_.back() == Open::nested && nested_begins();
        if (begins_nested && open_.size() > 1 && !fresh_ && !result_.empty()) {
            result_ += ",";
            fresh_ = true;
        }
        separate();
        result_ += word;
        last_name_depth_ = open_.size();
    }

    /// No name was read on this level since it was opened.
    bool nested_begins() const { return last_name_depth_ < open_.size(); }

    /// "Li128E", "Lb1E", "Lj8E", "LN5cute4C...E128E"
    void literal() {
        ++at_;
        if (at_ >= text_.size()) return;
        const char type = text_[at_];
        if (type < 'a' || type > 'z') return;  // an enumerator: its type is read as a name, its value is skipped
        ++at_;
        std::string digits;
        while (at_ < text_.size() && text_[at_] != 'E' && digits.size() < 20) digits += text_[at_++];
        const bool whole = at_ < text_.size() && text_[at_] == 'E';
        if (whole) ++at_;
        if (!whole || digits.empty()) return;
        separate();
        result_ += type == 'b' ? (digits == "0" ? "false" : "true") : digits;
    }

    std::string_view text_;
    std::size_t at_ = 0;
    std::string result_;
    std::vector<Open> open_;
    bool fresh_ = true;
    std::size_t last_name_depth_ = 0;
};

}  // namespace

std::string read_mangled(std::string_view mangled) { return MangledReader(mangled).read(); }

}  // namespace tessera::diagnose
