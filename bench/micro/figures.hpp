// SPDX-License-Identifier: Apache-2.0
//
// What is measured: one Figure for each ceiling and variant. A group of figures is one function, in a file of its own.
#pragma once

#include <string>
#include <vector>

namespace tessera::micro {

/// What one launch does, how long it takes, and what it could do at best.
struct Figure {
    std::string name{};      ///< "wgmma, A in shared memory"
    std::string variant{};   ///< "n 128, 2 warpgroups"
    std::string resource{};  ///< whose ceiling it is: "tensor", "shared", "l2", "dram", "ex2", "fma"; empty: a latency
    std::string unit{};      ///< of `work`: "FLOP", "B", "op"; of a latency, what it is the latency of
    double work = 0;  ///< of one launch on the whole device; of a latency, how often it happens one after the other
    double ms = 0;    ///< of one launch, median
    double ms_spread = 0;           ///< interquartile range
    double cycles = 0;              ///< of one block, mean; 0: not counted
    double nominal = 0;             ///< work per multiprocessor and clock; 0: none is given for the chip
    double nominal_per_second = 0;  ///< instead of the one before, where clocks don't matter
    int threads = 0;                ///< of a multiprocessor
};

struct Chip {
    std::string name;
    int multiprocessors = 0;
    double clock_hz = 0;  ///< what the driver calls the clock rate: the highest
    double dram_bytes_per_second = 0;
};

Chip this_chip();

std::vector<Figure> wgmma_figures(const Chip& chip);
std::vector<Figure> copy_figures(const Chip& chip);
std::vector<Figure> warp_figures(const Chip& chip);
std::vector<Figure> arithmetic_figures(const Chip& chip);
std::vector<Figure> memory_figures(const Chip& chip);
std::vector<Figure> waiting_figures(const Chip& chip);

/// A table on stdout.
void print(const Chip& chip, const std::vector<Figure>& figures);
/// Appends a Record (JSON line) for each.
void save(const std::string& path, const std::string& commit, const Chip& chip, const std::vector<Figure>& figures);

}  // namespace tessera::micro
