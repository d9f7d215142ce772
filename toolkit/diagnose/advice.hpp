// SPDX-License-Identifier: Apache-2.0
//
// Explains why no faster backend ran for a kind of calls in a trace, and what one would gain.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "diagnose/diagnosis.hpp"
#include "diagnose/rules.hpp"
#include "diagnose/ways.hpp"

namespace tessera::diagnose {

struct Advice {
    SdpBackend ran{};
    bool by_hand = false;       ///< no backend ran: the model computes attention itself, about as slowly as `ran`
    ShapeSum shape{};           ///< the calls that the advice is about
    Explanation explanation{};  ///< by the rules, with every backend that the user did not switch off
    /// Why another backend ran than the rules say; empty if they agree. The ways start from a call that was pinned.
    std::string surprise{};
    bool cudnn_may_be_old = false;  ///< an older cuDNN than that of the wheel would explain the surprise too
    Ways ways{};
};

/// Applies PyTorch's rules to a kind of calls. `stated` has PyTorch's version, the GPU and other fields that the trace
/// lacks. Returns nothing in four cases: the kind's shapes are unknown, PyTorch's SDPA did not choose its kernel or
/// has no argument for what the calls compute (beyond_sdpa), or the rules do not cover this PyTorch or GPU.
std::optional<Advice> advise(const Diagnosis& diagnosis, const AttentionKind& kind, const Call& stated);

/// Names the arguments of these calls that PyTorch's SDPA does not have, such as "a window, softcap"; empty: none. With
/// one of them no other backend computes the call.
std::string beyond_sdpa(const AttentionKind& kind);

/// The backend of PyTorch that a family's kernels belong to.
std::optional<SdpBackend> backend_of(Family family);

}  // namespace tessera::diagnose
