// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <unordered_map>
#include <vector>

#include "diagnose/trace.hpp"

namespace tessera::diagnose {

/// The nested operators of a trace, and which of them launched a run of a kernel.
class OpTree {
 public:
    static constexpr std::int64_t kNone = -1;

    /// Sorts the launch sites of the trace, which must outlive the tree.
    explicit OpTree(Trace& trace);

    /// The innermost kept operator that launched the run; kNone if unknown, as in CUDA graphs.
    std::int64_t launched_by(const KernelRun& run) const;

    /// The outermost operator of attention around `op`, which may be `op` itself; kNone if there is none.
    std::int64_t attention_around(std::int64_t op) const;

    /// The outermost operator around `op`, or `op` itself, that fits; kNone if there is none.
    std::int64_t outermost(std::int64_t op, const std::function<bool(std::int64_t)>& fits) const;

    /// True if the operator or one around it has this name.
    bool inside(std::int64_t op, std::string_view name) const;

    const OpRun& run(std::int64_t op) const { return trace_.ops[static_cast<std::size_t>(op)]; }
    const std::string& name(std::int64_t op) const { return trace_.ops_named[run(op).name]; }
    const std::string& inputs(std::int64_t op) const;

 private:
    std::int64_t at(std::uint32_t thread, double us) const;

    const Trace& trace_;
    std::unordered_map<std::uint32_t, std::vector<std::uint32_t>> by_thread_;  // operators, by their start
    std::vector<std::int64_t> parent_;                                         // [ops]
    std::unordered_map<std::int64_t, std::uint32_t> by_external_;
    std::vector<bool> is_attention_op_;  // [names of ops]
};

}  // namespace tessera::diagnose
