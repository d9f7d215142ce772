// SPDX-License-Identifier: Apache-2.0
//
// Who adds to a block of dQ when. Blocks of keys n add to blocks of queries m in a fixed order, and so that nobody
// waits for long: block n starts at the queries that are as far along as it is itself, goes to the last that sees it
// (sum 0), then on from the first one (sum 1). For one m the order is n falling, in both sums, so that n follows n + 1,
// which started earlier and some steps further on.
#pragma once

#include "cuda/fa3/backward/launch.hpp"
#include "cuda/tile/member.cuh"

namespace tessera::cuda::fa3::backward {

/// The blocks of one head of one batch member. 32 bits are enough: the kernel refuses longer tensors.
struct Blocks {
    int len_q, len_kv;
    int low, high;          ///< key k is visible to query q if q + low <= k <= q + high
    int count_q, count_kv;  ///< blocks
    int apart;              ///< blocks of queries between the starts of neighbouring blocks of keys; or, if there ...
    int together;           ///< ... are more blocks of keys, how many of them start at the same one

    __device__ __forceinline__ void set(const ForwardParams& p, const Member& member) {
        const Band band = p.mask.bind(member.len_q, member.len_kv);
        len_q = member.len_q;
        len_kv = member.len_kv;
        low = static_cast<int>(max(band.low, -band.len_q));
        high = static_cast<int>(min(band.high, band.len_kv));
        count_q = (len_q + Config::kBlockQ - 1) / Config::kBlockQ;
        count_kv = (len_kv + Config::kBlockKv - 1) / Config::kBlockKv;
        apart = max((count_q + 1) / max(count_kv, 1), 1);
        together = max((count_kv + count_q - 1) / max(count_q, 1), 1);
        if (count_q >= count_kv) together = 1;
        else apart = 1;
    }

    /// Blocks of queries, begin and end, that see some key of block n.
    __device__ __forceinline__ int2 queries_of(int n) const {
        const int key = n * Config::kBlockKv;
        const int begin = max(key - high, 0);
        const int end = min(min(key + Config::kBlockKv, len_kv) - low, len_q);
        if (begin >= end || low > high) return make_int2(0, 0);
        return make_int2(begin / Config::kBlockQ, (end + Config::kBlockQ - 1) / Config::kBlockQ);
    }
    /// Blocks of keys, begin and end, that some query of block m sees.
    __device__ __forceinline__ int2 keys_of(int m) const {
        const int query = m * Config::kBlockQ;
        const int begin = max(query + low, 0);
        const int end = min(min(query + Config::kBlockQ, len_q) + high, len_kv);
        if (begin >= end || low > high) return make_int2(0, 0);
        return make_int2(begin / Config::kBlockKv, (end + Config::kBlockKv - 1) / Config::kBlockKv);
    }
    /// Where block n starts: nobody of n' > n starts before.
    __device__ __forceinline__ int start_of(int n) const { return n / together * apart; }
    /// The last block of keys that starts at m or before.
    __device__ __forceinline__ int last_started(int m) const { return (m / apart + 1) * together - 1; }
    /// How many have added to sum `which` of block m before block n does.
    __device__ __forceinline__ int place(int which, int m, int n) const {
        const int last = keys_of(m).y - 1;
        return (which == 0 ? min(last, last_started(m)) : last) - n;
    }
    /// Does anybody add to sum `which` of block m?
    __device__ __forceinline__ bool any(int which, int m) const {
        const int2 keys = keys_of(m);
        if (keys.x >= keys.y) return false;
        return which == 0 ? last_started(m) >= keys.x : keys.y - 1 > last_started(m);
    }
    /// Are all pairs of these queries and keys there and visible?
    __device__ __forceinline__ bool full(int query, int queries, int key, int keys) const {
        return query + queries <= len_q && key + keys <= len_kv && key >= query + queries - 1 + low &&
               key + keys - 1 <= query + high;
    }
};

/// The steps of one block of keys: blocks of queries, for each query head of the group.
struct Steps {
    int begin, end, start;  ///< of m
    int heads;              ///< of the group that are left
    int m, which;           ///< this step's block and sum

    __device__ __forceinline__ Steps(const Blocks& blocks, int n, int group) {
        const int2 queries = blocks.queries_of(n);
        begin = queries.x;
        end = queries.y;
        start = min(max(blocks.start_of(n), begin), end);
        heads = begin < end ? group : 0;
        rewind();
    }
    __device__ __forceinline__ bool more() const { return heads > 0; }
    __device__ __forceinline__ int count() const { return heads * (end - begin); }  ///< at the start
    __device__ __forceinline__ void advance() {
        ++m;
        if (which == 0 && m == end) m = begin, which = 1;
        if (which == 0 || m != start) return;
        --heads;
        rewind();
    }

 private:
    __device__ __forceinline__ void rewind() {
        m = start == end ? begin : start;
        which = start == end ? 1 : 0;
    }
};

}  // namespace tessera::cuda::fa3::backward
