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
        while (at_ < text_.size()) {
            whole_ = true;
            step();
            if (whole_) ends_.push_back(at_);
        }
        return result_;
    }

    /// Valid after read().
    const std::vector<std::size_t>& ends() const { return ends_; }

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

    /// Reads a name with its length: "16flash_fwd_kernel".
    void name() {
        std::size_t length = 0;
        while (at_ < text_.size() && is_digit(text_[at_])) {
            length = std::min<std::size_t>(length * 10 + static_cast<std::size_t>(text_[at_] - '0'), text_.size());
            ++at_;
        }
        const std::string_view word = text_.substr(at_, length);
        whole_ = word.size() == length;
        at_ += word.size();
        if (word.substr(0, 12) == "_GLOBAL__N_1") return;
        // The first part of a nested name is separated like an argument; later parts are joined to it by "::".
        const bool begins_nested = !open_.empty() && open_.back() == Open::nested && nested_begins();
        if (begins_nested && open_.size() > 1 && !fresh_ && !result_.empty()) {
            result_ += ",";
            fresh_ = true;
        }
        separate();
        result_ += word;
        last_name_depth_ = open_.size();
    }

    /// True if this level has read no name.
    bool nested_begins() const { return last_name_depth_ < open_.size(); }

    /// Reads a literal: "Li128E", "Lb1E", "Lj8E", "LN5cute4C...E128E".
    void literal() {
        ++at_;
        whole_ = false;
        if (at_ >= text_.size()) return;
        const char type = text_[at_];
        if (type < 'a' || type > 'z') return;  // an enumerator: its type is read as a name, its value is skipped
        ++at_;
        std::string digits;
        while (at_ < text_.size() && text_[at_] != 'E' && digits.size() < 20) digits += text_[at_++];
        whole_ = at_ < text_.size() && text_[at_] == 'E';
        if (whole_) ++at_;
        if (!whole_ || digits.empty()) return;
        separate();
        result_ += type == 'b' ? (digits == "0" ? "false" : "true") : digits;
    }

    std::string_view text_;
    std::size_t at_ = 0;
    std::string result_;
    std::vector<Open> open_;
    bool fresh_ = true;
    std::size_t last_name_depth_ = 0;
    bool whole_ = true;  ///< the piece that step() read ends before the text does
    std::vector<std::size_t> ends_;
};

/// Adds up sizes by the ABI's numbering of substitutions: each part of a nested name and each template with its
/// arguments has a number. Pointers and the like have numbers too, which are not tracked here. A reference therefore
/// counts as the largest of its neighbours.
class SizeOfMangled {
 public:
    explicit SizeOfMangled(std::string_view text) : text_(text) {}

    double read() {
        open_.push_back({'x', 0, 0});
        if (text_.substr(0, 2) == "_Z") at_ = 2;
        while (at_ < text_.size() && open_.front().size < kEnough) step();
        double total = 0;
        for (const Frame& frame : open_) total += frame.size;
        return total;
    }

 private:
    static constexpr double kEnough = 1e9;

    struct Frame {
        char kind;
        double size;  ///< size of everything in the scope
        double last;  ///< size of the name that the next arguments belong to
    };

    void step() {
        const char c = text_[at_];
        if (is_digit(c)) return name();
        ++at_;
        if (c == 'N' || c == 'J' || c == 'X') open_.push_back({c, 0, 0});
        else if (c == 'I') open_.push_back({c, 2, 0});
        else if (c == 'S') reference();
        else if (c == 'L') literal();
        else if (c == 'E' && open_.size() > 1) close();
        else open_.back().size += 8;
    }

    void add(double size) {
        Frame& frame = open_.back();
        frame.size += size + 2;
        frame.last = frame.kind == 'N' ? frame.size : size;
    }

    void keep() { known_.push_back(open_.back().last); }

    void name() {
        std::size_t length = 0;
        while (at_ < text_.size() && is_digit(text_[at_]))
            length = std::min(length * 10 + static_cast<std::size_t>(text_[at_++] - '0'), text_.size());
        length = std::min(length, text_.size() - at_);
        at_ += length;
        add(static_cast<double>(length));
        keep();
    }

    void literal() {
        if (at_ >= text_.size() || text_[at_] < 'a' || text_[at_] > 'z') return;
        const std::size_t end = text_.find('E', at_);
        at_ = end == std::string_view::npos ? text_.size() : end + 1;
        open_.back().size += 8;
    }

    void reference() {
        std::size_t index = 0;
        const std::size_t begin = at_;
        for (; at_ < text_.size() && (is_digit(text_[at_]) || (text_[at_] >= 'A' && text_[at_] <= 'Z')); ++at_) {
            const auto digit =
                static_cast<std::size_t>(is_digit(text_[at_]) ? text_[at_] - '0' : text_[at_] - 'A' + 10);
            index = std::min<std::size_t>(index * 36 + digit, text_.size());
        }
        if (at_ > begin) ++index;
        const bool plain = at_ < text_.size() && text_[at_] == '_';
        ++at_;
        double largest = 8;  // at least that of "St" or "Sa"
        constexpr std::size_t kNear = 4;
        index = std::min(index, known_.empty() ? 0 : known_.size() - 1);
        for (std::size_t i = index < kNear ? 0 : index - kNear; plain && i < known_.size() && i <= index + kNear; ++i)
            largest = std::max(largest, known_[i]);
        add(largest);
    }

    void close() {
        const Frame done = open_.back();
        open_.pop_back();
        if (done.kind != 'I') return add(done.size);
        Frame& owner = open_.back();
        owner.size += done.size;
        owner.last = owner.kind == 'N' ? owner.size : owner.last + done.size;
        keep();
    }

    std::string_view text_;
    std::size_t at_ = 0;
    std::vector<Frame> open_;
    std::vector<double> known_;
};

}  // namespace

double demangled_size(std::string_view mangled) { return SizeOfMangled(mangled).read(); }

std::string read_mangled(std::string_view mangled) { return MangledReader(mangled).read(); }

std::vector<std::size_t> mangled_ends(std::string_view mangled) {
    MangledReader reader(mangled);
    reader.read();
    return reader.ends();
}

}  // namespace tessera::diagnose
