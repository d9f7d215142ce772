// SPDX-License-Identifier: Apache-2.0
//
// The cost model's constants for a kind of CPU kernel on a machine, which bench/fit and `tessera calibrate` find. They
// are part of the model and not of the public API.
#pragma once

#include <span>
#include <string>
#include <utility>
#include <vector>

#include "tessera/machine.hpp"

namespace tessera {

/// The fractions of a machine's rates that a kind of CPU kernel reaches, and the fixed costs of a call.
struct KernelShares {
    double gemm_share;           ///< fraction of the machine's GEMM rate; over 1 if that rate was measured too low
    double exp_share;            ///< time of the softmax around the exponentials, in times of the exponentials alone
    double extra_tiles;          ///< load imbalance: extra tiles of queries (backward: of keys) of the slowest thread
    double loop_starts;          ///< parallel loops whose start is charged to a call
    double call_us;              ///< microseconds of a call of any size: cold code and tables
    double pack_ns = 0;          ///< nanoseconds to fetch and pack an element
    double contended_speed = 1;  ///< speed per clock of a thread with all cores busy, relative to a thread alone
    double start_us = 0;         ///< microseconds until sleeping threads run, with all cores
    double read_share = 1;       ///< fraction of the memory's read rate on cold tensors; over 1 if caches hold a part
    double mask_share = 0;       ///< time of the mask on a matrix unit, in times of the exponentials alone
};

struct MeasuredKernels {
    std::string kernels;  ///< "bf16 forward", "standard backward"
    KernelShares shares;
    std::string source;
};

/// Calls f(name, shares.member) for each number, in the order above. The names are the keys of machine files.
template <class S, class F>
void for_each_share(S& s, F&& f) {
    f("gemm_share", s.gemm_share), f("exp_share", s.exp_share), f("extra_tiles", s.extra_tiles);
    f("loop_starts", s.loop_starts), f("call_us", s.call_us), f("pack_ns", s.pack_ns);
    f("contended_speed", s.contended_speed), f("start_us", s.start_us), f("read_share", s.read_share);
    f("mask_share", s.mask_share);
}

/// Machine::kernels; empty when there are none.
inline std::span<const MeasuredKernels> measured_kernels(const Machine& machine) {
    return machine.kernels == nullptr ? std::span<const MeasuredKernels>() : *machine.kernels;
}

inline void set_measured_kernels(Machine& machine, std::vector<MeasuredKernels> kernels) {
    if (kernels.empty()) machine.kernels = nullptr;
    else machine.kernels = std::make_shared<const std::vector<MeasuredKernels>>(std::move(kernels));
}

}  // namespace tessera
