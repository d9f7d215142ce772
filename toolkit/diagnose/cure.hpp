// SPDX-License-Identifier: Apache-2.0
//
// Searches for the smallest set of changes after which PyTorch takes a backend.
#pragma once

#include <string>
#include <vector>

#include "diagnose/change.hpp"

namespace tessera::diagnose {

struct Cure {
    SdpBackend backend{};
    /// In the order in which they were applied and asked, the cheapest first. Each one's `after` includes those before
    /// it.
    std::vector<Change> changes{};
    bool found =
        false;     ///< PyTorch takes the backend after all changes, by the same rules; without any: it does already
    Call after{};  ///< the call with all changes
    std::vector<const Rule*> blocked_by{};      ///< not found: refusals that no change removes
    std::vector<std::string> missing_fields{};  ///< not found: unknown fields that would decide it
};

/// The set of least effort, by asking explain() again after every change. The caller's release must be in the table.
Cure cure_for(const Call& call, SdpBackend wanted);

}  // namespace tessera::diagnose
