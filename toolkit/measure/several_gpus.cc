// SPDX-License-Identifier: Apache-2.0
#include "measure/several_gpus.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "measure/record.hpp"
#include "schedule/schedule.hpp"

namespace tessera::measure {
namespace {

constexpr std::int64_t kLongestAsked = std::int64_t{1} << 21;
constexpr double kHighShare = 0.9;  // GpusLimits::most_from

template <class F>
double sum_over(const std::vector<ContextParallelPrediction>& passes, const F& of) {
    double sum = 0;
    for (const ContextParallelPrediction& pass : passes) sum += of(pass);
    return sum;
}

Problem of_length(const Problem& problem, std::int64_t len) {
    Problem p = problem;
    p.len_q = p.len_kv = len;
    return p;
}

}  // namespace

double GpusRow::ms() const {
    return sum_over(passes, [](const auto& pass) { return pass.ms; });
}

double GpusRow::one_gpu_ms() const {
    return sum_over(passes, [](const auto& pass) { return pass.one_gpu_ms; });
}

double GpusRow::kernel_ms() const {
    return sum_over(passes, [](const auto& pass) { return pass.kernel_ms; });
}

double GpusRow::ring_ms() const {
    return sum_over(passes, [](const auto& pass) { return pass.ring_ms; });
}

double GpusRow::error() const {
    double error = 0;
    for (const auto& pass : passes) error = std::max(error, pass.error);
    return error;
}

bool GpusRow::measured() const {
    return std::all_of(passes.begin(), passes.end(), [](const auto& pass) { return pass.measured; });
}

bool GpusRow::fits_one_gpu() const {
    return std::all_of(passes.begin(), passes.end(), [](const auto& pass) { return pass.fits_one_gpu; });
}

std::int64_t GpusRow::memory() const {
    std::int64_t memory = 0;
    for (const auto& pass : passes) memory = std::max(memory, pass.memory);
    return memory;
}

std::int64_t GpusRow::bytes_received() const {
    std::int64_t bytes = 0;
    for (const auto& pass : passes) bytes += pass.bytes_received;
    return bytes;
}

GpusRow row_on_gpus(const Problem& problem, int gpus, const GpusQuestion& question) {
    GpusRow row{problem, gpus, {}};
    PredictContextParallelOptions options{gpus, question.link, question.steps, {}, question.copies};
    options.kernels.sequences = question.documents;
    // A forward before a backward writes it.
    options.kernels.o_residual = question.passes.size() > 1 && size_of(problem.dtype) <= 2;
    for (const Pass pass : question.passes)
        row.passes.push_back(predict_context_parallel(problem, question.schedule, pass, question.machine, options));
    return row;
}

GpusLimits limits_on_gpus(const Problem& problem, int gpus, const GpusQuestion& question) {
    GpusLimits limits{.gpus = gpus};
    // A multiple of twice the GPUs, so that zig-zag gives each GPU two chunks, which have 64 rows or more.
    std::int64_t len = 128 * std::int64_t{gpus};
    limits.shortest = len;
    for (; len <= kLongestAsked && schedule::countable(of_length(problem, len)); len *= 2) {
        const GpusRow row = row_on_gpus(of_length(problem, len), gpus, question);
        limits.longest = len;
        const auto from = [&](std::int64_t& first, bool holds) { first = !holds ? 0 : first == 0 ? len : first; };
        from(limits.faster_from, row.speed_up() > 1);
        from(limits.most_from, row.share() >= kHighShare);
        if (row.ring_ms() > 0 && row.ring_ms() < row.ms()) {
            if (limits.ring_from == 0) limits.ring_from = len;
            limits.ring_to = len;
        }
    }
    return limits;
}

plot::Figure gpus_figure(const GpusQuestion& question, std::span<const GpusRow> rows) {
    const Problem& p = rows.front().problem;
    std::string passes;
    for (const Pass pass : question.passes) passes += (passes.empty() ? "" : " + ") + std::string(name_of(pass));
    plot::Figure figure;
    figure.title = "One sequence on several GPUs: " + question.machine.title;
    figure.subtitle =
        fmt::format("{}, {}, {}/{} heads of {}, batch {}, mask {}, {}; predicted", passes, name_of(p.dtype), p.heads_q,
                    p.heads_kv, p.head_dim, p.batch, mask_text(p.mask), question.link.name);
    figure.y = {.label = "share of one GPU's speed", .least = 0, .most = 1.05};
    const bool one_length =
        std::all_of(rows.begin(), rows.end(), [&](const GpusRow& row) { return row.rows() == rows.front().rows(); });
    const auto point_at = [](double x, const GpusRow& row) {
        const double bar = 1 + row.error();
        return plot::Point{x, row.share(),
                           fmt::format("{} rows on {}: {:.4g} ms, {:.2f} of one GPU's speed, +-{:.0f} %", row.rows(),
                                       row.gpus, row.ms(), row.share(), 100 * (bar - 1)),
                           row.gpus == 1 ? 0 : row.share() / bar, row.gpus == 1 ? 0 : std::min(1.0, row.share() * bar)};
    };
    if (one_length && rows.size() > 1) {  // points above each other could not be read
        figure.subtitle += fmt::format(", {} rows", rows.front().rows());
        figure.x = {.label = "GPUs", .scale = plot::Scale::log2};
        figure.names = plot::Names::none;
        plot::Series series{.name = "share", .points = {}};
        for (const GpusRow& row : rows) series.points.push_back(point_at(row.gpus, row));
        figure.series.push_back(std::move(series));
        return figure;
    }
    figure.x = {.label = "rows of the whole sequence", .scale = plot::Scale::log2};
    std::vector<int> counts;
    for (const GpusRow& row : rows)
        if (std::find(counts.begin(), counts.end(), row.gpus) == counts.end()) counts.push_back(row.gpus);
    for (const int gpus : counts) {
        plot::Series series{.name = fmt::format("{} GPU{}", gpus, gpus == 1 ? "" : "s"), .points = {}};
        for (const GpusRow& row : rows) {
            if (row.gpus != gpus) continue;
            series.dashed = !row.measured();
            series.points.push_back(point_at(static_cast<double>(row.rows()), row));
        }
        figure.series.push_back(std::move(series));
    }
    return figure;
}

}  // namespace tessera::measure
