// SPDX-License-Identifier: Apache-2.0
#include "check/generate.hpp"

#include <algorithm>
#include <array>
#include <utility>

#include "check/packed.hpp"
#include "core/extent.hpp"
#include "core/numeric.hpp"
#include "core/philox.hpp"
#include "parallel.hpp"

namespace tessera::check {
namespace {

constexpr double kOutlierProbability = 0.001;
constexpr double kOutlierDeviation = 10;
constexpr double kLargeDeviation = 30;
constexpr std::int64_t kElementsOfTask = 1 << 14;

constexpr std::array<std::pair<Fill, const char*>, 6> kNames{{{Fill::normal, "normal"},
                                                              {Fill::outliers, "outliers"},
                                                              {Fill::large_logits, "large_logits"},
                                                              {Fill::index_coded, "index_coded"},
                                                              {Fill::zeros, "zeros"},
                                                              {Fill::ones, "ones"}}};

/// Streams of one seed: the base value, whether an element is an outlier, and by how much.
constexpr std::uint64_t kBase = 0;
constexpr std::uint64_t kIsOutlier = 1;
constexpr std::uint64_t kOutlier = 2;

PhiloxBlock block(std::uint64_t seed, std::uint64_t stream, std::uint64_t index, std::uint32_t part) {
    return philox4x32({static_cast<std::uint32_t>(index), static_cast<std::uint32_t>(index >> 32),
                       static_cast<std::uint32_t>(stream), part},
                      seed);
}

}  // namespace

const char* name_of(Fill fill) {
    for (const auto& [value, name] : kNames) {
        if (value == fill) return name;
    }
    return "?";
}

std::optional<Fill> fill_of(std::string_view name) {
    for (const auto& [value, known] : kNames) {
        if (name == known) return value;
    }
    return std::nullopt;
}

std::uint64_t Random::bits(std::uint64_t index) const {
    const PhiloxBlock words = block(seed_, stream_, index, 0);
    return (std::uint64_t{words[0]} << 32) | words[1];
}

double Random::uniform(std::uint64_t index) const { return (static_cast<double>(bits(index) >> 12) + 0.5) * 0x1p-52; }

double Random::normal(std::uint64_t index) const {
    std::int64_t sum = 0;  // a sum of integers, which any order of additions leaves equal
    for (std::uint32_t part = 0; part < 3; ++part) {
        for (const std::uint32_t word : block(seed_, stream_, index, part)) sum += word;
    }
    return (static_cast<double>(sum) + 6.0) * 0x1p-32 - 6.0;
}

double index_code(std::int64_t row, std::int64_t column) {
    // Two columns together distinguish 65,536 rows: even columns hold the low byte, odd columns the high byte.
    const std::int64_t byte = column % 2 == 0 ? row : row >> 8;
    return static_cast<double>(byte & 0xFF) - 128.0;
}

void fill(const TensorView& tensor, Fill kind, std::uint64_t seed) {
    const Random base(seed, kBase);
    const Random is_outlier(seed, kIsOutlier);
    const Random outlier(seed, kOutlier);
    const auto shape = shape_of_rank_4(tensor);
    const std::size_t last = tensor.rank > 0 ? static_cast<std::size_t>(tensor.rank) - 1 : 0;
    const std::size_t row_dim = tensor.rank == 4 ? 1 : 0;
    std::int64_t per_row = 1;  // elements between one row and the next in C order
    for (std::size_t d = row_dim + 1; d < 4; ++d) per_row *= shape[d];
    const auto store = [&](std::int64_t flat, std::byte* element) {
        const auto i = static_cast<std::uint64_t>(flat);
        double value = 0;
        switch (kind) {
            case Fill::normal: value = base.normal(i); break;
            case Fill::outliers:
                value = base.normal(i);
                if (is_outlier.uniform(i) < kOutlierProbability) value += kOutlierDeviation * outlier.normal(i);
                break;
            case Fill::large_logits: value = kLargeDeviation * base.normal(i); break;
            case Fill::index_coded: value = index_code(flat / per_row % shape[row_dim], flat % shape[last]); break;
            case Fill::zeros: break;
            case Fill::ones: value = 1; break;
        }
        store_from_double(element, tensor.dtype, value);
    };
    if (!tensor.given() || tensor.size() == 0) return;
    // Elements are independent, so that each thread fills its own part of the tensor.
    const std::int64_t slices = shape[0] * shape[1];
    const std::int64_t of_task = std::max<std::int64_t>(1, kElementsOfTask * slices / tensor.size());
    const auto bytes = static_cast<std::size_t>(tensor.size() * size_of(tensor.dtype));
    const int threads = extent(tensor).size() == bytes ? available_threads() : 1;
    default_parallel_for((slices + of_task - 1) / of_task, threads, [&](std::int64_t task, int) {
        for_each_element_of_slices(tensor, task * of_task, std::min((task + 1) * of_task, slices), store);
    });
}

}  // namespace tessera::check
