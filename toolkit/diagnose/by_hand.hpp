// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <vector>

#include "diagnose/name.hpp"
#include "diagnose/trace.hpp"

namespace tessera::diagnose {

/// One attention that is made of plain kernels: GEMM, softmax, GEMM, and the kernels between them.
struct ByHand {
    KernelPass pass = KernelPass::forward;
    std::vector<std::uint32_t> runs;  ///< indices into Trace::runs, in the order of time
    std::uint32_t first_gemm = 0;     ///< index of the run: Q K^T in the forward
    std::uint32_t softmax = 0;
};

/// Answers questions about a run of the trace. Shapes are those of the operator that launched it; an unknown shape is
/// empty, an unknown answer false.
struct RunFacts {
    std::function<Role(std::uint32_t run)> role;
    std::function<bool(std::uint32_t run)> taken;  ///< the run belongs to another call already
    /// Inductor wrote the kernel: one of its operators may be many kernels
    std::function<bool(std::uint32_t run)> compiled;
    /// True if a GEMM is known to be batched. A layer's weights are multiplied by another operator.
    std::function<bool(std::uint32_t run)> batched;
    std::function<Sizes(std::uint32_t run)> softmax_input;
    /// True if a GEMM has a matrix of the scores' shape [len_q, len_kv] among its inputs, or as its output.
    std::function<bool(std::uint32_t run, const Sizes& scores)> reads;
    std::function<bool(std::uint32_t run, const Sizes& scores)> writes;
};

/// Properties of a softmax that the operators around it show.
struct SoftmaxSigns {
    Sizes scores;        ///< its input's shape; empty: unknown
    bool safe = false;   ///< PyTorch's variant for fully masked rows; only its math path and FlexAttention use it
    bool twice = false;  ///< the softmax is part of a second derivative
};

/// Names the library behind an attention by hand. A second derivative belongs to the attention whose backward, earlier
/// in the trace, had scores of the same shape.
class ByHandReader {
 public:
    NameReading read(KernelPass pass, const SoftmaxSigns& signs);

 private:
    NameReading of_second_order(NameReading reading, const Sizes& scores) const;

    std::map<Sizes, NameReading> backwards_;
};

/// The reading of an attention that is made of plain kernels.
NameReading standard_attention(Family family, KernelPass pass, Confidence confidence);

/// Finds attentions by hand by the order of runs on each stream. A softmax over a matrix of rank 2 is skipped: it
/// chooses experts or words. If shapes are known, the GEMMs may stand anywhere near and must have the shape of the
/// scores. Otherwise only elementwise kernels may stand between them and the softmax.
std::vector<ByHand> find_by_hand(const Trace& trace, const RunFacts& facts);

}  // namespace tessera::diagnose
