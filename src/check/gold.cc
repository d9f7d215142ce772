// SPDX-License-Identifier: Apache-2.0
#include "check/gold.hpp"

namespace tessera::check {
namespace {

template <class Args>
PackedCall<Args> pack_inputs(const Problem& problem, const Args& args) {
    PackedCall<Args> packed;
    packed.problem = problem;
    packed.dtype = problem.dtype;
    packed.problem.dtype = DType::fp64;
    packed.q = packed_copy(args.q);
    packed.k = packed_copy(args.k);
    packed.v = packed_copy(args.v);
    packed.bias = packed_copy(args.bias);
    packed.call.q = packed.q.view;
    packed.call.k = packed.k.view;
    packed.call.v = packed.v.view;
    packed.call.bias = packed.bias.view;
    packed.call.alibi_slopes = args.alibi_slopes;
    packed.call.cu_seqlens_q = args.cu_seqlens_q;
    packed.call.cu_seqlens_kv = args.cu_seqlens_kv;
    return packed;
}

}  // namespace

Packed packed_lse(const Problem& p) {
    return packed_zeros(p.ragged ? dense_view(nullptr, DType::fp64, {p.heads_q, p.total_q})
                                 : dense_view(nullptr, DType::fp64, {p.batch, p.heads_q, p.len_q}));
}

PackedCall<ForwardArgs> pack(const Problem& problem, const ForwardArgs& args) { return pack_inputs(problem, args); }

PackedCall<BackwardArgs> pack(const Problem& problem, const BackwardArgs& args) {
    PackedCall<BackwardArgs> packed = pack_inputs(problem, args);
    packed.d_o = packed_copy(args.d_o);
    packed.dlse = packed_copy(args.dlse);
    packed.call.d_o = packed.d_o.view;
    packed.call.dlse = packed.dlse.view;
    return packed;
}

}  // namespace tessera::check
