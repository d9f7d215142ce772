// SPDX-License-Identifier: Apache-2.0
//
// PackGQA for the CPU: views the query heads of a group as rows of one head, by strides alone (core/stack_heads.hpp).
#pragma once

#include "core/stack_heads.hpp"
#include "kernel/kernel.hpp"

namespace tessera::cpu::fa2 {

/// The plan of a stackable problem, rewritten as `group` queries per kv head.
inline Plan stacked(const Plan& plan) {
    Plan result;
    result.problem = tessera::stacked(plan.problem);
    result.pass = plan.pass;
    result.kernel = plan.kernel;
    result.tile = plan.tile;
    result.threads = plan.threads;
    return result;
}

/// Views [batch, 1, heads_q, dim] as [batch, group, heads_kv, dim], LSE [batch, heads_q, 1] as [batch, heads_kv,
/// group], and sinks [heads_q] as [heads_kv, group].
inline ForwardArgs stacked(ForwardArgs args, std::int64_t group) {
    for (TensorView* t : {&args.q, &args.o}) {
        const std::int64_t head = t->strides[2];
        t->shape = {t->shape[0], group, t->shape[2] / group, t->shape[3]};
        t->strides = {t->strides[0], head, head * group, t->strides[3]};
    }
    if (args.lse.given()) {
        const std::int64_t head = args.lse.strides[1];
        args.lse.shape = {args.lse.shape[0], args.lse.shape[1] / group, group};
        args.lse.strides = {args.lse.strides[0], head * group, head};
    }
    if (args.sinks.given()) {
        const std::int64_t head = args.sinks.strides[0];
        args.sinks.rank = 2;
        args.sinks.shape = {args.sinks.shape[0] / group, group};
        args.sinks.strides = {head * group, head};
    }
    return args;
}

}  // namespace tessera::cpu::fa2
