// SPDX-License-Identifier: Apache-2.0
//
// Sums over the names of a trace: the GPU's time outside of attention, and the evidence that several names share.
#pragma once

#include <cstdint>
#include <map>
#include <unordered_map>
#include <vector>

#include "diagnose/diagnosis.hpp"

namespace tessera::diagnose {

/// The time of the runs that are not `taken`, by the readings of their names.
StepShares shares_of(const Trace& trace, const std::vector<NameReading>& readings, const std::vector<bool>& taken);

/// Makes the evidence of a kind that of all its names. Statements that some of the names lack are marked as such.
void share_evidence(AttentionKind& kind, const std::unordered_map<std::uint32_t, KernelSum>& names,
                    const std::vector<NameReading>& readings);

/// The names in `rows` with their readings, the longest first.
std::vector<NamedKernel> named_kernels(const Trace& trace, const std::vector<NameReading>& readings,
                                       const std::map<std::uint32_t, KernelSum>& rows);

}  // namespace tessera::diagnose
