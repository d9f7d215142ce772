// SPDX-License-Identifier: Apache-2.0
//
// Decoding: one query per head, and every query head of a group reads the same keys. The heads of a group are stacked
// into rows of one head, by strides alone: they share the lanes, and K and V are read once for all of them.
#pragma once

#include "kernel/kernel.hpp"

namespace tessera::cpu::fa2 {

/// Is there one query per head, and nothing that differs between heads but their queries?
inline bool stackable(const Problem& p) {
    return !p.ragged && p.len_q == 1 && p.heads_q > p.heads_kv && p.heads_kv > 0 && !p.alibi && !p.bias &&
           p.dropout.probability == 0 && p.mask.bind(1, p.len_kv).kv_range(0, 1).size() == p.len_kv;
}

/// The plan of a stackable problem as one of `group` queries per kv head.
inline Plan stacked(const Plan& plan) {
    Plan result;
    result.problem = plan.problem;
    result.problem.len_q = plan.problem.group();
    result.problem.heads_q = plan.problem.heads_kv;
    result.problem.mask = {};  // all keys are seen
    result.pass = plan.pass;
    result.kernel = plan.kernel;
    result.tile = plan.tile;
    result.threads = plan.threads;
    return result;
}

/// [batch, 1, heads_q, dim] as [batch, group, heads_kv, dim], and LSE [batch, heads_q, 1] as [batch, heads_kv, group].
inline ForwardArgs stacked(ForwardArgs args, std::int64_t group) {
    for (TensorView* t : {&args.q, &args.o}) {
        const std::int64_t head = t->strides[2];
        t->shape = {t->shape[0], group, t->shape[2] / group, t->shape[3]};
        t->strides = {t->strides[0], head, head * group, t->strides[3]};
    }
    if (args.lse.data != nullptr) {
        const std::int64_t head = args.lse.strides[1];
        args.lse.shape = {args.lse.shape[0], args.lse.shape[1] / group, group};
        args.lse.strides = {args.lse.strides[0], head * group, head};
    }
    return args;
}

}  // namespace tessera::cpu::fa2
