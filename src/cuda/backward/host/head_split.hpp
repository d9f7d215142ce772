// SPDX-License-Identifier: Apache-2.0
//
// The split of a group's query heads over CTAs in a backward. A CTA usually goes over all query heads of its kv head,
// so that dK and dV are sums in its registers. If a sequence has too few key blocks for a GPU, several CTAs have the
// same keys and some of the heads each. They write partial dK and dV in fp32, which dkdv_reduce_kernel adds up in
// order.
//
// The number of splits depends on the sequence's own shape and the size of a group, so a kv head has the same bits in
// any batch and among any number of heads. fa3/backward and gradient have a rule each, fitted to the times of their
// kernels. The splits decide the order of the sums, so one rule for both would change bits of dK and dV.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/backward/host/dq_order.hpp"
#include "tessera/mask.hpp"

namespace tessera::cuda {

/// The rule of fa3/backward, for causal sequences with as many queries as keys. All splits have equally many heads. The
/// number of splits is doubled while a CTA has more than kMaxHeads query heads or one kv head has fewer than kMinBlocks
/// CTAs, and while a CTA keeps kMinHeads heads and the longest one kMinSteps steps. (Its prologue and epilogue cost
/// about 3 steps.)
struct EvenHeadSplit {
    static constexpr int kMaxHeads = 4;
    static constexpr int kMinHeads = 2;
    static constexpr int kMinBlocks = 256;
    static constexpr int kMinSteps = 64;  // steps of kStepQueries queries
    static constexpr int kStepQueries = 64;

    /// Splits of a sequence of `len` queries and keys. `blocks`: its key blocks of one kv head.
    TESSERA_HOST_DEVICE static constexpr int num_splits(int group, int blocks, int len) {
        const std::int64_t steps = std::int64_t{group} * ((len + kStepQueries - 1) / kStepQueries);
        int splits = 1;
        while (group % (2 * splits) == 0 && group >= 2 * splits * kMinHeads && steps / (2 * splits) >= kMinSteps &&
               (group > kMaxHeads * splits || std::int64_t{blocks} * splits < kMinBlocks)) {
            splits *= 2;
        }
        return splits;
    }
    /// The largest num_splits() of any sequence with at most `len` keys.
    static constexpr int max_splits(const Mask& mask, int group, int len, int block_kv) {
        if (group == 1 || mask.trivial()) return 1;
        int largest = num_splits(group, (len + block_kv - 1) / block_kv, len);
        // From kMinBlocks blocks on, more keys never mean fewer splits.
        for (int n = 1; n <= kMinBlocks && n * block_kv <= len; ++n) {
            largest = std::max(largest, num_splits(group, n, n * block_kv));
        }
        return largest;
    }
};

/// The rule of gradient, for all masks. The last split may have fewer heads than the others.
struct HeadSplit {
    static constexpr int kKeys = 128;  // keys of a block as counted here, whatever the kernel's key blocks are
    /// CTAs wanted for one sequence of assumed_kv_heads(). Under a causal mask their work is unequal, so more are
    /// needed.
    static constexpr int kWantedCausal = 512;
    static constexpr int kWanted = 128;
    /// Queries, over all its heads, that a split has at least: writing partial sums costs about two steps.
    static constexpr std::int64_t kMinQueries = 2048;

    /// Query heads in a split.
    TESSERA_HOST_DEVICE static constexpr int heads_per_split(const Band& band, int group) {
        return heads_per_split(is_causal_square(band), band.len_q, (band.len_kv + kKeys - 1) / kKeys, group);
    }
    TESSERA_HOST_DEVICE static constexpr int num_splits(int heads_per_split, int group) {
        return heads_per_split == 0 ? 1 : (group + heads_per_split - 1) / heads_per_split;  // 0: no query heads
    }
    /// The splits of a sequence.
    TESSERA_HOST_DEVICE static constexpr int num_splits(const Band& band, int group) {
        return num_splits(heads_per_split(band, group), group);
    }
    /// The largest num_splits() of any sequence with at most `len_q` queries and `len_kv` keys.
    static constexpr int max_splits(const Mask& mask, std::int64_t len_q, std::int64_t len_kv, int group) {
        int largest = 1;
        const std::int64_t blocks = std::min((len_kv + kKeys - 1) / kKeys, std::int64_t{kWantedCausal});
        for (std::int64_t n = 1; n <= blocks && group > 1; ++n) {
            largest = std::max(largest, num_splits(heads_per_split(!mask.trivial(), len_q, n, group), group));
        }
        return largest;
    }

 private:
    TESSERA_HOST_DEVICE static constexpr int heads_per_split(bool causal, std::int64_t len_q, std::int64_t blocks,
                                                             int group) {
        const std::int64_t ctas = blocks * assumed_kv_heads(group);
        const int wanted_ctas = causal ? kWantedCausal : kWanted;
        if (group == 1 || ctas == 0 || ctas >= 2 * wanted_ctas) return group;
        const auto few = static_cast<int>(ctas);
        int wanted = (wanted_ctas + few - 1) / few;
        if (causal && wanted == 1) wanted = 2;
        const std::int64_t possible = len_q * group / kMinQueries;
        if (wanted > possible) wanted = static_cast<int>(possible);
        if (wanted <= 1) return group;
        return wanted >= group ? 1 : (group + wanted - 1) / wanted;
    }
};

}  // namespace tessera::cuda
