// SPDX-License-Identifier: Apache-2.0
//
// The score modifications that kernels are compiled for. Plain C++.
#pragma once

namespace tessera::cuda::fa3 {

/// Score modification besides scale and mask.
enum class Scores {
    plain,    ///< none
    capped,   ///< softcap
    alibi,    ///< ALiBi
    dropout,  ///< none; dropout on the probabilities
    bias,     ///< an additive bias
    general,  ///< several of these, and scales of 0 and less
};

}  // namespace tessera::cuda::fa3
