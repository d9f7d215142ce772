// SPDX-License-Identifier: Apache-2.0
#include "diagnose/text_columns.hpp"

#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "diagnose/kernel_text.hpp"

namespace tessera::diagnose {
namespace {

constexpr double kNoUnit = 0;

std::string trimmed_cell(std::string_view text) {
    const std::size_t first = text.find_first_not_of(" \t");
    if (first == std::string_view::npos) return "";
    return std::string(text.substr(first, text.find_last_not_of(" \t") + 1 - first));
}

/// Writes both signs for micro, U+00B5 and U+03BC, as "u".
std::string with_ascii_micro(std::string_view text) {
    std::string result;
    for (std::size_t at = 0; at < text.size(); ++at) {
        const std::string_view two = text.substr(at, 2);
        const bool micro = two == "\xC2\xB5" || two == "\xCE\xBC";
        result += micro ? 'u' : text[at];
        if (micro) ++at;
    }
    return result;
}

std::vector<std::string_view> words_of_line(std::string_view line) {
    std::vector<std::string_view> words;
    for (std::size_t at = line.find_first_not_of(" \t"); at != std::string_view::npos;
         at = line.find_first_not_of(" \t", at)) {
        const std::size_t end = std::min(line.find_first_of(" \t", at), line.size());
        words.push_back(line.substr(at, end - at));
        at = end;
    }
    return words;
}

bool is_percent(std::string_view word) {
    return word.size() > 1 && word.back() == '%' && number_of_cell(std::string(word.substr(0, word.size() - 1)));
}

/// A number with a unit of time: "12.3us".
std::optional<double> timed_word(std::string_view word) {
    const std::string text = with_ascii_micro(word);
    if (text.empty() || text.back() == '%' || number_of_cell(text)) return std::nullopt;
    return duration_us(text, kNoUnit);
}

std::string from_word(std::string_view line, std::string_view word) {
    return trimmed_cell(line.substr(static_cast<std::size_t>(word.data() - line.data())));
}

/// "NAME  0.00%  0.000us  0.00%  0.000us  0.000us  43.400ms  70.00%  43.400ms  1.206ms  36"
std::optional<LooseRow> row_of_pytorch(std::string_view line, const std::vector<std::string_view>& words) {
    constexpr std::size_t kNumbers = 10;
    if (words.size() <= kNumbers) return std::nullopt;
    const auto at = [&](std::size_t i) { return words[words.size() - kNumbers + i]; };
    for (const std::size_t percent : {0, 2, 6}) {
        if (!is_percent(at(percent))) return std::nullopt;
    }
    for (const std::size_t time : {1, 3, 4, 5, 7, 8}) {
        if (!timed_word(at(time))) return std::nullopt;
    }
    const auto count = number_of_cell(std::string(at(9)));
    if (!count) return std::nullopt;
    if (*timed_word(at(3)) > 0) return LooseRow{};  // an operator: its kernels have rows of their own
    const auto begin = static_cast<std::size_t>(at(0).data() - line.data());
    return LooseRow{trimmed_cell(line.substr(0, begin)), *timed_word(at(5)), *count};
}

/// "90.0  2,250,706,856  199,200  11,298.7 ... NAME", all times in nanoseconds.
std::optional<LooseRow> row_of_nsys(std::string_view line, const std::vector<std::string_view>& words) {
    constexpr std::size_t kLeast = 5;
    std::size_t numbers = 0;
    while (numbers < words.size() && number_of_cell(std::string(words[numbers]))) ++numbers;
    if (numbers < kLeast || numbers == words.size()) return std::nullopt;
    const double share = *number_of_cell(std::string(words[0]));
    const double total = *number_of_cell(std::string(words[1]));
    const double count = *number_of_cell(std::string(words[2]));
    const double average = *number_of_cell(std::string(words[3]));
    const bool adds_up = count >= 1 && std::abs(total - count * average) <= 0.02 * total + count;
    if (share > 100 || !adds_up) return std::nullopt;
    return LooseRow{from_word(line, words[numbers]), total / 1000, count};
}

/// "GPU activities:  45.35%  2.25071s  199200  11.298us  10.1us  12.9us  NAME"; the first two words in one row only.
std::optional<LooseRow> row_of_nvprof(std::string_view line, const std::vector<std::string_view>& words) {
    const std::size_t first = words.size() > 2 && words[0] == "GPU" && words[1] == "activities:" ? 2 : 0;
    if (words.size() < first + 7 || !is_percent(words[first])) return std::nullopt;
    const auto total = timed_word(words[first + 1]);
    const auto count = number_of_cell(std::string(words[first + 2]));
    if (!total || !count) return std::nullopt;
    for (std::size_t i = 3; i < 6; ++i) {
        if (!timed_word(words[first + i])) return std::nullopt;
    }
    return LooseRow{from_word(line, words[first + 6]), *total, *count};
}

/// "TotalDurationNs" as "total_duration_ns".
std::string with_words_apart(std::string_view title) {
    std::string text;
    for (std::size_t at = 0; at < title.size(); ++at) {
        const auto small = [](char c) { return c >= 'a' && c <= 'z'; };
        if (at > 0 && title[at] >= 'A' && title[at] <= 'Z' && small(title[at - 1])) text += '_';
        text += title[at];
    }
    return lower_case(text);
}

bool is_name_title(const std::string& title) {
    for (const char* known : {"kernel name", "name", "demangled name", "kernel", "operation", "kernel_name",
                              "gpu kernel", "function name", "kernels", "cuda kernel"}) {
        if (title == known) return true;
    }
    return false;
}

/// The words of a title, split at all but letters and digits: "avg_us" has two, and so has "Duration [ms]".
std::vector<std::string> words_of_title(std::string_view title) {
    std::vector<std::string> words(1);
    for (const char c : title) {
        const bool part = (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '\'';
        if (part) words.back() += c;
        else if (!words.back().empty()) words.emplace_back();
    }
    if (words.back().empty()) words.pop_back();
    return words;
}

bool has_title_word(const std::vector<std::string>& words, std::initializer_list<std::string_view> known) {
    return std::any_of(words.begin(), words.end(), [&](const std::string& word) {
        return std::find(known.begin(), known.end(), word) != known.end();
    });
}

/// True for "Instances", "# of Calls", "n", "number of runs".
bool is_count_title(const std::string& title) {
    std::vector<std::string> words = words_of_title(title);
    const bool leads = !words.empty() && has_title_word({words[0]}, {"number", "num", "no", "n", "kern"});
    if (leads && words.size() > 1) words.erase(words.begin());
    if (words.size() > 1 && words[0] == "of") words.erase(words.begin());
    if (words.size() > 1 && words[1] == "count") words.pop_back();
    return words.size() == 1 && has_title_word(words, {"instances", "inst", "count", "counts", "calls", "call", "runs",
                                                       "launches", "launch", "invocations", "n"});
}

/// True for a time of one run: an average, or a time per call.
bool is_average_title(const std::vector<std::string>& words) {
    // In nsys' report of executions, a kernel's own times begin with K.
    if (has_title_word({words[0]}, {"avg", "kavg", "average", "mean", "per"})) return true;
    const bool of_time = has_title_word({words[0]}, {"time", "us", "ms", "ns", "duration"});
    return of_time && has_title_word(words, {"avg", "average", "mean", "per", "call", "run", "launch"});
}

/// True for statistics that say nothing of the sum.
bool is_statistic(const std::vector<std::string>& words) {
    return has_title_word(words, {"min", "max", "med", "median", "std", "stddev", "minimum", "maximum"});
}

/// True for the sum of a kernel's runs. The caller takes the first of such columns.
bool is_total_title(const std::vector<std::string>& words) {
    if (words[0] == "total") return !has_title_word(words, {"dur"});  // nsys: with the time on the host
    const bool alone = words.size() == 1 && has_title_word(words, {"ms", "us", "ns"});
    const bool of_gpu = words.size() > 1 && has_title_word({words[0]}, {"gpu", "self", "cuda"}) && words[1] == "time";
    return words[0] == "time" || alone || of_gpu;
}

}  // namespace

std::optional<double> number_of_cell(std::string text) {
    // Commas must leave groups of three digits: "43,4" is no 434.
    const std::size_t point = std::min(text.find('.'), text.size());
    for (std::size_t at = text.find(','); at != std::string::npos; at = text.find(',', at + 1)) {
        const std::size_t next = std::min({text.find(',', at + 1), point, text.size()});
        if (at == 0 || at > point || next != at + 4) return std::nullopt;
    }
    text.erase(std::remove(text.begin(), text.end(), ','), text.end());
    if (text.empty()) return std::nullopt;
    // The browser's library has no std::from_chars for doubles.
    if (text.find_first_not_of("0123456789.eE+-") != std::string::npos) return std::nullopt;
    char* end = nullptr;
    const double value = std::strtod(text.c_str(), &end);
    if (end != text.c_str() + text.size() || !std::isfinite(value) || value < 0) return std::nullopt;
    return value;
}

double microseconds_in(std::string_view text) {
    for (const std::string& word : words_of_title(lower_case(with_ascii_micro(text)))) {
        if (has_title_word({word}, {"ns", "nsec", "nsecs", "nsecond", "nseconds", "nanosecond", "nanoseconds"}))
            return 1e-3;
        if (has_title_word({word}, {"us", "usec", "usecs", "usecond", "useconds", "microsecond", "microseconds"}))
            return 1;
        if (has_title_word({word}, {"ms", "msec", "msecs", "msecond", "mseconds", "millisecond", "milliseconds"}))
            return 1e3;
        if (has_title_word({word}, {"s", "sec", "secs", "second", "seconds"})) return 1e6;
    }
    return 0;
}

std::optional<double> duration_us(const std::string& cell, double unit_us) {
    const std::string text = with_ascii_micro(trimmed_cell(cell));
    const std::size_t unit = text.find_first_not_of("0123456789.,");
    if (unit == std::string::npos) {
        const auto value = number_of_cell(text);
        return value && unit_us > 0 ? std::optional(*value * unit_us) : std::nullopt;
    }
    const auto value = number_of_cell(text.substr(0, unit));
    const std::string word = trimmed_cell(text.substr(unit));
    const bool short_word =
        word.size() <= 8 && word.find_first_not_of("abcdefghijklmnopqrstuvwxyz") == std::string::npos;
    const double us = short_word ? microseconds_in(word) : 0;
    return value && us > 0 ? std::optional(*value * us) : std::nullopt;
}

std::optional<Columns> columns_of(const std::vector<std::string>& titles) {
    Columns columns;
    for (std::size_t i = 0; i < titles.size(); ++i) {
        const std::string title = with_ascii_micro(lower_case(trimmed_cell(titles[i])));
        const std::string apart = with_ascii_micro(with_words_apart(trimmed_cell(titles[i])));
        const int at = static_cast<int>(i);
        const auto begins = [&](std::string_view with) { return title.compare(0, with.size(), with) == 0; };
        const std::vector<std::string> words = words_of_title(apart);
        const double unit = microseconds_in(apart);
        if (is_name_title(title) || is_name_title(apart)) columns.name = at;
        else if (apart == "total_duration_ns") columns.total = at, columns.total_us = unit, columns.rocprof = true;
        else if (apart == "start_timestamp") columns.start = at, columns.start_us = 1e-3;
        else if (apart == "end_timestamp") columns.end = at, columns.rocprof = true;
        else if (title == "cuda_time_us") columns.total = at, columns.total_us = 1, columns.tree = true;
        else if (title == "metric name") columns.metric = at;
        else if (title == "metric unit") columns.unit = at;
        else if (title == "metric value") columns.value = at;
        else if (title == "id") columns.id = at;
        else if (title == "cc") columns.capability = at;
        else if (title == "cpu total") columns.cpu_total = at;
        else if (begins("gpu__time_duration.sum"))
            columns.gpu_time = at, columns.gpu_time_us = unit > 0 ? unit : columns.gpu_time_us;
        else if (is_count_title(title)) columns.count = at;
        else if (contains(title, "%") || words.empty() || is_statistic(words)) continue;
        else if (is_average_title(words)) columns.average = at, columns.average_us = unit;
        else if (begins("start")) columns.start = at, columns.start_us = unit;
        else if (begins("duration") || begins("kernel dur")) columns.duration = at, columns.duration_us = unit;
        else if (title == "self cuda" || title == "self xpu" || title == "self device")
            columns.total = at, columns.total_us = unit, columns.self_time = true;
        else if (begins("total time")) columns.total = at, columns.total_us = unit;
        else if (columns.total < 0 && is_total_title(words)) columns.total = at, columns.total_us = unit;
    }
    return columns.known() ? std::optional(columns) : std::nullopt;
}

std::vector<std::string> markdown_cells(std::string_view line) {
    const std::string text = trimmed_cell(line);
    if (text.size() < 3 || text.front() != '|') return {};
    std::vector<std::string> cells;
    std::size_t begin = 1;
    for (std::size_t at = begin; at < text.size(); ++at) {
        if (text[at] != '|' || text[at - 1] == '\\') continue;
        cells.push_back(trimmed_cell(std::string_view(text).substr(begin, at - begin)));
        begin = at + 1;
    }
    if (begin < text.size()) cells.push_back(trimmed_cell(std::string_view(text).substr(begin)));
    for (std::string& cell : cells) {
        for (const std::string_view mark : {"**", "`"}) {
            if (cell.size() >= 2 * mark.size() && cell.substr(0, mark.size()) == mark &&
                cell.substr(cell.size() - mark.size()) == mark)
                cell = cell.substr(mark.size(), cell.size() - 2 * mark.size());
        }
    }
    return cells;
}

bool is_markdown_rule(const std::vector<std::string>& cells) {
    return !cells.empty() && std::all_of(cells.begin(), cells.end(), [](const std::string& cell) {
        return !cell.empty() && cell.find_first_not_of("-: ") == std::string::npos;
    });
}

std::optional<LooseRow> loose_row(std::string_view line) {
    const std::vector<std::string_view> words = words_of_line(line);
    if (auto row = row_of_pytorch(line, words)) return row;
    if (auto row = row_of_nsys(line, words)) return row;
    return row_of_nvprof(line, words);
}

std::string plain_line(std::string_view line) {
    constexpr std::size_t kLongestRank = 16;
    if (line.substr(0, 5) == "[rank" || line.substr(0, 8) == "[default") {
        const std::size_t end = line.substr(0, kLongestRank).find("]:");
        if (end != std::string_view::npos) line.remove_prefix(end + 2);
        line.remove_prefix(std::min(line.find_first_not_of(' '), line.size()));
    }
    std::string text;
    for (std::size_t at = 0; at < line.size(); ++at) {
        const std::string_view three = line.substr(at, 3);
        const bool bar =
            three == "\xE2\x94\x82" || three == "\xE2\x94\x83" || three == "\xE2\x95\x91";  // of one or two lines
        text += bar ? '|' : line[at];
        if (bar) at += 2;
    }
    return text;
}

bool is_ruling(std::string_view line) {
    const bool blank = line.find_first_not_of(" \t-") == std::string_view::npos;
    const bool any = std::any_of(line.begin(), line.end(), [](char c) {
        return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9');
    });
    const bool markdown = line.find("|-") != std::string_view::npos || line.find("| -") != std::string_view::npos ||
                          line.find("|:") != std::string_view::npos || line.find("| :") != std::string_view::npos;
    return !blank && !any && !markdown;
}

std::vector<std::string> tree_cells(std::string_view line) {
    constexpr std::string_view kBar = " | ";
    std::vector<std::string> cells;
    std::size_t begin = 0;
    for (std::size_t at = line.find(kBar); at != std::string_view::npos; at = line.find(kBar, begin)) {
        cells.push_back(trimmed_cell(line.substr(begin, at - begin)));
        begin = at + kBar.size();
    }
    if (!cells.empty()) cells.push_back(trimmed_cell(line.substr(begin)));
    return cells;
}

std::string autotuned_name(std::string_view line) {
    const std::vector<std::string_view> words = words_of_line(line);
    if (words.size() < 4 || words[2] != "ms" || !number_of_cell(std::string(words[1])) || !is_percent(words[3]))
        return "";
    return std::string(words[0]);
}

std::vector<std::string> fields_of(std::string_view line, char separator) {
    std::vector<std::string> fields(1);
    bool quoted = false;
    for (std::size_t at = 0; at < line.size(); ++at) {
        const char c = line[at];
        if (c == '"') {
            if (quoted && at + 1 < line.size() && line[at + 1] == '"') fields.back() += line[++at];
            else quoted = !quoted;
        } else if (c == separator && !quoted) {
            fields.emplace_back();
        } else {
            fields.back() += c;
        }
    }
    return fields;
}

std::optional<LooseRow> separated_row(std::string_view line) {
    const bool by_tabs = line.find('\t') != std::string_view::npos;
    if (!by_tabs && line.find(';') == std::string_view::npos) return std::nullopt;
    LooseRow row;
    std::optional<double> us, count;
    for (const std::string& field : fields_of(line, by_tabs ? '\t' : ';')) {
        const std::string cell = trimmed_cell(field);
        const auto number = number_of_cell(cell);
        const auto time = timed_word(cell);
        const bool is_number = number || time || is_percent(cell);
        if (cell.empty()) continue;
        if (!is_number && cell.size() > row.name.size()) row.name = cell;
        if (!is_number) continue;
        if (!row.name.empty() && number && *number == std::floor(*number) && !count) count = number;
        else if (!row.name.empty() && time && !us) us = time;
        else row.all_read = false;
    }
    if (row.name.empty() || (!us && !count && row.all_read)) return std::nullopt;
    if (!row.all_read) us = count = std::nullopt;  // which number is what is not clear
    row.us = us.value_or(0);
    row.count = count.value_or(1);
    return row;
}

/// The text without anything in brackets. Dots at the end of a name that was cut off close its brackets.
static std::string outside_brackets(std::string_view line) {
    std::string text;
    int depth = 0;
    for (std::size_t at = 0; at < line.size(); ++at) {
        const bool cut = line.substr(at, 3) == "..." || line.substr(at, 3) == "\xE2\x80\xA6";
        const char c = line[at];
        if (cut) depth = 0;
        if (c == '<' || c == '(' || c == '[') ++depth;
        else if (c == '>' || c == ')' || c == ']') depth = std::max(0, depth - 1);
        else if (depth == 0) text += c;
    }
    return text;
}

bool has_numbers_beside(std::string_view line) {
    const std::string text = outside_brackets(line);
    int numbers = 0;
    for (const std::string_view word : words_of_line(text)) {
        if (timed_word(word)) return true;
        if (number_of_cell(std::string(word)) || is_percent(word)) ++numbers;
    }
    const bool may_end_in_one = line.find('(') != std::string_view::npos;  // "void f(int, int) 1" may be a name
    return numbers > (may_end_in_one ? 1 : 0);
}

bool is_sentence(std::string_view line) {
    constexpr int kManyWords = 6;
    const std::string text = outside_brackets(line);
    int words = 0;
    for (const std::string_view word : words_of_line(text)) {
        const std::size_t end = std::min(word.find_last_not_of(".,;:!?") + 1, word.size());
        const bool plain = std::all_of(word.begin(), word.begin() + static_cast<std::ptrdiff_t>(end), [](char c) {
            return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '-' || c == '\'';
        });
        if (end > 0 && plain) ++words;
    }
    return words >= kManyWords;
}

}  // namespace tessera::diagnose
