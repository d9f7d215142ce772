// SPDX-License-Identifier: Apache-2.0
//
// Attention sinks: exp(sink) joins the sum of the exponentials of each row of its head (docs/numerics.md). Forward
// kernels add it to what they have found for the keys alone. Backward kernels add its weight to the sum of P.
#pragma once

#include <cmath>

#include "cuda/host/constants.hpp"
#include "cuda/ptx/math.cuh"
#include "cuda/tile/params.hpp"

namespace tessera::cuda {

/// LSE of a row with its sink, and the factor that takes O of the keys alone to O with the sink.
struct WithSink {
    float lse;
    float factor;
};

/// `lse`: of the keys alone; -inf: the row sees none.
__device__ __forceinline__ WithSink with_sink(float lse, float sink) {
    const float above = sink - lse;
    const float smaller = ptx::exp2_approx(-fabsf(above) * kLog2E);  // the smaller share, relative to the larger
    WithSink found{(above > 0 ? sink : lse) + ptx::log2_approx(1 + smaller) * kLn2,
                   (above > 0 ? smaller : 1.0F) * ptx::reciprocal_approx(1 + smaller)};
    if (!(sink < INFINITY)) found = {NAN, NAN};
    if (lse == -INFINITY) found = {sink, 0};
    return found;
}

/// Likewise with the sink of a head. Without sinks, {lse, 1}.
__device__ __forceinline__ WithSink with_sink_of(const ForwardParams& p, int head, float lse) {
    return p.sinks == nullptr ? WithSink{lse, 1} : with_sink(lse, p.sinks[head * p.sinks_step]);
}

/// The sink of a head as the backward takes it: +inf makes NaN, as in the forward. -inf without sinks.
__device__ __forceinline__ float sink_of(const ForwardParams& p, int head) {
    const float sink = p.sinks == nullptr ? -INFINITY : p.sinks[head * p.sinks_step];
    return sink < INFINITY ? sink : NAN;
}

}  // namespace tessera::cuda
