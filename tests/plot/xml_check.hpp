// SPDX-License-Identifier: Apache-2.0
//
// Is a text well-formed XML, as far as the drawings and pages need it: tags that nest, quoted attributes given once,
// known entities, one root. HTML passes when `void_elements` (those without an end tag) are allowed.
#pragma once

#include <algorithm>
#include <set>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::plot {

class XmlCheck {
 public:
    explicit XmlCheck(std::string_view text, std::set<std::string> void_elements = {})
        : text_(text), void_elements_(std::move(void_elements)) {}

    /// The first error, with its byte; empty if there is none.
    std::string run() {
        while (at_ < text_.size() && error_.empty()) {
            if (text_[at_] == '<') tag();
            else content();
        }
        if (error_.empty() && !open_.empty()) fail("not closed: " + open_.back());
        if (error_.empty() && roots_ != 1) fail("expected one root element");
        return error_;
    }

 private:
    void fail(const std::string& what) {
        if (error_.empty()) error_ = what + " at byte " + std::to_string(at_);
    }
    static bool is_name(char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '-' || c == ':'; }
    bool take(std::string_view word) {
        if (text_.substr(at_, word.size()) != word) return false;
        at_ += word.size();
        return true;
    }
    std::string name() {
        const std::size_t begin = at_;
        while (at_ < text_.size() && is_name(text_[at_])) ++at_;
        return std::string(text_.substr(begin, at_ - begin));
    }
    void space() {
        while (at_ < text_.size() && std::isspace(static_cast<unsigned char>(text_[at_])) != 0) ++at_;
    }
    void entity() {
        for (const std::string_view known : {"&amp;", "&lt;", "&gt;", "&quot;", "&#39;"}) {
            if (take(known)) return;
        }
        fail("unknown entity");
    }
    void content() {
        if (open_.empty() && std::isspace(static_cast<unsigned char>(text_[at_])) == 0) return fail("text outside");
        if (text_[at_] == '&') entity();
        else ++at_;
    }
    void attributes() {
        std::set<std::string> given;
        for (space(); at_ < text_.size() && is_name(text_[at_]); space()) {
            const std::string key = name();
            if (!given.insert(key).second) return fail("twice: " + key);
            if (!take("=")) {
                if (void_elements_.empty()) return fail("attribute without a value");
                continue;
            }
            if (!take("\"")) return fail("attribute without quotes");
            while (at_ < text_.size() && text_[at_] != '"' && error_.empty()) {
                if (text_[at_] == '<') return fail("< in an attribute");
                if (text_[at_] == '&') entity();
                else ++at_;
            }
            if (!take("\"")) return fail("unfinished attribute");
        }
    }
    void tag() {
        if (take("<!doctype html>")) return;
        if (take("</")) {
            const std::string element = name();
            if (open_.empty() || open_.back() != element) return fail("not open: " + element);
            open_.pop_back();
            if (!take(">")) fail("unfinished end tag");
            return;
        }
        ++at_;
        const std::string element = name();
        if (element.empty()) return fail("expected an element");
        if (open_.empty()) ++roots_;
        attributes();
        if (take("/>")) return;
        if (!take(">")) return fail("unfinished tag " + element);
        if (void_elements_.count(element) != 0) return;
        open_.push_back(element);
        if (element != "style" && element != "script") return;
        const std::size_t end = text_.find("</" + element, at_);
        if (end == std::string_view::npos) fail("unfinished " + element);
        else at_ = end;
    }

    std::string_view text_;
    std::set<std::string> void_elements_;
    std::size_t at_ = 0;
    int roots_ = 0;
    std::vector<std::string> open_;
    std::string error_;
};

inline std::string first_xml_error(std::string_view text) { return XmlCheck(text).run(); }

}  // namespace tessera::plot
