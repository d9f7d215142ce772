// SPDX-License-Identifier: Apache-2.0
//
// The diagnosis of a trace: the kinds of attention calls in it, with their kernels, counts and times.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "diagnose/call.hpp"
#include "diagnose/name.hpp"
#include "diagnose/step.hpp"
#include "diagnose/trace.hpp"

namespace tessera::diagnose {

/// The library's name for FlexAttention that runs without a compiler; its kernels are those of attention by hand.
inline constexpr const char* kFlexUncompiled = "PyTorch's FlexAttention, not compiled";

struct KernelSum {
    std::string name{};  ///< the name in the tool's spelling
    Role role = Role::unknown;
    std::int64_t count = 0;
    double us = 0;
};

/// Calls with the same inputs.
struct ShapeSum {
    Call call{};
    std::int64_t count = 0;
    double us = 0;
    Spread spread{};  ///< of the runs of its main kernel; no runs: the calls are of several kernels, or summed
};

/// Calls of attention that ran the same kernel in the same way.
struct AttentionKind {
    NameReading reading{};
    std::string asked_by{};  ///< the operator of PyTorch that called it; empty: unknown
    std::int64_t calls = 0;
    double us = 0;                     ///< sum over all its kernels
    double beside_us = 0;              ///< part of `us`: helpers, copies and fills within the calls
    std::vector<KernelSum> kernels{};  ///< the longest first
    std::vector<ShapeSum> shapes{};    ///< the longest first; empty: unknown
    Spread spread{};                   ///< of the runs of its main kernel, if the shapes are unknown
    Spread host{};                     ///< of the CPU's time in the operators that called it
    Repeats repeats{};
};

/// Kernels of one name that only look like attention, or that are unknown.
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
    double gpu_us = 0;                       ///< sum over all kernels
    double attention_us = 0;                 ///< sum over the kinds
    std::vector<AttentionKind> kinds{};      ///< the longest first
    std::vector<NamedKernel> look_alikes{};  ///< the longest first
    std::vector<NamedKernel> unknown{};      ///< the longest first
    /// Softmax kernels of a file without an order of time, in which attention by hand cannot be found; the longest
    /// first.
    std::vector<NamedKernel> softmaxes{};
    StepClock clock{};
    MarkedSteps steps{};
    StepShares shares{};
    std::vector<std::string> cpu_ops{};  ///< attention operators in a trace without kernels
    /// Backends that operators in a profiler's table name: "PyTorch's math path ran (10 calls of ...)".
    std::vector<std::string> backends_of_operators{};
    std::vector<std::string> notes{};

    /// The fraction of runs whose operator is known, 0 to 1; 0 if there are none.
    double linked = 0;
};

/// Analyses the trace. It sorts parts of the trace in place.
Diagnosis diagnose(Trace& trace);

}  // namespace tessera::diagnose
