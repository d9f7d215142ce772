// SPDX-License-Identifier: Apache-2.0
//
// Hosts. `tessera calibrate` makes one for the processor at hand.
#include "model/machines.hpp"

namespace tessera::model {
namespace {

constexpr const char* kInferred = "estimate: what the fastest calls of bench/results/cpu need";
constexpr const char* kPorts = "two 512-bit multiply-adds a clock";
constexpr const char* kTiles = "AMX: 16 x 16 x 32 products every 16 clocks";
constexpr const char* kStaticModel = "static analysis of the exp2 loop: 6 clocks for 16";
constexpr const char* kUsual = "estimate: usual for servers of this kind";

}  // namespace

std::vector<Machine> cpu_machines() {
    return {
        {.name = "xeon-16",
         .title = "Intel Xeon with AVX-512, 16 cores of a virtual machine",
         .kind = MachineKind::cpu,
         .capability = {0, "none"},
         .cores = {16, "bench/results/cpu"},
         .clock_ghz = {2.9, kInferred},
         .rated_clock_ghz = {2.9, kInferred},
         .loaded_clock_ghz = {2.67, kInferred},
         .matrix_flop = {1024, kTiles},
         .warp_matrix_share = {1, "no other product instruction is used"},
         .fma_flop = {64, kPorts},
         .exp_rate = {2.67, kStaticModel},
         .shared_bytes = {48, kUsual},
         .shared_kib = {2048, kUsual},
         .l2_bytes = {10, kUsual},
         .l2_mib = {32, kUsual},
         .reduce_bytes = {0, "no such unit"},
         .dram_gbs = {44, kInferred},
         .dram_read_share = {0.8, kUsual},
         .dram_copy_share = {0.7, kUsual},
         .memory_gib = {64, kUsual},
         .launch_us = {44, kInferred}},
    };
}

}  // namespace tessera::model
