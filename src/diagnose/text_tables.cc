// SPDX-License-Identifier: Apache-2.0
//
// Text: the tables of nsys stats and ncu in csv, or names of kernels, one a line.
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

/// Where the columns of a table stand; -1 where it has none.
struct Columns {
    int name = -1, total = -1, duration = -1, count = -1, start = -1, metric = -1, unit = -1, value = -1, id = -1,
        capability = -1, gpu_time = -1;
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
        else if (begins("Total Time")) columns.total = at;
        else if (begins("Duration") || begins("Kernel Dur")) columns.duration = at;
        else if (title == "Instances" || title == "Count" || title == "Calls") columns.count = at;
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
        while (lines_.next(line)) {
            const std::vector<std::string> fields = fields_of(line);
            if (fields.size() > 2) {
                if (const auto columns = columns_of(fields)) {
                    columns_ = *columns;
                    table_ = true;
                    titles_ = fields.size();
                    continue;
                }
            }
            if (table_ && fields.size() >= titles_) row(joined(fields));
            else if (!table_ && not_blank(line)) name(line);
        }
        const bool compute = table_ && (columns_.per_metric() || columns_.gpu_time >= 0);
        trace_.tool = !table_ ? "names of kernels" : compute ? "Nsight Compute" : "Nsight Systems";
        trace_.timed = table_;
        trace_.ordered = compute || (table_ && columns_.start >= 0);
    }

 private:
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
        run.us = std::min(real(field(fields, time)).value_or(0) * columns_.unit_us, kLongestRun);
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
    bool table_ = false;
    std::size_t titles_ = 0;
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
