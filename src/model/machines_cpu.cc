// SPDX-License-Identifier: Apache-2.0
//
// The known CPU hosts. `tessera calibrate` makes a Machine for the current processor.
#include "model/machines.hpp"

namespace tessera::model {
namespace {

constexpr const char* kProbed = "measured on that host by peak loops (probe_roofs of commit 5bdbca1)";
constexpr const char* kInferred = "fitted with the constants of src/model/cpu.cc";
constexpr const char* kPorts = "two 512-bit multiply-adds a clock";
constexpr const char* kUsual = "estimate: usual for servers of this kind";

}  // namespace

std::vector<Machine> cpu_machines() {
    return {
        {.name = "xeon-16",
         .title = "Intel Xeon with AVX-512 and AMX, 16 cores of a virtual machine",
         .kind = MachineKind::cpu,
         .capability = {0, "none"},
         .cores = {16, "bench/results/cpu"},
         .clock_ghz = {3.6, kProbed},
         .rated_clock_ghz = {3.6, kProbed},
         .loaded_clock_ghz = {3.38, kProbed},
         .matrix_flop = {888, kProbed},
         .warp_matrix_share = {1, "no other MMA instruction is used"},
         .fma_flop = {64, kPorts},
         .exp_rate = {2.1, kProbed},
         .shared_bytes = {48, kUsual},
         .shared_kib = {2048, kUsual},
         .l2_bytes = {10, kUsual},
         .l2_mib = {32, kUsual},
         .reduce_bytes = {0, "no such unit"},
         .dram_gbs = {352, kProbed},
         .dram_read_share = {0.85, kUsual},
         .dram_copy_share = {0.7, kUsual},
         .memory_gib = {64, kUsual},
         .launch_us = {6, kInferred}},
    };
}

const char* name_of_host(std::string_view host) {
    // The hosts of bench/results/cpu/*_xeon16.machine.json.
    return host == "Intel(R) Xeon(R) Processor (AVX3, AMX, 16 cores, 300 MiB cache)" ? "xeon-16" : nullptr;
}

}  // namespace tessera::model
