// SPDX-License-Identifier: Apache-2.0
//
// The backends that could run in place of another one: the changes that lead to each, and its gain.
#pragma once

#include <optional>
#include <vector>

#include "diagnose/cure.hpp"
#include "diagnose/gain.hpp"

namespace tessera::diagnose {

struct Way {
    Cure cure{};
    Gain gain{};  ///< of the call with the changes; empty if there is no way
    int effort() const;
};

struct Ways {
    Baseline baseline{};     ///< what runs now
    std::vector<Way> all{};  ///< first those that are faster, the least effort first; then other ways; last, no ways

    /// The way of least effort among those that are faster; null: none is known to be.
    const Way* first() const;
    /// The least effort that is faster than first() by more than both errors; null: none.
    const Way* further() const;
};

/// The ways to every backend but `ran`. Without `ran` there is no time to compute a gain from. `before` are changes
/// that come first in each way and that `call` already has.
Ways ways_of(const Call& call, std::optional<SdpBackend> ran, Pass pass, const Measured& measured,
             const std::vector<Change>& before = {});

}  // namespace tessera::diagnose
