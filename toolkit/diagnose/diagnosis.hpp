// SPDX-License-Identifier: Apache-2.0
//
// What a trace says about attention: the kinds of calls, with their kernels, counts and times.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "diagnose/call.hpp"
#include "diagnose/name.hpp"
#include "diagnose/trace.hpp"

namespace tessera::diagnose {

/// Whose attention it is when FlexAttention runs without a compiler: as by hand.
inline constexpr const char* kFlexUncompiled = "PyTorch's FlexAttention, not compiled";

struct KernelSum {
    std::string name{};  ///< as the tool wrote it
    Role role = Role::unknown;
    std::int64_t count = 0;
    double us = 0;
};

/// Calls with the same inputs.
struct ShapeSum {
    Call call{};
    std::int64_t count = 0;
    double us = 0;
};

/// Calls of attention that ran the same kernel in the same way.
struct AttentionKind {
    NameReading reading{};
    std::string asked_by{};  ///< operator of PyTorch; empty: not told
    std::int64_t calls = 0;
    double us = 0;                     ///< of all its kernels
    double beside_us = 0;              ///< of `us`: helpers, copies and fills within the calls
    std::vector<KernelSum> kernels{};  ///< the longest first
    std::vector<ShapeSum> shapes{};    ///< the longest first; empty: not told
};

/// Kernels of one name that are no attention though they look like it, or of which nothing is known.
struct NamedKernel {
    KernelSum kernel{};
    NameReading reading{};
};

struct Diagnosis {
    std::string file{};
    std::string tool{};
    std::vector<Gpu> gpus{};
    std::optional<Version> torch{};
    bool timed = false;
    std::int64_t runs = 0;
    double gpu_us = 0;                       ///< of all kernels
    double attention_us = 0;                 ///< of the kinds
    std::vector<AttentionKind> kinds{};      ///< the longest first
    std::vector<NamedKernel> look_alikes{};  ///< the longest first
    std::vector<NamedKernel> unknown{};      ///< the longest first
    /// Of a file without an order of time, in which an attention by hand cannot be told; the longest first.
    std::vector<NamedKernel> softmaxes{};
    std::vector<std::string> cpu_ops{};  ///< of attention, in a trace without kernels
    std::vector<std::string> notes{};

    /// Of kernels whose operator is known; a share of runs in 0..1, 0 when there are none.
    double linked = 0;
};

/// Sorts parts of the trace.
Diagnosis diagnose(Trace& trace);

}  // namespace tessera::diagnose
