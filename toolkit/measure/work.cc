// SPDX-License-Identifier: Apache-2.0
#include "measure/work.hpp"

#include "core/batch.hpp"

namespace tessera::measure {

std::int64_t visible_pairs(const Problem& problem, const TensorView& cu_seqlens_q, const TensorView& cu_seqlens_kv) {
    if (!problem.ragged) {
        return problem.batch * problem.heads_q * problem.mask.bind(problem.len_q, problem.len_kv).visible_pairs();
    }
    std::int64_t pairs = 0;
    for (std::int64_t b = 0; b < problem.batch; ++b) {
        const Sequence sequence = sequence_of(problem, cu_seqlens_q, cu_seqlens_kv, b);
        pairs += problem.mask.bind(sequence.len_q, sequence.len_kv).visible_pairs();
    }
    return pairs * problem.heads_q;
}

std::int64_t visible_pairs(const Problem& problem, const ForwardArgs& args) {
    if (!problem.kv_lengths) return visible_pairs(problem, args.cu_seqlens_q, args.cu_seqlens_kv);
    std::int64_t pairs = 0;
    for (std::int64_t b = 0; b < problem.batch; ++b) {
        const Sequence sequence = sequence_of(problem, args, b);
        pairs += problem.mask.bind(sequence.len_q, sequence.len_kv).visible_pairs();
    }
    return pairs * problem.heads_q;
}

double flop(const Problem& problem, Pass pass, std::int64_t pairs) {
    const std::int64_t per_pair = pass == Pass::forward ? 2 * (problem.head_dim + problem.head_dim_v)
                                                        : 2 * (3 * problem.head_dim + 2 * problem.head_dim_v);
    return static_cast<double>(pairs) * static_cast<double>(per_pair);
}

}  // namespace tessera::measure
