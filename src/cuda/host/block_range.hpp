// SPDX-License-Identifier: Apache-2.0
//
// The key blocks that a query tile needs. Plain C++, for every kernel whose outer loop is over query tiles.
#pragma once

#include <cstdint>

#include "cuda/host/band32.hpp"

namespace tessera::cuda {

/// Blocks [begin, end) of a sequence's keys, some of which need no mask code. All other blocks are skipped: under a
/// causal mask, those past the tile's last query. A block is full if the tile's last query sees the block's first key
/// and the tile's first query sees its last key.
struct BlockRange : Span {
    int full_begin = 0;  ///< every pair of blocks [full_begin, full_end) is visible
    int full_end = 0;

    TESSERA_HOST_DEVICE constexpr BlockRange() : Span{0, 0} {}
    /// The blocks that queries [q_begin, q_end) need; empty where they see no key. fa1, fa2, standard and gradient take
    /// them in ascending order whatever the mask: a row then meets its keys in the same order in every tile, and its
    /// bits do not depend on the rows around it.
    TESSERA_HOST_DEVICE BlockRange(const Band& band, std::int64_t q_begin, std::int64_t q_end, int block_kv)
        : BlockRange() {
        const Range keys = band.kv_range(q_begin, q_end);
        if (keys.empty()) return;
        const std::int64_t lowest = larger(q_end - 1 + band.low, std::int64_t{0});
        const std::int64_t highest = larger(smaller(q_begin + band.high + 1, band.len_kv), std::int64_t{0});
        begin = static_cast<int>(keys.begin / block_kv);
        end = static_cast<int>((keys.end + block_kv - 1) / block_kv);
        full_begin = static_cast<int>((lowest + block_kv - 1) / block_kv);
        full_end = static_cast<int>(highest / block_kv);
    }

    TESSERA_HOST_DEVICE bool full(int n) const { return n >= full_begin && n < full_end; }
    /// Does block n hold a pair that is not visible?
    TESSERA_HOST_DEVICE bool partial(int n) const { return n < full_begin || n >= full_end; }
    TESSERA_HOST_DEVICE bool all_full() const { return full_begin <= begin && full_end >= end; }

 private:
    TESSERA_HOST_DEVICE static std::int64_t larger(std::int64_t a, std::int64_t b) { return a > b ? a : b; }
    TESSERA_HOST_DEVICE static std::int64_t smaller(std::int64_t a, std::int64_t b) { return a < b ? a : b; }
};

/// The blocks that queries [begin, end) need, in 32-bit arithmetic with a block size that is known to the compiler.
template <int kBlockKv>
TESSERA_HOST_DEVICE inline BlockRange blocks_of(int begin, int end, const Band32& band) {
    const auto smaller = [](int a, int b) { return a < b ? a : b; };
    const auto from_0 = [](int a) { return a < 0 ? 0 : a; };
    const int keys_begin = from_0(begin + band.low);
    const int keys_end = smaller(end + band.high, band.last_key + 1);
    const bool sees_keys = band.low <= band.high && keys_begin < keys_end;
    BlockRange blocks;
    blocks.begin = keys_begin / kBlockKv;
    blocks.end = sees_keys ? (keys_end + kBlockKv - 1) / kBlockKv : blocks.begin;
    blocks.full_begin = (from_0(end - 1 + band.low) + kBlockKv - 1) / kBlockKv;
    blocks.full_end = (smaller(begin + band.high, band.last_key) + 1) / kBlockKv;
    return blocks;
}

}  // namespace tessera::cuda
