// SPDX-License-Identifier: Apache-2.0
//
// Finds calls of attention whose K and V were made by repeating heads.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "diagnose/call_inputs.hpp"
#include "diagnose/op_tree.hpp"
#include "diagnose/step.hpp"

namespace tessera::diagnose {

class RepeatFinder {
 public:
    /// Both must outlive the finder.
    RepeatFinder(const Trace& trace, const OpTree& tree);

    /// Counts the call of this operator in `repeats` if an operator shortly before it made its K by repeating heads.
    void note(Repeats& repeats, std::int64_t op, const std::optional<Call>& call) const;

 private:
    struct RepeatOp {
        std::uint32_t thread = 0;
        double end_us = 0;
        RepeatedHeads made{};
    };

    const OpTree& tree_;
    std::vector<RepeatOp> repeats_;  // by thread, then by end
};

}  // namespace tessera::diagnose
