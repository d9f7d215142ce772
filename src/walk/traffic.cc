// SPDX-License-Identifier: Apache-2.0
//
// FlashAttention paper: Algorithm 0 (standard forward: K, V, Q read, O written, S written and read, P written and
// read), Algorithm 1 (fa1: each outer step reads Q, O, l, m of every query and writes O, l, m), Algorithms 3 and 4
// (backward); FlashAttention-2 paper, Algorithms 1 and 2 (fa2: Q read once, K and V for every tile of queries, O
// written once).
#include "walk/traffic.hpp"

#include "tessera/dtype.hpp"

namespace tessera::walk {
namespace {

constexpr double kFp32 = 4;

}  // namespace

TrafficCount::TrafficCount(const Plan& plan, std::int64_t queries, std::int64_t query_tiles)
    : schedule_(plan.kernel->schedule),
      element_(static_cast<double>(size_of(plan.problem.dtype))),
      d_(element_ * static_cast<double>(plan.problem.head_dim)),
      dv_(element_ * static_cast<double>(plan.problem.head_dim_v)),
      queries_(static_cast<double>(queries)),
      share_(1.0 / static_cast<double>(query_tiles)) {}

const Traffic& TrafficCount::after(TileStep step, std::int64_t keys) {
    const auto count = static_cast<double>(keys);
    switch (step) {
        case TileStep::scores:
        case TileStep::values:
        case TileStep::finish: forward(step, count); break;
        case TileStep::weights:
        case TileStep::gradients:
        case TileStep::dq:
        case TileStep::dk_and_dv: backward(step, count); break;
        case TileStep::softmax:  // S read, P written: standard itself, told once for all keys
            traffic_.schedule += 2 * element_ * queries_ * count;
            traffic_.standard = traffic_.schedule;
            break;
        case TileStep::merge: break;  // within fast memory
    }
    return traffic_;
}

void TrafficCount::forward(TileStep step, double keys) {
    const double matrix = element_ * queries_ * keys;  // the tile's part of S, or of P
    const double kv = (d_ + dv_) * keys;
    if (step == TileStep::finish) {
        if (schedule_ != Schedule::fa1) traffic_.schedule += queries_ * dv_;
        if (schedule_ == Schedule::fa2) traffic_.schedule += queries_ * kFp32;  // LSE
        traffic_.standard += queries_ * dv_;
        return;
    }
    if (!begun_) {
        begun_ = true;
        if (schedule_ != Schedule::fa1) traffic_.schedule += queries_ * d_;
        traffic_.standard += queries_ * d_;
    }
    if (schedule_ == Schedule::standard) {  // its three passes are steps of their own
        traffic_.schedule += (step == TileStep::scores ? d_ : dv_) * keys * share_ + matrix;
        traffic_.standard = traffic_.schedule;
        return;
    }
    traffic_.schedule += schedule_ == Schedule::fa1 ? kv * share_ + queries_ * (d_ + 2 * dv_ + 4 * kFp32) : kv;
    traffic_.standard += kv * share_ + 4 * matrix;
}

/// Standard (Algorithm 3): P read for dV, dP written, P and dP read and dS written, dS read for dQ and again for dK: 7
/// passes over the tile; of the queries Q, dQ and twice dO, of the keys K, V, dK, dV. Its P is the forward's, kept;
/// where the CPU kernel makes P again it is counted as that read. fa1, fa2 (Algorithm 4): per tile Q, dO, LSE and D of
/// the queries are read, dQ is read and written, in fp32; K, V, dK, dV of the keys are read or written once for all
/// tiles of queries.
void TrafficCount::backward(TileStep step, double keys) {
    const double matrix = element_ * queries_ * keys;
    if (!begun_) {
        begun_ = true;
        traffic_.standard += queries_ * (2 * d_ + 2 * dv_);
        if (schedule_ == Schedule::standard) traffic_.schedule = traffic_.standard;
    }
    const double of_keys = 2 * (d_ + dv_) * keys * share_;
    switch (step) {
        case TileStep::weights: traffic_.schedule += (d_ + dv_) * keys * share_ + 4 * matrix; break;
        case TileStep::dq: traffic_.schedule += matrix; break;
        case TileStep::dk_and_dv: traffic_.schedule += (d_ + dv_) * keys * share_ + 2 * matrix; break;
        default:
            traffic_.schedule += of_keys + queries_ * (d_ + dv_ + 2 * kFp32 + 2 * kFp32 * d_ / element_);
            traffic_.standard += of_keys + 7 * matrix;
            return;
    }
    traffic_.standard = traffic_.schedule;
}

}  // namespace tessera::walk
