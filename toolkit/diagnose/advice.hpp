// SPDX-License-Identifier: Apache-2.0
//
// Why no faster backend ran for a kind of calls in a trace, and what it would gain.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "diagnose/diagnosis.hpp"
#include "diagnose/gain.hpp"
#include "diagnose/rules.hpp"

namespace tessera::diagnose {

/// A backend that is faster as a rule than the one that ran.
struct Faster {
    Verdict verdict{};
    Gain gain{};  ///< of the calls with the shape that took the longest
};

struct Advice {
    SdpBackend ran{};
    bool by_hand = false;  ///< no backend ran: the model computes it itself, and that is as slow as `ran`
    ShapeSum shape{};      ///< the calls that it is about
    Explanation explanation{};
    std::vector<Faster> faster{};  ///< the fastest first

    /// PyTorch's rules say that another backend would be taken: it was switched off, or the call was another one.
    bool surprising() const { return !by_hand && explanation.taken && *explanation.taken != ran; }
};

/// `said` fills in what the trace does not tell: PyTorch's version, the GPU. Nothing when the kind's shapes are not
/// known, when it is none of the kernels that PyTorch chooses among or was called past its choice, or when its rules do
/// not hold for this PyTorch or GPU.
std::optional<Advice> advise(const Diagnosis& diagnosis, const AttentionKind& kind, const Call& said);

/// The backend of PyTorch that a family's kernels belong to.
std::optional<SdpBackend> backend_of(Family family);

}  // namespace tessera::diagnose
