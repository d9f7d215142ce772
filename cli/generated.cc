// SPDX-License-Identifier: Apache-2.0
#include "generated.hpp"

#include <cmath>
#include <limits>

namespace tessera::cli {
namespace {

using check::Fill;

/// A tensor of a canonical shape, filled; each role has a seed of its own.
OwnedTensor filled(const char* name, const FileLayout& layout, DType dtype, const std::vector<std::int64_t>& canonical,
                   Fill fill, std::uint64_t seed) {
    OwnedTensor tensor = make_tensor(name, dtype, layout.in_file(canonical));
    check::fill(layout.canonical(tensor.view), fill, seed);
    return tensor;
}

/// Which tensors a kind is about: large logits come from q alone, and a code of the row belongs to the values that the
/// weights pick. The others stay normal.
Fill fill_of_role(Fill kind, char role) {
    if (kind == Fill::large_logits && role != 'q') return Fill::normal;
    if (kind == Fill::index_coded && role != 'v') return Fill::normal;
    return kind;
}

OwnedTensor slopes(std::int64_t heads) {
    OwnedTensor tensor = make_tensor("alibi_slopes", DType::fp32, std::vector<std::int64_t>{heads});
    for (std::int64_t h = 0; h < heads; ++h) {
        *tensor.view.at<float>(h) =
            static_cast<float>(std::exp2(-8.0 * static_cast<double>(h + 1) / static_cast<double>(heads)));
    }
    return tensor;
}

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

}  // namespace

std::vector<std::pair<std::string, TensorView>> GeneratedInputs::named() const {
    std::vector<std::pair<std::string, TensorView>> result;
    const std::pair<const char*, const OwnedTensor*> all[] = {{"q", &q},
                                                              {"k", &k},
                                                              {"v", &v},
                                                              {"do", &d_o},
                                                              {"bias", &bias},
                                                              {"alibi_slopes", &alibi_slopes},
                                                              {"cu_seqlens_q", &cu_seqlens_q},
                                                              {"cu_seqlens_kv", &cu_seqlens_kv}};
    for (const auto& [name, tensor] : all) {
        if (tensor->view.given()) result.emplace_back(name, tensor->view);
    }
    return result;
}

GeneratedInputs generate_inputs(const Problem& p, const std::vector<std::pair<std::int64_t, std::int64_t>>& sequences,
                                Layout layout, Fill fill, std::uint64_t seed, bool gradient) {
    GeneratedInputs in;
    in.layout = {.layout = layout, .ragged = p.ragged};
    using Shape = std::vector<std::int64_t>;
    const auto shape = [&](bool queries, std::int64_t heads, std::int64_t dim) {
        if (p.ragged) return Shape{queries ? p.total_q : p.total_kv, heads, dim};
        return Shape{p.batch, queries ? p.len_q : p.len_kv, heads, dim};
    };
    const std::uint64_t first = seed * 8;  // eight streams per seed, so that no two roles share their numbers
    in.q = filled("q", in.layout, p.dtype, shape(true, p.heads_q, p.head_dim), fill_of_role(fill, 'q'), first);
    in.k = filled("k", in.layout, p.dtype, shape(false, p.heads_kv, p.head_dim), fill_of_role(fill, 'k'), first + 1);
    in.v = filled("v", in.layout, p.dtype, shape(false, p.heads_kv, p.head_dim_v), fill_of_role(fill, 'v'), first + 2);
    if (gradient)
        in.d_o = filled("do", in.layout, p.dtype, shape(true, p.heads_q, p.head_dim_v), Fill::normal, first + 3);
    if (p.bias) {
        in.bias = make_tensor("bias", p.dtype, Shape{1, p.heads_q, p.len_q, p.len_kv});
        check::fill(in.bias.view, Fill::normal, first + 4);
    }
    if (p.alibi) in.alibi_slopes = slopes(p.heads_q);
    if (p.ragged) {
        Shape of_q, of_kv;
        for (const auto& [q, kv] : sequences) of_q.push_back(q), of_kv.push_back(kv);
        in.cu_seqlens_q = running_sums("cu_seqlens_q", of_q, p.total_q);
        in.cu_seqlens_kv = running_sums("cu_seqlens_kv", of_kv, p.total_kv);
    }
    return in;
}

}  // namespace tessera::cli
