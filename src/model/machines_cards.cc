// SPDX-License-Identifier: Apache-2.0
//
// GPUs with the chip or the generation of one in machines_gpu.cc: the quantities that differ, with their sources.
#include "model/machines.hpp"

namespace tessera::model {
namespace {

constexpr const char* kCardSheet = "NVIDIA datasheet or architecture whitepaper";
constexpr const char* kCardRate = "whitepaper: dense peak with fp32 sums / (multiprocessors * rated clock)";
constexpr const char* kCardGuide = "CUDA C++ Programming Guide: arithmetic throughput, compute capabilities";
constexpr const char* kCudnnTables = "estimate, with the tables of NVIDIA/cudnn-frontend in view (fitted_cards.jsonl)";

struct CardSizes {
    double cores, l2_mib, dram_gbs, memory_gib;
};

Machine card(Machine base, const char* name, const char* title, const CardSizes& sizes) {
    base.name = name;
    base.title = title;
    base.cores = {sizes.cores, kCardSheet};
    base.l2_mib = {sizes.l2_mib, kCardSheet};
    base.dram_gbs = {sizes.dram_gbs, kCardSheet};
    base.memory_gib = {sizes.memory_gib, kCardSheet};
    return base;
}

void set_clocks(Machine& machine, const Quantity& highest, double rated, const Quantity& loaded) {
    machine.clock_ghz = highest;
    machine.rated_clock_ghz = {rated, kCardSheet};
    machine.loaded_clock_ghz = loaded;
}

const Machine& named(const std::vector<Machine>& known, std::string_view name) {
    for (const Machine& machine : known) {
        if (machine.name == name) return machine;
    }
    return known.front();
}

}  // namespace

void add_cards(std::vector<Machine>& list) {
    const std::vector<Machine> known = list;
    Machine a100_pcie = card(named(known, "a100"), "a100-pcie", "NVIDIA A100 PCIe, 80 GB", {108, 40, 1935, 80});
    a100_pcie.loaded_clock_ghz = {1.2, "estimate: 300 W limit"};
    list.push_back(a100_pcie);
    list.push_back(card(named(known, "a100"), "a800", "NVIDIA A800 SXM, 80 GB", {108, 40, 2039, 80}));
    Machine a6000 = card(named(known, "rtxa5000"), "a6000", "NVIDIA RTX A6000, 48 GB", {84, 6, 768, 48});
    set_clocks(a6000, {1.86, "estimate: boost beyond the rated clock"}, 1.8, {1.5, "estimate: 300 W limit"});
    list.push_back(a6000);
    Machine l40s = card(named(known, "l4"), "l40s", "NVIDIA L40S, 48 GB", {142, 96, 864, 48});
    set_clocks(l40s, {2.52, kCardSheet}, 2.52, {1.9, "estimate: 350 W limit"});
    list.push_back(l40s);
    Machine gh200 = card(named(known, "h200"), "gh200", "NVIDIA GH200, 96 GB", {132, 50, 4000, 96});
    set_clocks(gh200, {1.98, "as on H200: the same chip"}, 1.83, {1.7, "estimate: up to 900 W with the processor"});
    list.push_back(gh200);
    Machine h20 = card(named(known, "h200"), "h20", "NVIDIA H20, 96 GB", {78, 60, 4000, 96});
    set_clocks(h20, {1.98, "as on H200: the same chip"}, 1.83, {1.9, "estimate: 500 W limit"});
    h20.matrix_flop = {1037, kCardRate};
    h20.warp_matrix_share = {0.95, "estimate, with flash-attention #1310 in view: 82 of 148 TFLOP/s by mma.sync"};
    list.push_back(h20);

    const Machine& b200 = named(known, "b200");
    Machine gb200 = card(b200, "gb200", "NVIDIA GB200, one GPU, 185 GB", {152, 126, 8000, 185});
    set_clocks(gb200, {2.06, "2,568 TFLOP/s at the clock of the tables of NVIDIA/cudnn-frontend"}, 2.06,
               {1.75, kCudnnTables});
    list.push_back(gb200);
    Machine b300 = card(b200, "b300", "NVIDIA B300, 270 GB", {148, 126, 8000, 270});
    b300.exp_rate = {32, "NVIDIA on Blackwell Ultra: twice the exponentials of B200"};
    b300.capability = {10.3, kCardSheet};
    list.push_back(b300);
    Machine gb300 = card(b300, "gb300", "NVIDIA GB300, one GPU, 270 GB", {152, 126, 8000, 270});
    set_clocks(gb300, {2.1, kCudnnTables}, 2.06, {2.0, kCudnnTables});
    list.push_back(gb300);

    // Blackwell of compute capability 12 has no tcgen05.
    Machine pro =
        card(named(known, "rtx4090"), "rtxpro6000", "NVIDIA RTX PRO 6000 Blackwell, 96 GB", {188, 128, 1792, 96});
    pro.capability = {12.0, kCardGuide};
    pro.matrix_flop = {1024, kCardRate};
    set_clocks(pro, {2.6, kCardSheet}, 2.6, {2.4, kCudnnTables});
    list.push_back(pro);
    Machine rtx5090 = card(pro, "rtx5090", "NVIDIA GeForce RTX 5090, 32 GB", {170, 96, 1792, 32});
    rtx5090.matrix_flop = {512, "whitepaper: 209.5 TFLOP/s with fp32 sums"};
    set_clocks(rtx5090, {2.6, "estimate: boost beyond the rated clock"}, 2.41, {2.5, "estimate: 575 W limit"});
    list.push_back(rtx5090);
}

}  // namespace tessera::model
