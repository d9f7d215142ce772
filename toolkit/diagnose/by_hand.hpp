// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <vector>

#include "diagnose/name.hpp"
#include "diagnose/trace.hpp"

namespace tessera::diagnose {

/// One attention that is made of plain kernels: product, softmax, product, and what stands between them.
struct ByHand {
    KernelPass pass = KernelPass::forward;
    std::vector<std::uint32_t> runs;  ///< in Trace::runs, in the order of time
    std::uint32_t first_product = 0;  ///< Q K^T in the forward
    std::uint32_t softmax = 0;
};

/// What is asked of a run of the trace. Shapes are those of the operator that launched it; empty or false: not told.
struct RunFacts {
    std::function<Role(std::uint32_t run)> role;
    std::function<bool(std::uint32_t run)> taken;     ///< it belongs to another call already
    std::function<bool(std::uint32_t run)> compiled;  ///< Inductor wrote it: one of its operators may be many kernels
    /// A product is of many matrices at once, as far as is told. A layer's weights are multiplied by another operator.
    std::function<bool(std::uint32_t run)> batched;
    std::function<Sizes(std::uint32_t run)> softmax_input;
    /// Whether a product has a matrix like the scores' [len_q, len_kv] among its inputs, or as its output.
    std::function<bool(std::uint32_t run, const Sizes& scores)> reads;
    std::function<bool(std::uint32_t run, const Sizes& scores)> writes;
};

/// What the operators around a softmax tell of it.
struct SoftmaxSigns {
    Sizes scores;        ///< its input's shape; empty: not told
    bool safe = false;   ///< PyTorch's for rows that may be masked whole: only its math path and FlexAttention have it
    bool twice = false;  ///< it is in the gradient of a gradient
};

/// Says whose attention by hand is. The gradient of a gradient belongs to the attention whose backward went over scores
/// of the same shape before.
class ByHandReader {
 public:
    NameReading read(KernelPass pass, const SoftmaxSigns& signs);

 private:
    NameReading of_second_order(NameReading reading, const Sizes& scores) const;

    std::map<Sizes, NameReading> backwards_;
};

/// Attention that is made of plain kernels.
NameReading standard_attention(Family family, KernelPass pass, Confidence confidence);

/// Finds them by the order of runs on each stream. A softmax over a matrix of rank 2 is none (it chooses experts or
/// words). The products stand close to it, with elementwise kernels between them only; or, where shapes are told, they
/// stand anywhere near and their shapes are those of the scores.
std::vector<ByHand> find_by_hand(const Trace& trace, const RunFacts& facts);

}  // namespace tessera::diagnose
