// SPDX-License-Identifier: Apache-2.0
//
// What the two kinds of forward tasks on packed tiles share: panels in the lanes (forward_packed.cc) and few queries as
// rows (forward_packed_rows.cc).
#pragma once

#include "cpu/fa2/packed_run.hpp"

namespace tessera::cpu::fa2 {

/// Keys of one block that a panel sees, from a multiple of 32 on; none: it sees no key. Counted in `tally`, when given.
PackedKeys keys_seen(const ForwardRun& run, const PackedPanel& work, std::int64_t block, TileTally* tally = nullptr);

/// Scores of some keys after their product: special elements, what is done to scores, and the maximum. `finite`: no
/// element of these keys or of the queries was packed as 0. s, other: [keys, lanes]
void finish_some(const ForwardRun& run, const PackedPanel& work, const PackedKeys& some, bool finite, float* s,
                 float* other, float* maximum);

/// The weights of scores s, to `at`. other: [keys, lanes], for dropout.
tile::WeightsJob weights_job(const PackedPanel& work, const PackedKeys& keys, const float* s, float* other,
                             const Stage& at);

/// Writes O and LSE of a panel from its sums.
void finish_packed(const ForwardRun& run, const PackedPanel& work, const FinishScratch& scratch, PanelSums& sums);

}  // namespace tessera::cpu::fa2
