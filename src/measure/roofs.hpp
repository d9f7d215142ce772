// SPDX-License-Identifier: Apache-2.0
//
// What the cores of this machine can do at most, measured: the bounds that results are a share of.
#pragma once

namespace tessera::measure {

/// Rates of `threads` threads together; 0: not there.
struct Roofs {
    int threads = 1;
    double multiply_add = 0;  ///< fp32 floating-point operations per second, a multiply-add counting two
    double tile_product = 0;  ///< bf16 operations per second of the matrix unit, operands in the first-level cache
    double exponential = 0;   ///< exp of fp32 elements per second
    double read = 0;          ///< bytes per second from memory
};

/// Measures all of them; takes about 4 * seconds. Call it on an idle machine, or the bounds are too low.
Roofs probe_roofs(int threads, double seconds = 0.1);

}  // namespace tessera::measure
