// SPDX-License-Identifier: Apache-2.0
//
// A machine as data: the rates and capacities that predict() (predict.hpp) needs, each with its source. Nothing here
// knows attention. machines() has the known machines, and a program may fill in its own.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/dtype.hpp"

#pragma GCC visibility push(default)
namespace tessera {

/// A number and its source: a datasheet, a paper, a Record of a measurement, or an estimate that says so.
struct Quantity {
    double value = 0;
    std::string source{};
    operator double() const { return value; }
};

enum class MachineKind { gpu, cpu };

/// How fast a kind of tessera's CPU kernels runs on a machine: fitted constants of the cost model, which only the
/// library reads (src/model/kernel_shares.hpp).
struct MeasuredKernels;

/// A "core" is a multiprocessor of a GPU or a hardware thread of a CPU; "clk" is one clock cycle of it.
struct Machine {
    std::string name;   ///< "h200"; what --device takes
    std::string title;  ///< "NVIDIA H200 SXM, 141 GB"
    MachineKind kind = MachineKind::gpu;
    Quantity capability;         ///< GPU: 9.0; CPU: 0
    Quantity cores;              ///< multiprocessors; hardware threads
    Quantity clock_ghz;          ///< highest clock under light load (on a CPU: one thread busy)
    Quantity rated_clock_ghz;    ///< the clock at which the maker states peak rates: roofs are drawn with it
    Quantity loaded_clock_ghz;   ///< the clock that the power limit allows with all matrix units busy
    Quantity matrix_flop;        ///< FLOP/clk/core of matrix products: 16-bit inputs, fp32 sums; CPU: bf16
    Quantity warp_matrix_share;  ///< share of matrix_flop that mma.sync reaches; 1 where there is no wgmma
    Quantity fma_flop;           ///< FLOP/clk/core of fp32 multiply-adds
    Quantity exp_rate;           ///< exponentials/clk/core
    Quantity shared_bytes;       ///< bytes/clk/core of shared memory; CPU: of the core's second-level cache
    Quantity shared_kib;         ///< KiB of that memory for one core
    Quantity l2_bytes;           ///< bytes/clk/core of the L2 cache; CPU: of the last-level cache
    Quantity l2_mib;             ///< MiB of that cache
    Quantity reduce_bytes;       ///< bytes/clk/core of fp32 reductions into L2 with all cores busy; CPU: 0
    Quantity dram_gbs;           ///< GB/s, peak
    Quantity dram_read_share;    ///< share of dram_gbs that reading reaches
    Quantity dram_copy_share;    ///< share of dram_gbs that reading and writing at once reach
    Quantity memory_gib;         ///< GiB of device memory
    Quantity launch_us;          ///< microseconds from one kernel to the next; CPU: to start a parallel loop
    /// CPU: the kinds of kernels that `tessera calibrate` measured on this machine; null: none. The model takes the
    /// constants of other kinds from the hosts that it was fitted on.
    std::shared_ptr<const std::vector<MeasuredKernels>> kernels{};

    /// Does it compute Problems of this dtype at all?
    bool supports(DType dtype) const;
    /// FLOP/clk/core of matrix products of this dtype; `warp_wide`: by mma.sync.
    double gemm_flop(DType dtype, bool warp_wide) const;
    /// Peak TFLOP/s of products of this dtype, at the rated clock: of fp32 by multiply-adds or in
    /// three bf16 parts, whichever is faster.
    double peak_tflops(DType dtype) const;
};

/// Calls f(name, unit, machine.member) for every Quantity, in the order above.
template <class M, class F>
void for_each_quantity(M& m, F&& f) {
    f("capability", "", m.capability), f("cores", "", m.cores);
    f("clock_ghz", "GHz", m.clock_ghz), f("rated_clock_ghz", "GHz", m.rated_clock_ghz);
    f("loaded_clock_ghz", "GHz", m.loaded_clock_ghz);
    f("matrix_flop", "FLOP/clk/core", m.matrix_flop), f("warp_matrix_share", "", m.warp_matrix_share);
    f("fma_flop", "FLOP/clk/core", m.fma_flop), f("exp_rate", "exp/clk/core", m.exp_rate);
    f("shared_bytes", "B/clk/core", m.shared_bytes), f("shared_kib", "KiB/core", m.shared_kib);
    f("l2_bytes", "B/clk/core", m.l2_bytes), f("l2_mib", "MiB", m.l2_mib);
    f("reduce_bytes", "B/clk/core", m.reduce_bytes), f("dram_gbs", "GB/s", m.dram_gbs);
    f("dram_read_share", "", m.dram_read_share), f("dram_copy_share", "", m.dram_copy_share);
    f("memory_gib", "GiB", m.memory_gib), f("launch_us", "us", m.launch_us);
}

/// Every machine that is known by name.
std::span<const Machine> machines();

/// The machine of this name ("h200"), or null.
const Machine* find_machine(std::string_view name);

/// The machine that Records of this device text were measured on, or null. A GPU is known by its name ("NVIDIA H200" ->
/// h200). A host is known by processor, instruction set, matrix unit, cores and cache together, since many machines
/// share a processor's name: "Intel(R) Xeon(R) Processor (AVX3, AMX, 16 cores, 300 MiB cache)" -> xeon-16.
const Machine* machine_of_device(std::string_view device);

/// Throws Error(bad_data) naming the first quantity that no machine can have (negative, not finite, a share over 1). It
/// also throws for `kernels` of a GPU, of an unknown kind, listed twice, or with a constant out of range.
void validate(const Machine& machine);

}  // namespace tessera
#pragma GCC visibility pop
