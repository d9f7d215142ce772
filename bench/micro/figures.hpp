// SPDX-License-Identifier: Apache-2.0
//
// The measured quantities: one Figure for each ceiling and variant. Each file has one function for its group of
// figures.
#pragma once

#include <string>
#include <vector>

namespace tessera::micro {

/// The work of one launch, its time, and its ceiling.
struct Figure {
    std::string name{};     ///< "wgmma, A in shared memory"
    std::string variant{};  ///< "n 128, 2 warpgroups"
    std::string
        resource{};      ///< resource of the ceiling: "tensor", "shared", "l2", "dram", "ex2", "fma"; empty: a latency
    std::string unit{};  ///< unit of `work`: "FLOP", "B", "op"; for a latency, its event
    double work = 0;     ///< work of one launch on the whole device; for a latency, the number of serial events
    double ms = 0;       ///< median time of one launch
    double ms_spread = 0;           ///< interquartile range
    double cycles = 0;              ///< mean clocks of one block; 0: not counted
    double nominal = 0;             ///< work per multiprocessor and clock; 0: none is given for the chip
    double nominal_per_second = 0;  ///< instead of `nominal`, if clocks don't matter
    int threads = 0;                ///< threads per multiprocessor
};

struct Chip {
    std::string name;
    int multiprocessors = 0;
    double clock_hz = 0;  ///< clock rate reported by the driver: the highest
    double dram_bytes_per_second = 0;
};

Chip this_chip();

std::vector<Figure> wgmma_figures(const Chip& chip);
std::vector<Figure> copy_figures(const Chip& chip);
std::vector<Figure> warp_figures(const Chip& chip);
std::vector<Figure> arithmetic_figures(const Chip& chip);
std::vector<Figure> memory_figures(const Chip& chip);
std::vector<Figure> waiting_figures(const Chip& chip);

/// Prints a table on stdout.
void print(const Chip& chip, const std::vector<Figure>& figures);
/// Appends a Record (JSON line) for each.
void save(const std::string& path, const std::string& commit, const Chip& chip, const std::vector<Figure>& figures);

}  // namespace tessera::micro
