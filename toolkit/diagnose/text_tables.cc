// SPDX-License-Identifier: Apache-2.0
//
// Text: the tables of nsys stats and ncu in csv, of nsys stats and PyTorch's profiler as they print them, or names of
// kernels, one a line.
#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <map>

#include "diagnose/kernel_text.hpp"
#include "diagnose/trace.hpp"
#include "tessera/error.hpp"

namespace tessera::diagnose {
namespace {

constexpr std::size_t kLongestLine = std::size_t{1} << 20;
constexpr double kLongestRun = 1e15;  // us; sums of the largest stay numbers
constexpr double kMostInARow = 1e9;

/// Lines of a stream; of one that is too long, its front.
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

/// The fields of a line of csv: quotes doubled inside of quotes.
std::vector<std::string> fields_of(std::string_view line) {
    std::vector<std::string> fields(1);
    bool quoted = false;
    for (std::size_t at = 0; at < line.size(); ++at) {
        const char c = line[at];
        if (c == '"') {
            if (quoted && at + 1 < line.size() && line[at + 1] == '"') fields.back() += line[++at];
            else quoted = !quoted;
        } else if (c == ',' && !quoted) {
            fields.emplace_back();
        } else {
            fields.back() += c;
        }
    }
    return fields;
}

/// A column of a table that is printed: from one character to another.
struct Span {
    std::size_t begin = 0;
    std::size_t end = 0;
};

/// The columns of a line like " -----  ---------", that stands under their titles; none when it is another line.
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

/// The fields of a line under such columns, without the spaces around them; the last one goes to the end of the line.
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

/// A number, with commas between thousands or without.
std::optional<double> real(std::string text) {
    text.erase(std::remove(text.begin(), text.end(), ','), text.end());
    double value = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc{} || end != text.data() + text.size() || !std::isfinite(value) || value < 0)
        return std::nullopt;
    return value;
}

/// Microseconds in one "ns", "usecond", "(ms)"; 0 when it names no unit.
double microseconds_in(std::string_view unit) {
    const std::string lower = lower_case(unit);
    if (contains_any(lower, {"nsec", "ns", "nano"})) return 1e-3;
    if (contains_any(lower, {"usec", "us", "micro"})) return 1;
    if (contains_any(lower, {"msec", "ms", "milli"})) return 1e3;
    if (contains_any(lower, {"second", "(s)"}) || lower == "s") return 1e6;
    return 0;
}

/// Microseconds of "4.768s", "107.681us", or of a number without a unit, which then is `unit_us` microseconds.
double duration_us(const std::string& text, double unit_us) {
    const std::size_t unit = text.find_first_not_of("0123456789.,");
    if (unit == std::string::npos) return real(text).value_or(0) * unit_us;
    return real(text.substr(0, unit)).value_or(0) * microseconds_in(text.substr(unit));
}

/// Where the columns of a table stand; -1 where it has none.
struct Columns {
    int name = -1, total = -1, duration = -1, count = -1, start = -1, metric = -1, unit = -1, value = -1, id = -1,
        capability = -1, gpu_time = -1, cpu_total = -1;
    double unit_us = 1e-3;   ///< of total or duration
    double start_us = 1e-3;  ///< of start

    bool per_metric() const { return metric >= 0 && value >= 0; }
    bool known() const { return name >= 0 && (total >= 0 || duration >= 0 || per_metric() || gpu_time >= 0); }
};

std::optional<Columns> columns_of(const std::vector<std::string>& titles) {
    Columns columns;
    for (std::size_t i = 0; i < titles.size(); ++i) {
        const std::string& title = titles[i];
        const int at = static_cast<int>(i);
        const auto begins = [&](std::string_view with) { return title.compare(0, with.size(), with) == 0; };
        if (title == "Kernel Name" || title == "Name" || title == "Demangled Name" || title == "Kernel")
            columns.name = at;
        else if (begins("Total Time") || title == "Self CUDA") columns.total = at;
        else if (title == "CPU total") columns.cpu_total = at;
        else if (begins("Duration") || begins("Kernel Dur")) columns.duration = at;
        else if (title == "Instances" || title == "Count" || title == "Calls" || title == "# of Calls")
            columns.count = at;
        else if (begins("Start")) columns.start = at;
        else if (title == "Metric Name") columns.metric = at;
        else if (title == "Metric Unit") columns.unit = at;
        else if (title == "Metric Value") columns.value = at;
        else if (title == "ID") columns.id = at;
        else if (title == "CC") columns.capability = at;
        else if (title == "gpu__time_duration.sum") columns.gpu_time = at;
        else continue;
        const double unit = microseconds_in(title.substr(std::min(title.find('('), title.size())));
        if ((at == columns.total || at == columns.duration) && unit > 0) columns.unit_us = unit;
        if (at == columns.start && unit > 0) columns.start_us = unit;
    }
    return columns.known() ? std::optional(columns) : std::nullopt;
}

class TextReader {
 public:
    TextReader(Trace& trace, ByteStream& stream) : trace_(trace), lines_(stream) {}

    void read() {
        std::string line;
        std::string previous;
        while (lines_.next(line)) {
            take(line, previous);
            previous = line;
        }
        const bool compute = table_ && (columns_.per_metric() || columns_.gpu_time >= 0);
        const bool of_pytorch = columns_.cpu_total >= 0;
        trace_.tool = !table_      ? kNamesAlone
                      : compute    ? "Nsight Compute"
                      : of_pytorch ? "PyTorch profiler's table"
                                   : "Nsight Systems";
        if (!table_ && prose_ > 0 && !trace_.runs.empty())
            trace_.notes.push_back(
                fmt::format("lines that are sentences and no names of kernels, left out: {}", prose_));
        trace_.timed = table_;
        trace_.ordered = compute || (table_ && columns_.start >= 0);
    }

 private:
    void take(const std::string& line, const std::string& previous) {
        if (const std::vector<Span> spans = spans_of(line); !spans.empty()) {
            const auto columns = columns_of(fields_under(spans, previous));
            spans_ = columns ? spans : std::vector<Span>{};  // without titles above it, it is the end of a table
            if (columns) begin_table(*columns, spans.size());
            return;
        }
        if (!spans_.empty()) {
            if (not_blank(line)) row(fields_under(spans_, line));
            else spans_.clear();
            return;
        }
        const std::vector<std::string> fields = fields_of(line);
        const auto columns = fields.size() > 2 ? columns_of(fields) : std::nullopt;
        if (columns) {
            begin_table(*columns, fields.size());
            csv_ = true;
        } else if (csv_ && fields.size() >= titles_) {
            row(joined(fields));
        } else if (!table_ && is_prose(line)) {
            ++prose_;
        } else if (!table_ && not_blank(line)) {
            name(line);
        }
    }

    /// A sentence: many words, and nothing of what a kernel's name is written with.
    static bool is_prose(const std::string& line) {
        constexpr std::int64_t kManySpaces = 5;  // "Memcpy DtoD (Device -> Device)" has four
        return std::count(line.begin(), line.end(), ' ') >= kManySpaces && !contains_any(line, {"_", "::", "<"});
    }

    /// What stood above the first table was no name.
    void begin_table(const Columns& columns, std::size_t titles) {
        if (!table_) trace_.runs.clear();
        columns_ = columns;
        titles_ = titles;
        table_ = true;
        csv_ = false;
    }

    static bool not_blank(const std::string& line) { return line.find_first_not_of(" \t") != std::string::npos; }

    /// Some tools leave the commas of a name at the end of the line bare.
    std::vector<std::string> joined(std::vector<std::string> fields) const {
        for (std::size_t i = titles_; i < fields.size(); ++i) fields[titles_ - 1] += "," + fields[i];
        fields.resize(titles_);
        return fields;
    }

    void name(const std::string& line) {
        KernelRun run;
        const std::size_t first = line.find_first_not_of(" \t");
        run.name = trace_.kernels.number_of(std::string_view(line).substr(first, kLongestName));
        trace_.add(run);
    }

    std::string field(const std::vector<std::string>& fields, int column) const {
        return column >= 0 ? fields[static_cast<std::size_t>(column)] : std::string();
    }

    void row(const std::vector<std::string>& fields) {
        const std::string kernel = field(fields, columns_.name);
        if (kernel.empty()) return units(fields);
        // PyTorch's table has operators too, with the time of their kernels, which have rows of their own.
        if (columns_.cpu_total >= 0 && duration_us(field(fields, columns_.cpu_total), 1) > 0) return;
        if (columns_.capability >= 0 && trace_.gpus.empty()) {
            const auto capability = real(field(fields, columns_.capability));
            if (capability && *capability < 100)
                trace_.gpus.push_back({.capability = static_cast<int>(std::lround(*capability * 10))});
        }
        if (columns_.per_metric()) return metric(fields, kernel);
        KernelRun run;
        run.name = trace_.kernels.number_of(std::string_view(kernel).substr(0, kLongestName));
        const int time = columns_.total >= 0      ? columns_.total
                         : columns_.duration >= 0 ? columns_.duration
                                                  : columns_.gpu_time;
        run.us = std::min(duration_us(field(fields, time), columns_.unit_us), kLongestRun);
        const double count = columns_.total >= 0 ? real(field(fields, columns_.count)).value_or(1) : 1;
        run.count = static_cast<std::int64_t>(std::clamp(count, 1.0, kMostInARow));
        // Nsight Compute runs kernels one by one and lists them in that order.
        run.start_us = columns_.gpu_time >= 0 ? static_cast<double>(trace_.runs.size())
                                              : real(field(fields, columns_.start)).value_or(0) * columns_.start_us;
        trace_.add(run);
    }

    /// The second line of ncu's raw page: units under the titles.
    void units(const std::vector<std::string>& fields) {
        const double unit = microseconds_in(field(fields, columns_.gpu_time));
        if (unit > 0) columns_.unit_us = unit;
    }

    /// One line for each metric of each run: the first line of a run adds it, its duration comes with a later one.
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
            std::min(real(field(fields, columns_.value)).value_or(0) * (unit > 0 ? unit : 1e-3), kLongestRun);
    }

    Trace& trace_;
    Lines lines_;
    Columns columns_;
    bool table_ = false;  // one has begun
    bool csv_ = false;    // it is one of csv
    std::size_t titles_ = 0;
    std::int64_t prose_ = 0;
    std::vector<Span> spans_;  // of a printed table; empty outside of one
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
