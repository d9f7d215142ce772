// SPDX-License-Identifier: Apache-2.0
//
// A machine as data: rates and capacities, each with where the number comes from. Knows nothing of attention. What
// predict() (predict.hpp) needs of a machine; machines() has those that are known, and a program may fill in its own.
#pragma once

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

/// What a kind of CPU kernel reaches of a machine's rates, and what a call of it costs there.
struct KernelShares {
    double product_share;  ///< of the product rate that they reach; over 1 by as much as the rate was timed too low
    double exp_share;  ///< of the exponentials' time: with the maximum, sums and rescaling, less what is under products
    double last;       ///< tasks that the last thread is later by, in tiles of queries (backward: of keys)
    double loops;      ///< starts of parallel loops that the call is worth
    double call_us;    ///< of a call, whatever its size: code and tables are cold
    double pack_ns = 0;   ///< of an element that is packed, with what it takes to fetch it
    double crowd = 1;     ///< share of a thread's speed that is left when all cores work, beyond the clock
    double start_us = 0;  ///< until sleeping threads are awake and have what they need, with all cores
    double read_share =
        1;  ///< of the memory's rate at which cold tensors are read; over 1 where a cache has part of them
    double mask_share = 0;  ///< of the exponentials' time: more on a matrix unit where a mask or an end cuts the keys
};

/// KernelShares of one kind, measured on a machine.
struct MeasuredKernels {
    std::string kernels;  ///< "bf16 forward", "standard backward"
    KernelShares shares;
    std::string source;
};

/// "Core": a multiprocessor of a GPU, a hardware thread of a CPU. "clk": a clock of it.
struct Machine {
    std::string name;   ///< "h200"; what --device takes
    std::string title;  ///< "NVIDIA H200 SXM, 141 GB"
    MachineKind kind = MachineKind::gpu;
    Quantity capability;         ///< GPU: 9.0; CPU: 0
    Quantity cores;              ///< multiprocessors; hardware threads
    Quantity clock_ghz;          ///< highest clock under light load (on a CPU: one thread busy)
    Quantity rated_clock_ghz;    ///< the clock at which the maker states peak rates: roofs are drawn with it
    Quantity loaded_clock_ghz;   ///< with all product units busy: what the power allows
    Quantity matrix_flop;        ///< FLOP/clk/core of products: 16-bit inputs, fp32 sums; CPU: bf16
    Quantity warp_matrix_share;  ///< of it that warp-wide instructions (mma.sync) reach; 1 where they are the best
    Quantity fma_flop;           ///< FLOP/clk/core of fp32 multiply-adds
    Quantity exp_rate;           ///< exponentials/clk/core
    Quantity shared_bytes;       ///< bytes/clk/core of near memory: shared memory; CPU: its second-level cache
    Quantity shared_kib;         ///< KiB of it for one core
    Quantity l2_bytes;           ///< bytes/clk/core from what all cores share: L2; CPU: its last level
    Quantity l2_mib;             ///< MiB of it
    Quantity reduce_bytes;       ///< bytes/clk/core of fp32 sums added there by all cores at once; CPU: 0
    Quantity dram_gbs;           ///< GB/s, peak
    Quantity dram_read_share;    ///< of it that reading reaches
    Quantity dram_copy_share;    ///< of it that reading and writing at once reach
    Quantity memory_gib;         ///< GiB of device memory
    Quantity launch_us;          ///< microseconds from one kernel to the next; CPU: to start a parallel loop
    /// CPU: kinds that were measured, each once. Others are as on the hosts of the fit, with these kinds' median
    /// start_us and crowd.
    std::vector<MeasuredKernels> kernels{};

    /// Does it compute Problems of this dtype at all?
    bool supports(DType dtype) const;
    /// FLOP/clk/core of matrix products of this dtype; `warp_wide`: by mma.sync.
    double product_flop(DType dtype, bool warp_wide) const;
    /// Peak TFLOP/s of products of this dtype, at the rated clock: of fp32 on a CPU by multiply-adds or in bf16 parts.
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

/// Calls f(name, shares.member) for each number, in the order above.
template <class S, class F>
void for_each_share(S& s, F&& f) {
    f("product_share", s.product_share), f("exp_share", s.exp_share), f("last", s.last), f("loops", s.loops);
    f("call_us", s.call_us), f("pack_ns", s.pack_ns), f("crowd", s.crowd), f("start_us", s.start_us);
    f("read_share", s.read_share), f("mask_share", s.mask_share);
}

/// Every machine that is known by name.
std::span<const Machine> machines();

/// The machine of this name ("h200"), or null.
const Machine* find_machine(std::string_view name);

/// The machine that Records of this device text were measured on, or null. A GPU is known by its name ("NVIDIA H200" ->
/// h200). A host is known by processor, instruction set, matrix unit, cores and cache together, since many machines
/// share a processor's name: "Intel(R) Xeon(R) Processor (AVX3, AMX, 16 cores, 300 MiB cache)" -> xeon-16.
const Machine* machine_of_device(std::string_view device);

/// Throws Error(bad_data) naming the first quantity that no machine can have (negative, not finite, a share over 1), or
/// what no measured kernels can be: of a GPU, of no known kind, of a kind that was there before, out of range.
void validate(const Machine& machine);

}  // namespace tessera
#pragma GCC visibility pop
