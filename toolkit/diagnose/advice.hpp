// SPDX-License-Identifier: Apache-2.0
//
// Explains why no faster backend ran for a kind of calls in a trace, and what one would gain.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "diagnose/diagnosis.hpp"
#include "diagnose/gain.hpp"
#include "diagnose/rules.hpp"

namespace tessera::diagnose {

/// A backend that is usually faster than the one that ran.
struct Faster {
    Verdict verdict{};
    Gain gain{};  ///< for the calls with the shape that took the longest
};

struct Advice {
    SdpBackend ran{};
    bool by_hand = false;  ///< no backend ran: the model computes attention itself, about as slowly as `ran`
    ShapeSum shape{};      ///< the calls that the advice is about
    Explanation explanation{};
    std::vector<Faster> faster{};  ///< the fastest first

    /// PyTorch's rules predict another backend than the one that ran: it was switched off, or the call was another one.
    bool surprising() const { return !by_hand && explanation.taken && *explanation.taken != ran; }
};

/// Applies PyTorch's rules to a kind of calls. `stated` has PyTorch's version, the GPU and other fields that the trace
/// lacks. Returns nothing in three cases: the kind's shapes are unknown, PyTorch's SDPA did not choose its kernel, or
/// the rules do not cover this PyTorch or GPU.
std::optional<Advice> advise(const Diagnosis& diagnosis, const AttentionKind& kind, const Call& stated);

/// The backend of PyTorch that a family's kernels belong to.
std::optional<SdpBackend> backend_of(Family family);

}  // namespace tessera::diagnose
