// SPDX-License-Identifier: Apache-2.0
#include "diagnose/kernel_text.hpp"

#include <cxxabi.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cstdlib>
#include <memory>

#include "diagnose/mangled.hpp"

namespace tessera::diagnose {
namespace {

bool is_digit(char c) { return c >= '0' && c <= '9'; }
bool is_word(char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_'; }

void replace_all(std::string& text, std::string_view from, std::string_view to) {
    std::string result;
    std::size_t begin = 0;
    for (std::size_t at = text.find(from); at != std::string::npos; at = text.find(from, begin)) {
        result.append(text, begin, at - begin).append(to);
        begin = at + from.size();
    }
    text = result.append(text, begin);
}

/// Demangles a whole name; empty if the name is cut off or would become too long.
std::string demangled_whole(const std::string& name) {
    constexpr double kLargest = 1 << 24;
    if (demangled_size(name) > kLargest) return "";
    int status = 0;
    const std::unique_ptr<char, decltype(&std::free)> text(abi::__cxa_demangle(name.c_str(), nullptr, nullptr, &status),
                                                           &std::free);
    return status == 0 && text != nullptr ? text.get() : "";
}

/// Demangles the beginning of a mangled template that is cut off, by closing its open brackets. This also resolves back
/// references ("S1_"). Empty if the result is not a name.
std::string demangled_beginning(std::string_view name) {
    constexpr std::size_t kLongest = 2048;
    constexpr int kTries = 8;
    constexpr int kDeepest = 12;
    if (name.size() > kLongest) return "";
    const std::vector<std::size_t> ends = mangled_ends(name);
    for (std::size_t back = 1; back <= kTries && back <= ends.size(); ++back) {
        const std::size_t end = ends[ends.size() - back];
        std::string closed(name.substr(0, end));
        for (int level = 0; level < kDeepest; ++level) {
            closed += 'E';
            std::string text = demangled_whole(closed + "vv");
            if (text.empty()) continue;
            if (text.back() == ')') text.resize(text.rfind('('));
            while (!text.empty() && (text.back() == '>' || text.back() == ' ')) text.pop_back();
            const std::string rest = read_mangled(name.substr(end));
            return rest.empty() ? text : text + "," + rest;
        }
    }
    return "";
}

std::string demangled(std::string_view name) {
    if (name.substr(0, 2) != "_Z") return std::string(name);
    if (const std::string whole = demangled_whole(std::string(name)); !whole.empty()) return whole;
    const std::size_t dots = name.find("...");  // a tool shortened the middle; the lengths after it are unknown
    const std::string_view head = name.substr(0, dots);
    std::string text = demangled_beginning(head);
    if (!text.empty() && dots == std::string_view::npos) return text + "...";
    if (text.empty()) text = read_mangled(head);
    return dots == std::string_view::npos ? text : text + std::string(name.substr(dots));
}

/// Removes casts, which are a type in brackets before a number:
/// "(int)128" -> "128", "(bool)1" -> "true", "(flashinfer::MaskMode)1" -> "1".
std::string without_casts(const std::string& text) {
    std::string result;
    for (std::size_t at = 0; at < text.size(); ++at) {
        if (text[at] == '(') {
            std::size_t end = at + 1;
            while (end < text.size() && (is_word(text[end]) || text[end] == ':' || text[end] == ' ')) ++end;
            const bool number_follows = end + 1 < text.size() && text[end] == ')' && end > at + 1 &&
                                        (is_digit(text[end + 1]) || text[end + 1] == '-');
            if (number_follows) {
                const std::string_view type = std::string_view(text).substr(at + 1, end - at - 1);
                at = end;
                if (type != "bool") continue;
                result += text[at + 1] == '0' ? "false" : "true";
                ++at;
                continue;
            }
        }
        result += text[at];
    }
    return result;
}

/// Keeps spaces only between two words, and drops the suffixes of "8u" and "2ul".
std::string compact(const std::string& text) {
    std::string result;
    for (std::size_t at = 0; at < text.size(); ++at) {
        const char c = text[at];
        if (std::isspace(static_cast<unsigned char>(c)) != 0) {
            const bool between =
                !result.empty() && is_word(result.back()) && at + 1 < text.size() && is_word(text[at + 1]);
            if (between) result += ' ';
            continue;
        }
        result += c;
        if (!is_digit(c)) continue;
        std::size_t suffix = at + 1;
        while (suffix < text.size() && (text[suffix] == 'u' || text[suffix] == 'l')) ++suffix;
        if (suffix == at + 1 || (suffix < text.size() && is_word(text[suffix]))) continue;
        std::size_t begin = result.size();
        while (begin > 0 && is_digit(result[begin - 1])) --begin;
        if (begin == 0 || !is_word(result[begin - 1])) at = suffix - 1;
    }
    return result;
}

}  // namespace

std::string normalised(std::string_view name) {
    std::string text(name.substr(0, kLongestName));
    text.erase(std::remove_if(text.begin(), text.end(), [](char c) { return static_cast<unsigned char>(c) < 0x20; }),
               text.end());
    const auto first = text.find_first_not_of(" \"'`");
    if (first == std::string::npos) return "";
    text = text.substr(first, text.find_last_not_of(" \"'`") + 1 - first);
    replace_all(text, "\u2026", "...");  // nsys stats writes it
    text = demangled(text).substr(0, kLongestName);
    for (const char* unnamed : {"(anonymous namespace)::", "<unnamed>::", "{anonymous}::", "_GLOBAL__N_1::"})
        replace_all(text, unnamed, "");
    text = compact(without_casts(text));
    if (text.rfind("void ", 0) == 0) text.erase(0, 5);
    return text;
}

bool looks_cut(std::string_view text) {
    if (text.size() >= 3 && text.substr(text.size() - 3) == "...") return true;
    std::int64_t depth = 0;
    for (const char c : text) {
        if (c == '<' || c == '(') ++depth;
        if (c == '>' || c == ')') --depth;
    }
    return depth > 0;
}

bool cut_inside(std::string_view text, std::string_view word, std::size_t least) {
    if (!looks_cut(text)) return false;
    while (!text.empty() && text.back() == '.') text.remove_suffix(1);
    std::size_t begin = text.size();
    while (begin > 0 && is_word(text[begin - 1])) --begin;
    const std::string_view last = text.substr(begin);
    return last.size() >= least && word.substr(0, last.size()) == last;
}

std::optional<std::vector<std::string>> template_arguments(std::string_view text, std::string_view name) {
    std::size_t at = text.find(name);
    while (at != std::string_view::npos) {
        const std::size_t open = at + name.size();
        if (open < text.size() && text[open] == '<' && (at == 0 || !is_word(text[at - 1]))) break;
        at = text.find(name, at + 1);
    }
    if (at == std::string_view::npos) return std::nullopt;
    std::vector<std::string> arguments;
    std::string argument;
    int depth = 0;
    for (std::size_t i = at + name.size() + 1; i < text.size(); ++i) {
        const char c = text[i];
        if (depth == 0 && (c == ',' || c == '>')) {
            arguments.push_back(argument);
            argument.clear();
            if (c == '>') return arguments;
            continue;
        }
        if (c == '<' || c == '(') ++depth;
        if (c == '>' || c == ')') --depth;
        argument += c;
    }
    return arguments;  // the name is cut: the text after the last comma may be incomplete, and is dropped
}

std::optional<int> number(std::string_view text) {
    int value = 0;
    if (text.empty() || !is_digit(text.front())) return std::nullopt;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc{} || end != text.data() + text.size()) return std::nullopt;
    return value;
}

std::optional<int> number_after(std::string_view text, std::string_view prefix) {
    for (std::size_t at = text.find(prefix); at != std::string_view::npos; at = text.find(prefix, at + 1)) {
        const std::size_t begin = at + prefix.size();
        std::size_t end = begin;
        while (end < text.size() && is_digit(text[end])) ++end;
        if (const auto value = number(text.substr(begin, end - begin))) return value;
    }
    return std::nullopt;
}

std::optional<Pair> pair_after(std::string_view text, std::string_view prefix) {
    for (std::size_t at = text.find(prefix); at != std::string_view::npos; at = text.find(prefix, at + 1)) {
        const std::string_view rest = text.substr(at + prefix.size());
        std::size_t middle = 0;
        while (middle < rest.size() && is_digit(rest[middle])) ++middle;
        if (middle == rest.size() || rest[middle] != 'x') continue;
        std::size_t end = middle + 1;
        while (end < rest.size() && is_digit(rest[end])) ++end;
        const auto first = number(rest.substr(0, middle));
        const auto second = number(rest.substr(middle + 1, end - middle - 1));
        if (first && second) return Pair{*first, *second};
    }
    return std::nullopt;
}

std::optional<bool> boolean(std::string_view argument) {
    if (argument == "true" || argument == "1") return true;
    if (argument == "false" || argument == "0") return false;
    return std::nullopt;
}

std::vector<bool> bools_from(const std::vector<std::string>& arguments, std::size_t first) {
    std::vector<bool> bools;
    for (std::size_t i = first; i < arguments.size(); ++i) {
        if (const auto value = boolean(arguments[i])) bools.push_back(*value);
    }
    return bools;
}

bool contains(std::string_view text, std::string_view part) { return text.find(part) != std::string_view::npos; }

bool contains_any(std::string_view text, std::initializer_list<std::string_view> parts) {
    return std::any_of(parts.begin(), parts.end(), [&](std::string_view part) { return contains(text, part); });
}

bool begins_any(std::string_view text, std::initializer_list<std::string_view> parts) {
    const auto begins = [&](std::string_view part) {
        for (std::size_t at = text.find(part); at != std::string_view::npos; at = text.find(part, at + 1)) {
            if (at == 0 || !is_word(text[at - 1])) return true;
        }
        return false;
    };
    return std::any_of(parts.begin(), parts.end(), begins);
}

std::string lower_case(std::string_view text) {
    std::string result(text);
    for (char& c : result) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
    return result;
}

}  // namespace tessera::diagnose
