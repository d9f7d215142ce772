// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <tuple>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "diagnose/trace.hpp"

namespace tessera::diagnose {

/// The nested operators of a trace, and which of them launched a run of a kernel.
class OpTree {
 public:
    static constexpr std::int64_t kNone = -1;

    /// Sorts the launch sites of the trace, which must outlive the tree.
    explicit OpTree(Trace& trace);

    /// The innermost kept operator that launched the run of this index; kNone if unknown, as in CUDA graphs.
    std::int64_t launched_by(std::size_t run_index) const;

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

    /// The launches of one number. (Clang 14 compiles no std::ranges::subrange of libstdc++.)
    struct Sites {
        std::deque<LaunchSite>::const_iterator first, last;

        auto begin() const { return first; }
        auto end() const { return last; }
        bool empty() const { return first == last; }
    };
    Sites sites_of(std::int64_t correlation) const;
    void find_owners(Trace& trace);
    void find_blocks(const Trace& trace);
    void vote(const Trace& trace);
    /// The process in whose part of the file a run stands, if each process has a part.
    std::optional<std::uint32_t> block_of(std::size_t run) const;
    /// The process that launched a run, in a file of several; nothing if it is not known.
    std::optional<std::uint32_t> owner_of(std::size_t run) const;
    /// True if all these launches belong to equal calls.
    bool calls_agree(const Sites& sites) const;
    bool same_call(std::int64_t a, std::int64_t b) const;

    const Trace& trace_;
    std::map<std::pair<std::uint32_t, std::uint32_t>, std::uint32_t> owners_;  // stream, kernel -> its process
    std::vector<std::tuple<std::size_t, std::size_t, std::uint32_t>> blocks_;  // first and last run of a process
    std::unordered_map<std::uint32_t, std::vector<std::uint32_t>> by_thread_;  // operators, by their start
    std::vector<std::int64_t> parent_;                                         // [ops]
    std::unordered_map<std::int64_t, std::uint32_t> by_external_;
    std::unordered_set<std::int64_t> shared_externals_;  // numbers that operators of several processes have
    std::vector<bool> is_attention_op_;                  // [names of ops]
};

}  // namespace tessera::diagnose
