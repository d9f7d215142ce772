// SPDX-License-Identifier: Apache-2.0
//
// Who adds to a block of dQ when. Blocks of keys n add to blocks of queries m in a fixed order, and so that nobody
// waits for long: block n starts at the queries that are as far along as it is itself, goes to the last that sees it
// (sum 0), then on from the first one (sum 1). For one m the order is n falling, in both sums, so that n follows n + 1,
// which started earlier and some steps further on.
//
// Where blocks of keys differ most in length and take long (causal, as many queries as keys, the heads of a group by
// one block) the longest start first. There n rises, and blocks go from the last queries back to the diagonal, in one
// sum, with all their heads of the group at each stop: a block is one step behind the one before, and shorter.
//
// With one head a group such blocks stay falling, and the longest would come last. So a head's blocks are in kParts
// parts, n falling in each; the parts of all heads with the longest blocks start first. Who adds first has still
// started first.
#pragma once

#include <algorithm>

#include "cuda/fa3/host/backward_config.h"
#include "tessera/mask.hpp"

namespace tessera::cuda::fa3::backward {

/// Blocks begin ... end - 1.
struct Span {
    int begin, end;
};

/// Which pairs of one sequence count. 32 bits are enough: the kernel refuses longer tensors.
struct Pairs {
    int len_q, len_kv;
    int low, high;  ///< key k is visible to query q if q + low <= k <= q + high

    /// Are all pairs of these queries and keys there and visible?
    TESSERA_HOST_DEVICE bool full(int query, int queries, int key, int keys) const {
        return query + queries <= len_q && key + keys <= len_kv && key >= query + queries - 1 + low &&
               key + keys - 1 <= query + high;
    }
};

/// Of a head's blocks of keys, where they start in parts, and the fewest blocks that are worth it, of a head and of all
/// heads of a sequence: where all of them run at once, parts would only wait for each other.
inline constexpr int kParts = 4;
inline constexpr int kFewestInParts = 16;
inline constexpr int kFewestOfHeads = 256;

/// Without a mask, so many blocks of keys start at the first queries, all of them, and there is one sum: each is a step
/// behind the one before, which is worth it where steps are few.
inline constexpr int kMostStraight = 4;

/// May sequences of a call start their blocks in parts? `most`: blocks of keys of one head, at most.
TESSERA_HOST_DEVICE constexpr bool may_start_in_parts(const Mask& mask, int group, int heads, int most) {
    return group == 1 && !mask.trivial() && most >= kFewestInParts && std::int64_t{heads} * most >= kFewestOfHeads;
}

/// Where n rises, a block goes through all its query heads at each stop: with many of them, blocks that keep together
/// hold more rows than the second-level cache; and where lengths are short there are few blocks, the longest of which
/// takes twice the mean. So the query heads of a group are shared out to thread blocks: their dK and dV are shares,
/// which a kernel of its own adds up in order (shares.cuh). There are shares until each has kMostTogether heads and a
/// sequence kFewestToShare blocks, as long as the longest of them has kFewestSteps (of 64 queries), of which its ends
/// take three. The sequence's own length and the heads of the call decide, so a sequence has the same bits in any
/// batch.
inline constexpr int kMostTogether = 4;
inline constexpr int kFewestToShare = 256;
inline constexpr int kFewestSteps = 64;

/// Shares of a group in a causal sequence of `len` queries and keys; `count`: its blocks of keys of one kv head.
TESSERA_HOST_DEVICE constexpr int shares_of(int group, int heads_kv, int count, int len) {
    const std::int64_t steps = std::int64_t{group} * ((len + 63) / 64);
    int shares = 1;
    while (group % (2 * shares) == 0 && steps / (2 * shares) >= kFewestSteps &&
           (group > kMostTogether * shares || std::int64_t{heads_kv} * count * shares < kFewestToShare)) {
        shares *= 2;
    }
    return shares;
}

/// The most shares of any sequence of no more than `len` keys.
TESSERA_HOST_DEVICE constexpr int most_shares(const Mask& mask, int group, int heads_kv, int len, int block_kv) {
    if (group == 1 || mask.trivial()) return 1;
    int most = shares_of(group, heads_kv, (len + block_kv - 1) / block_kv, len);
    // With more blocks than these, longer sequences have no fewer.
    for (int count = 1; heads_kv * (count - std::int64_t{1}) < kFewestToShare && count * block_kv <= len; ++count) {
        most = std::max(most, shares_of(group, heads_kv, count, count * block_kv));
    }
    return most;
}

/// What is worked out of a sequence once.
struct BlockCounts : Pairs {
    int count_q, count_kv;  ///< blocks
    int apart;              ///< blocks of queries between the starts of neighbouring blocks of keys; or, if there ...
    int together;           ///< ... are more blocks of keys, how many of them start at the same one
    bool rising;            ///< n rises
    bool parted;            ///< n falls in each part, and parts rise
    int shares;             ///< of a group's query heads: each has a thread block for a block of keys
    int share_heads;        ///< query heads of a share
};

/// The blocks of one head of one sequence.
template <int kBlockQ, int kBlockKv>
struct Blocks : BlockCounts {
    /// `group`: query heads of a kv head.
    TESSERA_HOST_DEVICE void set(const Mask& mask, int own_len_q, int own_len_kv, int group, int heads_kv) {
        const Band band = mask.bind(own_len_q, own_len_kv);
        len_q = own_len_q;
        len_kv = own_len_kv;
        low = static_cast<int>(std::max(band.low, -band.len_q));
        high = static_cast<int>(std::min(band.high, band.len_kv));
        count_q = (len_q + kBlockQ - 1) / kBlockQ;
        count_kv = (len_kv + kBlockKv - 1) / kBlockKv;
        apart = std::max((count_q + 1) / std::max(count_kv, 1), 1);
        together = std::max((count_kv + count_q - 1) / std::max(count_q, 1), 1);
        if (count_q >= count_kv) together = 1;
        else apart = 1;
        const bool all_seen = low <= 1 - len_q && high >= len_kv - 1;
        if (group == 1 && all_seen && count_kv <= kMostStraight) together = std::max(count_kv, 1), apart = 1;
        const bool square = len_q == len_kv && high == 0 && low <= 1 - len_q;
        rising = group > 1 && square;
        parted = square && may_start_in_parts(mask, group, heads_kv, count_kv);
        shares = rising ? shares_of(group, heads_kv, count_kv, len_kv) : 1;
        share_heads = group / shares;
    }
    /// What is known before the launch; of ragged sequences worked out.
    TESSERA_HOST_DEVICE void set_of(const BlockCounts& known, bool ragged, const Mask& mask, int own_len_q,
                                    int own_len_kv, int group, int heads_kv) {
        if (ragged) set(mask, own_len_q, own_len_kv, group, heads_kv);
        else static_cast<BlockCounts&>(*this) = known;
    }
    /// Blocks of a part, if there are so many parts.
    TESSERA_HOST_DEVICE int part_size(int parts) const { return (count_kv + parts - 1) / parts; }
    /// The block of keys that is number `started` of those to start in a part, if no part has more than `most`; one
    /// that does not exist where the part has fewer.
    TESSERA_HOST_DEVICE int block_of(int part, int started, int parts, int most) const {
        const int size = part_size(parts);
        const int place = rising ? started : most - 1 - started;
        if (place >= size) return count_kv;
        return (rising || parted ? part : parts - 1 - part) * size + place;
    }
    /// Of block n: how many blocks of earlier parts add before it, and the last block of its own part.
    TESSERA_HOST_DEVICE int added_before(int n) const { return parted ? n / part_size(kParts) * part_size(kParts) : 0; }
    TESSERA_HOST_DEVICE int last_of_part(int n) const {
        return parted ? added_before(n) + part_size(kParts) - 1 : count_kv;
    }

    /// Blocks of queries, begin and end, that see some key of block n.
    TESSERA_HOST_DEVICE Span queries_of(int n) const {
        const int key = n * kBlockKv;
        const int begin = std::max(key - high, 0);
        const int end = std::min(std::min(key + kBlockKv, len_kv) - low, len_q);
        if (begin >= end || low > high) return Span{0, 0};
        return Span{begin / kBlockQ, (end + kBlockQ - 1) / kBlockQ};
    }
    /// Blocks of queries, begin and end, all of which exist and see all of these keys.
    TESSERA_HOST_DEVICE Span full_queries_of(int key, int keys) const {
        if (key + keys > len_kv) return Span{0, 0};
        const int first = std::max(key + keys - 1 - high, 0);
        const int end = std::max(key + 1 - low, 0);
        return Span{(first + kBlockQ - 1) / kBlockQ, (end < len_q ? end : len_q) / kBlockQ};
    }
    /// Blocks of keys, begin and end, that some query of block m sees.
    TESSERA_HOST_DEVICE Span keys_of(int m) const {
        const int query = m * kBlockQ;
        const int begin = std::max(query + low, 0);
        const int end = std::min(std::min(query + kBlockQ, len_q) + high, len_kv);
        if (begin >= end || low > high) return Span{0, 0};
        return Span{begin / kBlockKv, (end + kBlockKv - 1) / kBlockKv};
    }
    /// Where block n starts, if they do not rise: nobody of n' > n starts before.
    TESSERA_HOST_DEVICE int start_of(int n) const { return n / together * apart; }
    /// The last block of keys that starts at m or before.
    TESSERA_HOST_DEVICE int last_started(int m) const { return (m / apart + 1) * together - 1; }
    /// How many have added to sum `which` of block m before block n does.
    TESSERA_HOST_DEVICE int place(int which, int m, int n) const {
        if (rising) return n;
        return parted ? place_in_part(m, n, added_before(n), last_of_part(n)) : place_falling(which, m, n);
    }
    TESSERA_HOST_DEVICE int place_falling(int which, int m, int n) const {
        const int last = keys_of(m).end - 1;
        return (which == 0 ? std::min(last, last_started(m)) : last) - n;
    }
    /// With one sum. `before`, `most`: added_before(n) and last_of_part(n), which a thread block knows of its own n.
    TESSERA_HOST_DEVICE int place_in_part(int m, int n, int before, int most) const {
        return std::min(keys_of(m).end - 1, most) - n + before;
    }
    /// Is block of keys 0, or the first of a part, the last one to add to every block of queries, and is there one sum?
    TESSERA_HOST_DEVICE bool ends_with_first() const {
        const bool all_see_first = low <= 1 - len_q && high >= 0 && count_kv > 0;
        const bool one_sum = together >= count_kv || (high == 0 && len_q == len_kv);
        return all_see_first && one_sum && !rising;
    }
    /// Does anybody add to sum `which` of block m?
    TESSERA_HOST_DEVICE bool any(int which, int m) const {
        const Span keys = keys_of(m);
        if (keys.begin >= keys.end) return false;
        if (rising) return which == 0;
        return which == 0 ? last_started(m) >= keys.begin : keys.end - 1 > last_started(m);
    }
};

template <Config kConfig>
using BlocksOf = Blocks<kConfig.block_q, kConfig.block_kv>;

/// How n goes in the sums of dQ. (Known when compiled: what is done between two additions to dQ makes the next block
/// late.)
enum class Order { falling, rising, in_parts };

/// The steps of one block of keys: blocks of queries, for each query head of the group. kRising: as Blocks says.
template <bool kRising>
struct Steps {
    int begin, end, start;  ///< of m
    int heads;              ///< of the group that are left: all in all, or, rising, at this m
    int m, which;           ///< this step's block and sum

    template <int kBlockQ, int kBlockKv>
    TESSERA_HOST_DEVICE Steps(const Blocks<kBlockQ, kBlockKv>& blocks, int n, int group) {
        const Span queries = blocks.queries_of(n);
        begin = queries.begin;
        end = queries.end;
        start = kRising ? end - 1 : std::min(std::max(blocks.start_of(n), begin), end);
        heads = begin < end ? group : 0;
        rewind();
    }
    TESSERA_HOST_DEVICE bool more() const { return heads > 0; }
    TESSERA_HOST_DEVICE int count() const { return heads * (end - begin); }  ///< at the start
    TESSERA_HOST_DEVICE void advance(int group) {
        if constexpr (kRising) {
            if (--heads == 0 && --m >= begin) heads = group;
            return;
        }
        ++m;
        if (which == 0 && m == end) m = begin, which = 1;
        if (which == 0 || m != start) return;
        --heads;
        rewind();
    }

 private:
    TESSERA_HOST_DEVICE void rewind() {
        m = start == end ? begin : start;
        which = start == end ? 1 : 0;
    }
};

}  // namespace tessera::cuda::fa3::backward
