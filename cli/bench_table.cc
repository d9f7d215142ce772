// SPDX-License-Identifier: Apache-2.0
#include "bench_table.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>

namespace tessera::cli {
namespace {

using measure::Record;

std::string pair_text(std::int64_t a, std::int64_t b, const char* separator) {
    return a == b ? fmt::format("{}", a) : fmt::format("{}{}{}", a, separator, b);
}

/// A column that describes what was measured.
struct Describing {
    const char* title;
    std::string (*text)(const Record& record);
};

constexpr Describing kDescribing[] = {
    {"kernel", [](const Record& r) { return r.kernel; }},
    {"dtype", [](const Record& r) { return r.dtype; }},
    {"batch", [](const Record& r) { return fmt::format("{}", r.batch); }},
    {"heads", [](const Record& r) { return pair_text(r.heads_q, r.heads_kv, "/"); }},
    {"len", [](const Record& r) { return pair_text(r.len_q, r.len_kv, "x"); }},
    {"head_dim", [](const Record& r) { return pair_text(r.head_dim, r.head_dim_v, "/"); }},
    {"mask", [](const Record& r) { return r.mask; }},
    {"with", [](const Record& r) { return r.features; }},
};

Table make_table(const std::vector<std::size_t>& shown, const std::vector<Record>& records) {
    std::vector<Column> columns;
    for (const std::size_t d : shown) {
        std::size_t widest = 0;
        for (const Record& record : records) widest = std::max(widest, kDescribing[d].text(record).size());
        columns.push_back({kDescribing[d].title, Align::left, widest});
    }
    columns.push_back({"time", Align::right, 10});
    columns.push_back({"spread", Align::right, 10});
    columns.push_back({"GFLOP/s", Align::right, 8});
    return Table(columns);
}

}  // namespace

BenchTable::BenchTable(std::span<const Plan> plans) : table_({}) {
    std::vector<Record> records;
    for (const Plan& plan : plans) records.push_back(measure::record_of(plan, {}, 0));
    for (std::size_t d = 0; d < std::size(kDescribing); ++d) {
        const auto text = kDescribing[d].text;
        const bool same = std::all_of(records.begin(), records.end(),
                                      [&](const Record& r) { return text(r) == text(records.front()); });
        if (!same) shown_.push_back(d);
        else if (!text(records.front()).empty())
            shared_ += fmt::format("{}{} {}", shared_.empty() ? "" : ", ", kDescribing[d].title, text(records.front()));
    }
    threads_ = fmt::format("{}", plans.front().threads);
    table_ = make_table(shown_, records);
}

std::string BenchTable::head(const measure::Host& host, int repeat) const {
    return facts_text({{"machine", fmt::format("{}, {} threads", host.cpu, threads_)},
                       {"problem", shared_},
                       {"method", fmt::format("median and interquartile range of {} calls, caches cold", repeat)}},
                      terminal_width(STDOUT_FILENO)) +
           "\n" + table_.titles();
}

std::string BenchTable::row(const Record& record) const {
    std::vector<std::string> cells;
    for (const std::size_t d : shown_) cells.push_back(kDescribing[d].text(record));
    cells.push_back(milliseconds_text(record.ms));
    cells.push_back(milliseconds_text(record.ms_spread));
    cells.push_back(fmt::format("{:.4g}", record.tflops * 1e3));
    return table_.row(cells);
}

}  // namespace tessera::cli
