// SPDX-License-Identifier: Apache-2.0
#include "bench_table.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>

#include "bench_case.hpp"
#include "measure/predicted.hpp"

namespace tessera::cli {
namespace {

using measure::Record;

std::string pair_text(std::int64_t a, std::int64_t b, const char* separator) {
    return a == b ? fmt::format("{}", a) : fmt::format("{}{}{}", a, separator, b);
}

/// A column that describes the case.
struct CaseColumn {
    const char* title;
    std::string (*text)(const Record& record);
};

constexpr CaseColumn kCaseColumns[] = {
    {"kernel", [](const Record& r) { return r.kernel; }},
    {"dtype", [](const Record& r) { return r.dtype; }},
    {"batch", [](const Record& r) { return fmt::format("{}", r.batch); }},
    {"heads", [](const Record& r) { return pair_text(r.heads_q, r.heads_kv, "/"); }},
    {"len", [](const Record& r) { return pair_text(r.len_q, r.len_kv, "x"); }},
    {"head_dim", [](const Record& r) { return pair_text(r.head_dim, r.head_dim_v, "/"); }},
    {"mask", [](const Record& r) { return r.mask; }},
    {"threads", [](const Record& r) { return fmt::format("{}", r.threads); }},
    {"with", [](const Record& r) { return r.features; }},
};

/// "3 %" of the median; empty for a single call.
std::string spread_text(const Record& r) {
    if (r.ms_spread <= 0) return "-";
    const double percent = 100 * r.ms_spread / r.ms;
    return fmt::format("{:.{}f} %{}", percent, percent < 9.95 ? 1 : 0,
                       measure::is_noisy(r.ms, r.ms_spread) ? ", noisy" : "");
}

Table make_table(const std::vector<std::size_t>& shown, const std::vector<Record>& records, bool with_prediction) {
    std::vector<Column> columns;
    for (const std::size_t d : shown) {
        std::size_t widest = 0;
        for (const Record& record : records) widest = std::max(widest, kCaseColumns[d].text(record).size());
        columns.push_back({kCaseColumns[d].title, Align::left, widest});
    }
    columns.push_back({"time", Align::right, 9});
    columns.push_back({"spread", Align::right, 12});
    columns.push_back({"GFLOP/s", Align::right, 7});
    if (with_prediction) {
        columns.push_back({"predicted", Align::right, 9});
        columns.push_back({"off by", Align::right, 6});
        columns.push_back({"of its bound", Align::right, 12});
    }
    return Table(columns);
}

}  // namespace

BenchTable::BenchTable(std::span<const Plan> plans, const measure::Host& host, const model::Machine* machine)
    : table_({}) {
    std::vector<Record> records;
    for (const Plan& plan : plans) {
        records.push_back(described(plan, host));
        records.back().ms = 1;  // a prediction ignores the time, but is made only for a Record that has one
        with_prediction_ = with_prediction_ || measure::predict(records.back(), machine).has_value();
    }
    for (std::size_t d = 0; d < std::size(kCaseColumns); ++d) {
        const auto text = kCaseColumns[d].text;
        const bool same = std::all_of(records.begin(), records.end(),
                                      [&](const Record& r) { return text(r) == text(records.front()); });
        if (!same) shown_.push_back(d);
        else if (!text(records.front()).empty())
            shared_ +=
                fmt::format("{}{} {}", shared_.empty() ? "" : ", ", kCaseColumns[d].title, text(records.front()));
    }
    table_ = make_table(shown_, records, with_prediction_);
}

std::string BenchTable::head() const {
    return "\n" + facts_text({{"problem", shared_}}, terminal_width(STDOUT_FILENO)) + table_.titles();
}

std::string BenchTable::row(const Record& measured, const std::optional<Record>& predicted) const {
    std::vector<std::string> cells;
    for (const std::size_t d : shown_) cells.push_back(kCaseColumns[d].text(measured));
    cells.push_back(milliseconds_text(measured.ms));
    cells.push_back(spread_text(measured));
    cells.push_back(fmt::format("{:.4g}", measured.tflops * 1e3));
    if (with_prediction_) {
        cells.push_back(predicted ? milliseconds_text(predicted->ms) : "");
        cells.push_back(predicted ? fmt::format("{:+.0f} %", (predicted->ms / measured.ms - 1) * 100) : "");
        cells.push_back(
            measured.percent_of_bound ? fmt::format("{} {:.0f} %", measured.bound, *measured.percent_of_bound) : "");
    }
    return table_.row(cells);
}

std::string bench_method_text(const measure::Host& host, const measure::Method& method) {
    return facts_text(
        {{"machine", measure::text_of(host)},
         {"method", fmt::format("median and interquartile range of {} calls after {:g} ms of warm-up, caches "
                                "cold before each",
                                method.repeat, method.warm_up_ms)}},
        terminal_width(STDOUT_FILENO));
}

}  // namespace tessera::cli
