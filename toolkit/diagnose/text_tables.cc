// SPDX-License-Identifier: Apache-2.0
//
// Reads text: csv tables of nsys stats and ncu, printed tables of nsys stats and PyTorch's profiler, or names of
// kernels, one per line.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <map>

#include "diagnose/kernel_text.hpp"
#include "diagnose/name.hpp"
#include "diagnose/text_columns.hpp"
#include "diagnose/trace.hpp"
#include "tessera/error.hpp"

namespace tessera::diagnose {
namespace {

constexpr std::size_t kLongestLine = std::size_t{1} << 20;
constexpr double kLongestRun = 1e15;  // us; keeps sums finite
constexpr double kMostInARow = 1e9;

/// Reads the lines of a stream; a line that is too long is cut.
class Lines {
 public:
    explicit Lines(ByteStream& stream) : stream_(stream), buffer_(std::size_t{1} << 16) {}

    bool next(std::string& line) {
        line.clear();
        bool any = false;
        while (true) {
            if (at_ == filled_) {
                filled_ = stream_.read(buffer_);
                at_ = 0;
                if (filled_ == 0) return any;
            }
            const char c = buffer_[at_++];
            any = true;
            if (c == '\n') return true;
            if (c != '\r' && line.size() < kLongestLine) line += c;
        }
    }

 private:
    ByteStream& stream_;
    std::vector<char> buffer_;
    std::size_t at_ = 0;
    std::size_t filled_ = 0;
};

/// A column of a printed table, as a range of characters.
struct Span {
    std::size_t begin = 0;
    std::size_t end = 0;
};

/// Finds the columns by a line like " -----  ---------" under the titles; none if the line is another.
std::vector<Span> spans_of(std::string_view line) {
    std::vector<Span> spans;
    for (std::size_t at = line.find('-'); at != std::string_view::npos; at = line.find('-', at)) {
        const std::size_t end = std::min(line.find_first_not_of('-', at), line.size());
        spans.push_back({at, end});
        at = end;
    }
    const bool only_dashes = line.find_first_not_of("- ") == std::string_view::npos;
    return only_dashes && spans.size() > 2 ? spans : std::vector<Span>{};
}

/// Splits a line at these columns and trims the spaces; the last field extends to the end of the line.
std::vector<std::string> fields_under(const std::vector<Span>& spans, std::string_view line) {
    std::vector<std::string> fields;
    for (const Span& span : spans) {
        const std::size_t begin = std::min(span.begin, line.size());
        const std::size_t end = &span == &spans.back() ? line.size() : std::min(span.end, line.size());
        std::string_view field = line.substr(begin, end - begin);
        field.remove_prefix(std::min(field.find_first_not_of(' '), field.size()));
        fields.emplace_back(field.substr(0, field.find_last_not_of(' ') + 1));
    }
    return fields;
}

class TextReader {
 public:
    TextReader(Trace& trace, ByteStream& stream) : trace_(trace), lines_(stream) {}

    /// Throws Error(bad_data) for a text without kernels.
    void read() {
        std::string line;
        std::string previous;
        while (lines_.next(line)) {
            take(line, previous);
            previous = line;
        }
        end_tree();
        refuse_prose();
        const bool compute = table_ && (columns_.per_metric() || columns_.gpu_time >= 0);
        const bool of_pytorch = columns_.cpu_total >= 0 || columns_.self_time;
        trace_.tool = loose_             ? "rows of a profiler's table"
                      : !table_          ? kNamesAlone
                      : in_markdown_     ? "a table in Markdown"
                      : compute          ? "Nsight Compute"
                      : of_pytorch       ? "PyTorch profiler's table"
                      : columns_.rocprof ? "rocprof"
                      : columns_.tree    ? "vLLM's layerwise profile"
                                         : "Nsight Systems";
        if (!table_ && prose_ > 0 && !trace_.runs.empty())
            trace_.notes.push_back(
                fmt::format("lines left out, because they are sentences and not kernel names: {}", prose_));
        if (unread_ > 0)
            trace_.notes.push_back(
                fmt::format("lines whose numbers were not read, so that counts and times lack them: {} (paste a table "
                            "with its line of "
                            "titles)",
                            unread_));
        if (unitless_ > 0)
            trace_.notes.push_back(
                fmt::format("rows whose times were not read, because neither the title nor the cell names a unit: {} "
                            "(write it in the title, as in \"Time (ms)\")",
                            unitless_));
        if (sums_of_durations_ && timed_)
            trace_.notes.emplace_back(
                "the table has durations beside counts: they were read as the sum of a row's runs");
        if (candidates_ > 0)
            trace_.notes.push_back(
                fmt::format("lines of Inductor's autotuning: {}; they are candidates, timed one by one, and the first "
                            "of each list runs: their times were not read",
                            candidates_));
        if (sums_apart_)
            trace_.notes.emplace_back("rows without titles: a whole number was read as runs, a time as their sum");
        trace_.timed = timed_;
        trace_.ordered = compute || (table_ && columns_.start >= 0 && columns_.count < 0);
        double read_us = 0;
        for (const KernelRun& run : trace_.runs) read_us += run.us;
        constexpr double kRounding = 0.01;
        if (read_us < (1 - kRounding) * stated_us_)
            trace_.notes.push_back(fmt::format(
                "the kernels' rows add up to {:.1f} % of the time that the table states: shares are of these "
                "rows (row_limit=-1 prints all)",
                100 * read_us / stated_us_));
        if (table_ && !timed_ && unitless_ == 0)
            trace_.notes.emplace_back("the table has no times that could be read, so kernels are counted only");
    }

 private:
    /// Throws if most lines are sentences and none of the others names a known kernel.
    void refuse_prose() const {
        const auto names = static_cast<std::int64_t>(trace_.runs.size());
        if (table_ || loose_ || names == 0 || prose_ <= names) return;
        const bool any = std::any_of(trace_.runs.begin(), trace_.runs.end(), [&](const KernelRun& run) {
            return is_known(read_name(trace_.kernels[run.name]));
        });
        if (any) return;
        throw Error(ErrorCode::bad_data, trace_.file,
                    fmt::format("expected a table of kernels or their names, got a text: {} of {} lines are sentences, "
                                "and no other line is the name of a known kernel",
                                prose_, prose_ + names));
    }

    void take(const std::string& whole, const std::string& previous) {
        const std::string line = plain_line(whole);
        if (begins_any(line, {"==PROF==", "==WARNING==", "==ERROR=="})) return;
        if (is_ruling(line)) return drop_titles();
        if (const std::vector<Span> spans = spans_of(line); !spans.empty()) {
            const auto columns = columns_of(fields_under(spans, previous));
            spans_ = columns ? spans : std::vector<Span>{};  // a rule without titles above it ends the table
            if (columns) begin_table(*columns, spans.size());
            return;
        }
        if (!spans_.empty()) {
            if (not_blank(line)) row(fields_under(spans_, line));
            else spans_.clear();
            return;
        }
        constexpr std::string_view kTotal = "Self CUDA time total:";  // the last line of PyTorch's table
        if (line.compare(0, 20, "Self CPU time total:") == 0) return;
        if (line.compare(0, kTotal.size(), kTotal) == 0) {
            stated_us_ = duration_us(line.substr(kTotal.size()), 0).value_or(0);
            return;
        }
        if (tree_) {
            if (const std::vector<std::string> cells = tree_cells(line); cells.size() == titles_) return branch(cells);
            end_tree();
        }
        if (const std::vector<std::string> cells = markdown_cells(line); cells.size() > 1) return markdown(cells);
        markdown_ = false;
        if (const std::vector<std::string> titles = tree_cells(line); titles.size() > 2) {
            if (const auto columns = columns_of(titles)) {
                begin_table(*columns, titles.size());
                tree_ = true;
                return;
            }
        }
        for (const char separator : {',', '\t', ';'}) {
            const std::vector<std::string> titles = fields_of(line, separator);
            const auto columns = titles.size() > 2 ? columns_of(titles) : std::nullopt;
            if (!columns) continue;
            begin_table(*columns, titles.size());
            csv_ = true;
            separator_ = separator;
            return;
        }
        const std::vector<std::string> fields = fields_of(line, separator_);
        if (csv_ && fields.size() >= titles_) {
            row(joined(fields));
        } else if (const auto loose = loose_row(line)) {
            add_loose(*loose);
        } else if (const auto separated = table_ ? std::nullopt : separated_row(line);
                   separated && !is_prose(separated->name)) {
            add_loose(*separated);
            sums_apart_ = sums_apart_ || separated->us > 0;
        } else if (!table_ && is_prose(line) && autotuned_name(line).empty()) {
            ++prose_;
        } else if (!table_ && not_blank(line)) {
            name(line);
        }
    }

    /// True if a line is a sentence that does not quote the name of a known kernel.
    static bool is_prose(const std::string& line) {
        constexpr std::int64_t kManySpaces = 5;  // "Memcpy DtoD (Device -> Device)" has four
        if (std::count(line.begin(), line.end(), ' ') < kManySpaces) return false;
        if (!contains_any(line, {"_", "::", "<"})) return true;
        return is_sentence(line) && !is_known(read_name(line));
    }

    static bool is_known(const NameReading& reading) {
        const bool named = reading.family != Family::unknown && reading.family != Family::tessera;
        return named && reading.role == Role::attention && reading.confidence != Confidence::unsure;
    }

    /// Reads a row of a tree of modules and kernels, such as "|-- name | 59.20 | 0.18 | 1.00". Modules repeat the time
    /// of the rows under them, so a row counts if the next one is no deeper.
    void branch(const std::vector<std::string>& cells) {
        const std::size_t depth = cells[0].find_first_not_of("|- ");
        if (!waiting_.empty() && depth <= depth_) row(waiting_);
        depth_ = depth;
        waiting_ = cells;
        waiting_[0].erase(0, std::min(depth, waiting_[0].size()));
    }

    void end_tree() {
        if (!waiting_.empty()) row(waiting_);
        waiting_.clear();
        tree_ = false;
    }

    /// Takes back the line above a rule, which was read as a name and is the titles.
    void drop_titles() {
        if (!table_ && titles_taken_ && !trace_.runs.empty()) {
            trace_.runs.pop_back();
            --unread_;
        }
        titles_taken_ = false;
    }

    /// Reads a line of a Markdown table: its titles, the rule under them, or a row.
    void markdown(const std::vector<std::string>& cells) {
        if (is_markdown_rule(cells)) return drop_titles();
        titles_taken_ = false;
        if (const auto columns = columns_of(cells)) {
            begin_table(*columns, cells.size());
            markdown_ = in_markdown_ = true;
        } else if (markdown_) {
            std::vector<std::string> fields = cells;
            fields.resize(std::max(titles_, cells.size()));
            row(fields);
        } else if (!table_) {
            const auto longest =
                std::max_element(cells.begin(), cells.end(),
                                 [](const std::string& a, const std::string& b) { return a.size() < b.size(); });
            if (has_letter(*longest) && !is_prose(*longest)) {
                name(*longest);
                ++unread_;
                titles_taken_ = true;
            }
        }
    }

    void add_loose(const LooseRow& row) {
        if (row.name.empty() || is_no_kernel(row.name)) return;
        KernelRun run;
        run.name = trace_.kernels.number_of(std::string_view(row.name).substr(0, kLongestName));
        run.us = std::min(row.us, kLongestRun);
        run.count = static_cast<std::int64_t>(std::clamp(row.count, 1.0, kMostInARow));
        if (!row.all_read) ++unread_;
        timed_ = timed_ || run.us > 0;
        loose_ = true;
        trace_.add(run);
    }

    /// Copies, and the steps of PyTorch's profiler, which repeat the time of all kernels.
    static bool is_no_kernel(const std::string& name) {
        return name.compare(0, 9, "[CUDA mem") == 0 || name.compare(0, 13, "ProfilerStep*") == 0 ||
               name.compare(0, 13, "ProfilerStep#") == 0;
    }

    /// Drops all names read above the first table.
    void begin_table(const Columns& columns, std::size_t titles) {
        if (!table_) trace_.runs.clear();
        loose_ = false;
        columns_ = columns;
        titles_ = titles;
        table_ = true;
        csv_ = markdown_ = in_markdown_ = false;
    }

    static bool not_blank(const std::string& line) { return line.find_first_not_of(" \t") != std::string::npos; }

    /// Joins the fields of a name at the end of a line, whose commas some tools do not quote.
    std::vector<std::string> joined(std::vector<std::string> fields) const {
        for (std::size_t i = titles_; i < fields.size(); ++i) fields[titles_ - 1] += separator_ + fields[i];
        fields.resize(titles_);
        return fields;
    }

    static bool has_letter(const std::string& text) {
        return std::any_of(text.begin(), text.end(),
                           [](char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); });
    }

    void name(const std::string& line) {
        titles_taken_ = false;
        KernelRun run;
        if (const std::string candidate = autotuned_name(line); !candidate.empty()) {
            run.name = trace_.kernels.number_of(std::string_view(candidate).substr(0, kLongestName));
            ++candidates_;
            return trace_.add(run);
        }
        const std::size_t first = line.find_first_not_of(" \t");
        run.name = trace_.kernels.number_of(std::string_view(line).substr(first, kLongestName));
        if (has_numbers_beside(line)) ++unread_;
        trace_.add(run);
    }

    std::string field(const std::vector<std::string>& fields, int column) const {
        return column >= 0 ? fields[static_cast<std::size_t>(column)] : std::string();
    }

    void row(const std::vector<std::string>& fields) {
        const std::string kernel = field(fields, columns_.name);
        if (kernel.empty()) return units(fields);
        if (is_no_kernel(kernel)) return;
        note_backend(kernel, number_of_cell(field(fields, columns_.count)).value_or(1));
        // PyTorch's table also has operators with the time of their kernels, which have rows of their own.
        if (columns_.cpu_total >= 0 && duration_us(field(fields, columns_.cpu_total), 1).value_or(0) > 0) return;
        if (columns_.capability >= 0 && trace_.gpus.empty()) {
            const auto capability = number_of_cell(field(fields, columns_.capability));
            if (capability && *capability < 100)
                trace_.gpus.push_back({.capability = static_cast<int>(std::lround(*capability * 10))});
        }
        if (columns_.per_metric()) return metric(fields, kernel);
        KernelRun run;
        run.name = trace_.kernels.number_of(std::string_view(kernel).substr(0, kLongestName));
        const double count = number_of_cell(field(fields, columns_.count)).value_or(1);
        if (columns_.count >= 0 && columns_.of_one_run()) sums_of_durations_ = true;
        run.count = static_cast<std::int64_t>(std::clamp(count, 1.0, kMostInARow));
        auto us = time_of(fields, count);
        if (!us && columns_.end >= 0) us = time_between(fields);
        if ((columns_.timed() || columns_.end >= 0) && !us) ++(without_unit(fields) ? unitless_ : unread_);
        run.us = std::min(us.value_or(0), kLongestRun);
        timed_ = timed_ || us.has_value();
        // Nsight Compute runs kernels one by one and lists them in that order.
        const double start_unit = columns_.start_us > 0 ? columns_.start_us : std::max(columns_.duration_us, 1e-3);
        run.start_us = columns_.gpu_time >= 0 ? static_cast<double>(trace_.runs.size())
                                              : duration_us(field(fields, columns_.start), start_unit).value_or(0);
        trace_.add(run);
    }

    /// Notes the backend of scaled_dot_product_attention that an operator of PyTorch's table stands for.
    void note_backend(const std::string& op, double calls) {
        constexpr std::pair<std::string_view, const char*> kBackends[] = {
            {"aten::_scaled_dot_product_attention_math",
             "math path ran, the slow way: matrix products and a softmax in kernels of their own"},
            {"aten::_scaled_dot_product_flash_attention", "flash backend ran"},
            {"aten::_scaled_dot_product_efficient_attention", "memory-efficient backend ran"},
            {"aten::_scaled_dot_product_cudnn_attention", "cuDNN backend ran"}};
        for (const auto& [name, what] : kBackends) {
            if (op != name) continue;
            const auto times = static_cast<std::int64_t>(std::clamp(calls, 1.0, kMostInARow));
            trace_.backends_of_operators.push_back(fmt::format("PyTorch's {} ({} of the operator {})", what,
                                                               times == 1 ? "one call" : fmt::format("{} calls", times),
                                                               op));
        }
    }

    /// The time of all runs of a row: a total, an average times their number, or a duration.
    std::optional<double> time_of(const std::vector<std::string>& fields, double count) const {
        const auto us = duration_us(field(fields, columns_.time()), columns_.time_us());
        return us && columns_.total < 0 && columns_.average >= 0 ? std::optional(*us * count) : us;
    }

    /// The time from a start to an end, in nanoseconds.
    std::optional<double> time_between(const std::vector<std::string>& fields) const {
        const auto start = number_of_cell(field(fields, columns_.start)),
                   end = number_of_cell(field(fields, columns_.end));
        return start && end && *end >= *start ? std::optional((*end - *start) / 1000) : std::nullopt;
    }

    /// True if the time is a number whose unit neither the title nor the cell names.
    bool without_unit(const std::vector<std::string>& fields) const {
        return columns_.time_us() <= 0 && number_of_cell(field(fields, columns_.time()));
    }

    /// Reads the line under the titles that holds the units: those of ncu's raw page and of nvprof's csv.
    void units(const std::vector<std::string>& fields) {
        for (const auto& [column, unit_us] : {std::pair{columns_.gpu_time, &columns_.gpu_time_us},
                                              {columns_.total, &columns_.total_us},
                                              {columns_.average, &columns_.average_us},
                                              {columns_.duration, &columns_.duration_us}}) {
            if (const double unit = microseconds_in(field(fields, column)); unit > 0) *unit_us = unit;
        }
    }

    /// Reads a line of one metric of one run: the first line of a run adds it, and a later one gives its duration.
    void metric(const std::vector<std::string>& fields, const std::string& kernel) {
        const std::string id = field(fields, columns_.id);
        if (id != last_id_ || trace_.runs.empty()) {
            last_id_ = id;
            KernelRun run;
            run.name = trace_.kernels.number_of(std::string_view(kernel).substr(0, kLongestName));
            run.start_us = static_cast<double>(trace_.runs.size());
            trace_.add(run);
        }
        const std::string what = field(fields, columns_.metric);
        if (what != "Duration" && what != "gpu__time_duration.sum") return;
        const double unit = microseconds_in(field(fields, columns_.unit));
        trace_.runs.back().us =
            std::min(number_of_cell(field(fields, columns_.value)).value_or(0) * (unit > 0 ? unit : 1e-3), kLongestRun);
        timed_ = true;
    }

    Trace& trace_;
    Lines lines_;
    Columns columns_;
    bool table_ = false;                // a table has begun
    bool csv_ = false;                  // the table is csv
    char separator_ = ',';              // of csv
    bool markdown_ = false;             // a table in Markdown goes on
    bool in_markdown_ = false;          // the last table is or was one
    bool timed_ = false;                // a time was read
    bool loose_ = false;                // rows came without titles
    bool sums_of_durations_ = false;    // durations stood beside counts
    bool sums_apart_ = false;           // rows without titles had a time of all runs, or of one
    bool titles_taken_ = false;         // the last line of Markdown was read as a name
    bool tree_ = false;                 // a table of modules and kernels goes on
    std::vector<std::string> waiting_;  // its last row
    std::size_t depth_ = 0;             // of that row
    std::int64_t candidates_ = 0;       // of autotuning
    std::int64_t unread_ = 0;
    std::int64_t unitless_ = 0;  // rows whose time has no unit
    double stated_us_ = 0;       // the sum that the table states; 0: none
    std::size_t titles_ = 0;
    std::int64_t prose_ = 0;
    std::vector<Span> spans_;  // columns of a printed table; empty outside of one
    std::string last_id_;
};

}  // namespace

Trace read_text(ByteStream& stream, const std::string& origin) {
    Trace trace;
    trace.file = origin;
    TextReader(trace, stream).read();
    if (trace.runs.empty())
        throw Error(ErrorCode::bad_data, origin, "expected a table of kernels or their names, got none");
    if (const std::string trouble = stream.trouble(); !trouble.empty()) trace.notes.push_back(trouble);
    return trace;
}

}  // namespace tessera::diagnose
