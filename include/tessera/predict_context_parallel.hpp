// SPDX-License-Identifier: Apache-2.0
//
// predict_context_parallel() says how long attention of one sequence takes whose rows are spread over GPUs, without
// running anything. docs/context-parallel.md has the design that it describes, docs/model.md the formulas.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/machine.hpp"
#include "tessera/predict.hpp"

#pragma GCC visibility push(default)
namespace tessera {

/// A link between GPUs, with the rates that it reaches while all GPUs take part. GPUs exchange by NCCL; those of one
/// host may copy from each other where the link has a rate for that.
struct Link {
    std::string name;           ///< "nvlink"; what --link takes
    Quantity copy_gbs{};        ///< GB/s of copies from other GPUs of the host; 0: none
    Quantity copy_us{};         ///< microseconds of a copy beside its bytes
    Quantity meet_us{};         ///< microseconds in which all GPUs wait for each other before they copy
    Quantity gather_gbs{};      ///< GB/s that each GPU receives in an all_gather
    Quantity gather_us{};       ///< microseconds of an all_gather of two GPUs beside its bytes
    Quantity send_gbs{};        ///< GB/s that each GPU receives in an all_to_all, and in the step of a ring
    Quantity send_us{};         ///< microseconds of these beside their bytes, of two GPUs
    Quantity hop_us{};          ///< microseconds more for each further GPU
    int gpus_of_host = 0;       ///< the most GPUs that it joins; 0: any number
    Quantity between_gbs{};     ///< GB/s of each GPU from other hosts; 0 where gpus_of_host is 0
    Quantity between_hop_us{};  ///< hop_us of GPUs of other hosts
    int measured_gpus = 0;      ///< its rates were measured on this many GPUs; 0: on none
};

/// The links that are known by name: "nvlink", "pcie", "ib".
std::span<const Link> links();

/// The link of this name, or null.
const Link* find_link(std::string_view name);

/// The options of predict_context_parallel().
struct PredictContextParallelOptions {
    int ranks = 2;  ///< GPUs
    Link link{};
    int steps = 0;             ///< groups of key heads; 0: as many as tessera.torch takes on CUDA
    PredictOptions kernels{};  ///< of the kernels; an empty `by` stands for tessera. `sequences`: the packed documents
    bool copies = true;        ///< GPUs of one host copy from each other, as in Python; false: by NCCL
};

/// The time of a call over several GPUs and what it is made of. Times are in milliseconds.
struct ContextParallelPrediction {
    Pass pass{};
    int ranks = 1;
    int steps = 1;
    /// "zigzag" under a plain causal mask, else "contiguous"; with documents the order of balance_documents().
    std::string order;
    double ms = 0;                    ///< until the last GPU is done
    double error = 0;                 ///< the error bar, as in Prediction
    bool measured = false;            ///< the rates of the link were measured on at least so many GPUs
    double one_gpu_ms = 0;            ///< the whole sequence on one GPU by the same kernel
    bool fits_one_gpu = true;         ///< its tensors and workspace fit that GPU's memory
    double share = 0;                 ///< one_gpu_ms / (ranks * ms): 1 would be perfect
    double kernel_ms = 0;             ///< the kernels of all steps, alone
    double exchange_ms = 0;           ///< what crosses GPUs, alone
    double hidden_ms = 0;             ///< the part of exchange_ms in which kernels run
    std::int64_t bytes_received = 0;  ///< bytes that a GPU receives, at most
    std::int64_t memory = 0;          ///< bytes beside the tensors of the call, at most
    double ring_ms = 0;               ///< the same call by ring attention, from the same formulas; no ring was measured
    std::int64_t ring_memory = 0;
    std::vector<Part> parts{};  ///< add up to ms
};

/// The reason why there is no prediction, or nothing when there is one.
std::optional<std::string> context_parallel_refusal(const Problem& problem, Schedule schedule, Pass pass,
                                                    const Machine& machine,
                                                    const PredictContextParallelOptions& options);

/// Predicts tessera.torch.context_parallel_attention on a Problem, which is that of the whole sequence (or of a batch
/// of equal ones): as many queries as keys, no cache. A ragged Problem is one sequence of packed documents, which may
/// cross GPUs; options.kernels.sequences has their lengths, whose sum the GPUs divide. Throws Error(unsupported) with
/// the reason of context_parallel_refusal(), and Error(invalid_argument) naming the option that is out of range.
ContextParallelPrediction predict_context_parallel(const Problem& problem, Schedule schedule, Pass pass,
                                                   const Machine& machine,
                                                   const PredictContextParallelOptions& options);

}  // namespace tessera
#pragma GCC visibility pop
