// SPDX-License-Identifier: Apache-2.0
//
// A group's query heads, shared out: a block of keys goes over all heads of its group, unless a sequence's blocks are
// too few for a device. Then several thread blocks have the same keys, and a share of the heads each; dK and dV of a
// share are sums in fp32 in the workspace, added up in order by a kernel of their own.
#pragma once

#include <algorithm>
#include <cstdint>

#include "tessera/mask.hpp"

namespace tessera::cuda::gradient {

/// How a group is shared out: by the sequence's own shape alone, so that it has the same bits in any batch.
struct ShareRule {
    static constexpr int kKeys = 128;  // blocks are counted in these, whatever a kernel's are
    /// Thread blocks of a sequence that are wanted: under a causal mask they are unequal.
    static constexpr int kEnoughCausal = 512;
    static constexpr int kEnough = 128;
    /// Queries, of all its heads, that a share has at least: its sums cost about as much as two steps.
    static constexpr std::int64_t kQueries = 2048;

    /// As many queries as keys, and the mask causal and nothing else.
    TESSERA_HOST_DEVICE static constexpr bool triangle(const Band& band) {
        return band.len_q == band.len_kv && band.high == 0 && band.low <= 1 - band.len_q;
    }
    /// How many heads of a group are in a share (the last one may have fewer).
    TESSERA_HOST_DEVICE static constexpr int heads(const Band& band, int heads_kv, int group) {
        return heads(triangle(band), band.len_q, (band.len_kv + kKeys - 1) / kKeys, heads_kv, group);
    }
    TESSERA_HOST_DEVICE static constexpr int count(int heads_of_share, int group) {
        return (group + heads_of_share - 1) / heads_of_share;
    }
    /// The most shares of any sequence that has no more queries and keys.
    static constexpr int most(const Mask& mask, std::int64_t len_q, std::int64_t len_kv, int heads_kv, int group) {
        int most = 1;
        const std::int64_t blocks = std::min((len_kv + kKeys - 1) / kKeys, std::int64_t{kEnoughCausal});
        for (std::int64_t n = 1; n <= blocks && group > 1; ++n) {
            most = std::max(most, count(heads(!mask.trivial(), len_q, n, heads_kv, group), group));
        }
        return most;
    }

 private:
    TESSERA_HOST_DEVICE static constexpr int heads(bool triangle, std::int64_t len_q, std::int64_t blocks, int heads_kv,
                                                   int group) {
        const std::int64_t all = blocks * heads_kv;
        const int enough = triangle ? kEnoughCausal : kEnough;
        if (group == 1 || all == 0 || all >= 2 * enough) return group;
        const auto few = static_cast<int>(all);
        int wanted = (enough + few - 1) / few;
        if (triangle && wanted == 1) wanted = 2;
        const std::int64_t possible = len_q * group / kQueries;
        if (wanted > possible) wanted = static_cast<int>(possible);
        if (wanted <= 1) return group;
        return wanted >= group ? 1 : (group + wanted - 1) / wanted;
    }
};

/// The sums of shares in the workspace.
struct ShareSums {
    float* data = nullptr;  // [2: dK, dV][most][heads_kv][keys][dim]
    int most = 1;           // shares that a sequence can have
    std::int64_t keys = 0;  // of all sequences
    int heads_kv = 0;
    int dim = 0;  // padded

    TESSERA_HOST_DEVICE float* row(bool dv, int share, int kv_head, std::int64_t key) const {
        return data + (((std::int64_t{dv} * most + share) * heads_kv + kv_head) * keys + key) * dim;
    }
};

}  // namespace tessera::cuda::gradient
