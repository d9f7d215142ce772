// SPDX-License-Identifier: Apache-2.0
//
// The split of a group's query heads over CTAs. A CTA usually goes over all query heads of its kv head, so that dK and
// dV are sums in its registers. If a sequence has too few key blocks for a GPU, several CTAs have the same keys and
// some of the heads each. They write partial dK and dV in fp32, which dkdv_reduce_kernel adds up in order.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/gradient/host/dq_order.hpp"
#include "tessera/mask.hpp"

namespace tessera::cuda::gradient {

/// The number of splits. It depends on the shape of the sequence alone, so a sequence has the same bits in any batch.
struct HeadSplit {
    static constexpr int kKeys = 128;  // keys of a block as counted here, whatever the kernel's key blocks are
    /// CTAs wanted for one sequence. Under a causal mask their work is unequal, so more are needed.
    static constexpr int kWantedCausal = 512;
    static constexpr int kWanted = 128;
    /// Queries, over all its heads, that a split has at least: writing partial sums costs about two steps.
    static constexpr std::int64_t kMinQueries = 2048;

    /// Query heads in a split; the last split may have fewer.
    TESSERA_HOST_DEVICE static constexpr int heads_per_split(const Band& band, int heads_kv, int group) {
        return heads_per_split(is_triangle(band), band.len_q, (band.len_kv + kKeys - 1) / kKeys, heads_kv, group);
    }
    TESSERA_HOST_DEVICE static constexpr int num_splits(int heads_per_split, int group) {
        return (group + heads_per_split - 1) / heads_per_split;
    }
    /// The largest num_splits() of any sequence with at most `len_q` queries and `len_kv` keys.
    static constexpr int max_splits(const Mask& mask, std::int64_t len_q, std::int64_t len_kv, int heads_kv,
                                    int group) {
        int largest = 1;
        const std::int64_t blocks = std::min((len_kv + kKeys - 1) / kKeys, std::int64_t{kWantedCausal});
        for (std::int64_t n = 1; n <= blocks && group > 1; ++n) {
            largest = std::max(largest, num_splits(heads_per_split(!mask.trivial(), len_q, n, heads_kv, group), group));
        }
        return largest;
    }

 private:
    TESSERA_HOST_DEVICE static constexpr int heads_per_split(bool causal, std::int64_t len_q, std::int64_t blocks,
                                                             int heads_kv, int group) {
        const std::int64_t ctas = blocks * heads_kv;
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

/// Partial dK and dV in the workspace.
struct PartialSums {
    float* data = nullptr;  // [2: dK, dV][max_splits][heads_kv][keys][dim]
    int max_splits = 1;     // the most splits of any sequence
    std::int64_t keys = 0;  // keys of all sequences
    int heads_kv = 0;
    int dim = 0;  // padded

    TESSERA_HOST_DEVICE float* row(bool dv, int split, int kv_head, std::int64_t key) const {
        return data + (((std::int64_t{dv} * max_splits + split) * heads_kv + kv_head) * keys + key) * dim;
    }
};

}  // namespace tessera::cuda::gradient
