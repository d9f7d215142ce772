// SPDX-License-Identifier: Apache-2.0
#include "generated.hpp"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <string_view>

#include "core/arguments.hpp"

namespace tessera::cli {
namespace {

using check::Fill;

using Input = TensorArgument<BackwardArgs>;

/// The tensors with random values; the n-th one of a seed uses stream 8 * seed + n.
constexpr std::string_view kStreams[] = {"q", "k", "v", "do", "bias", "sinks"};
constexpr std::uint64_t kStreamsPerSeed = 8;
static_assert(std::size(kStreams) <= kStreamsPerSeed);

std::uint64_t stream_of(std::string_view name, std::uint64_t seed) {
    const auto found = std::find(std::begin(kStreams), std::end(kStreams), name);
    return seed * kStreamsPerSeed + static_cast<std::uint64_t>(found - std::begin(kStreams));
}

/// The fill of one tensor. Large logits come from q alone, and index-coded rows are for v, whose rows the weights
/// select. Other tensors stay normal.
Fill fill_of(Fill kind, const Input& input) {
    const bool is_input_row = input.shape == ShapeRule::q || input.shape == ShapeRule::k || input.shape == ShapeRule::v;
    if (!is_input_row) return Fill::normal;
    if (kind == Fill::large_logits && input.shape != ShapeRule::q) return Fill::normal;
    if (kind == Fill::index_coded && input.shape != ShapeRule::v) return Fill::normal;
    return kind;
}

/// A filled tensor with the shape and dtype of its rules.
OwnedTensor filled(const Input& input, const Problem& p, const FileLayout& layout, Fill kind, std::uint64_t seed) {
    const Shape full = full_shape(p, input.shape);
    std::vector<std::int64_t> shape(full.begin(), full.end());
    const bool has_rows = input.shape == ShapeRule::o || fill_of(Fill::outliers, input) == Fill::outliers;
    if (input.shape == ShapeRule::bias) shape.front() = 1;  // shared by the batch
    OwnedTensor tensor = make_tensor(input.name, usual_dtype(p, input.dtype), has_rows ? layout.in_file(shape) : shape);
    check::fill(has_rows ? layout.canonical(tensor.view) : tensor.view, fill_of(kind, input),
                stream_of(input.name, seed));
    return tensor;
}

/// ALiBi slopes: 2^(-8 (h + 1) / heads) for head h.
OwnedTensor slopes(std::int64_t heads) {
    OwnedTensor tensor = make_tensor("alibi_slopes", DType::fp32, std::vector<std::int64_t>{heads});
    for (std::int64_t h = 0; h < heads; ++h) {
        *tensor.view.at<float>(h) =
            static_cast<float>(std::exp2(-8.0 * static_cast<double>(h + 1) / static_cast<double>(heads)));
    }
    return tensor;
}

/// Prefix sums as int32, or int64 if the total needs it.
OwnedTensor running_sums(const char* name, const std::vector<std::int64_t>& lengths, std::int64_t total) {
    const DType dtype = total > std::numeric_limits<std::int32_t>::max() ? DType::int64 : DType::int32;
    OwnedTensor tensor =
        make_tensor(name, dtype, std::vector<std::int64_t>{static_cast<std::int64_t>(lengths.size()) + 1});
    std::int64_t sum = 0;
    for (std::size_t b = 0; b < lengths.size(); ++b) {
        sum += lengths[b];
        const auto at = static_cast<std::int64_t>(b) + 1;
        if (dtype == DType::int32) *tensor.view.at<std::int32_t>(at) = static_cast<std::int32_t>(sum);
        else *tensor.view.at<std::int64_t>(at) = sum;
    }
    return tensor;
}

/// The keys of each sequence of a cache.
OwnedTensor cache_lengths(const Problem& p, const std::vector<std::int64_t>& lengths) {
    OwnedTensor tensor = make_tensor("kv_lengths", DType::int32, std::vector<std::int64_t>{p.batch});
    for (std::int64_t b = 0; b < p.batch; ++b) {
        const std::int64_t keys = lengths.empty() ? p.len_kv : lengths[static_cast<std::size_t>(b)];
        *tensor.view.at<std::int32_t>(b) = static_cast<std::int32_t>(keys);
    }
    return tensor;
}

/// Pages in reverse order, for all of the capacity.
OwnedTensor pages(const Problem& p) {
    const std::int64_t width = p.len_kv / p.page_size;
    OwnedTensor tensor = make_tensor("page_table", DType::int32, std::vector<std::int64_t>{p.batch, width});
    for (std::int64_t b = 0; b < p.batch; ++b) {
        for (std::int64_t n = 0; n < width; ++n)
            *tensor.view.at<std::int32_t>(b, n) = static_cast<std::int32_t>(p.batch * width - 1 - b * width - n);
    }
    return tensor;
}

}  // namespace

ForwardArgs GeneratedInputs::forward_args() const {
    auto args = inputs_of<ForwardArgs>(tensors);
    args.kv_lengths = kv_lengths;
    args.page_table = page_table;
    return args;
}

std::vector<std::pair<std::string, TensorView>> GeneratedInputs::named() const {
    std::vector<std::pair<std::string, TensorView>> result;
    for (const Input& input : kTensors<BackwardArgs>) {
        if ((tensors.*input.view).given()) result.emplace_back(input.name, tensors.*input.view);
    }
    if (kv_lengths.given()) result.emplace_back("kv_lengths", kv_lengths);
    if (page_table.given()) result.emplace_back("page_table", page_table);
    return result;
}

GeneratedInputs generate_inputs(const Problem& p, const std::vector<std::pair<std::int64_t, std::int64_t>>& sequences,
                                Layout layout, Fill fill, std::uint64_t seed, bool gradient) {
    GeneratedInputs in;
    in.layout = {.layout = layout, .ragged = p.ragged};
    std::vector<std::int64_t> lengths_q, lengths_kv;
    for (const auto& [q, kv] : sequences) lengths_q.push_back(q), lengths_kv.push_back(kv);
    const auto made = [&](const Input& input) {
        switch (input.shape) {
            case ShapeRule::alibi_slopes: return slopes(p.heads_q);
            case ShapeRule::cu_seqlens_q: return running_sums(input.name, lengths_q, p.total_q);
            case ShapeRule::cu_seqlens_kv: return running_sums(input.name, lengths_kv, p.total_kv);
            default: return filled(input, p, in.layout, fill, seed);
        }
    };
    for (const Input& input : kTensors<BackwardArgs>) {
        const bool wanted = input.need == Need::with_option ? input.option.is_set(p) : input.need == Need::always;
        if (!wanted || input.use != Use::input || is_result(input) || (input.view == &BackwardArgs::d_o && !gradient))
            continue;
        in.owned.push_back(made(input));
        in.tensors.*input.view = in.owned.back().view;
    }
    if (p.kv_lengths) {
        in.owned.push_back(cache_lengths(p, lengths_kv));
        in.kv_lengths = in.owned.back().view;
    }
    if (p.page_size > 0) {
        in.owned.push_back(pages(p));
        in.page_table = in.owned.back().view;
    }
    return in;
}

}  // namespace tessera::cli
