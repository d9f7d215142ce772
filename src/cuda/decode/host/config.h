// SPDX-License-Identifier: Apache-2.0
//
// The compiled shapes of the decode kernels, and how the keys that a query sees are split. Plain C++.
#pragma once

#include "cuda/host/shape_list.hpp"
#include "tessera/mask.hpp"

namespace tessera::cuda::decode {

/// One compiled shape. head_dim and head_dim_v of a Problem are padded with zeros to `head_dim`.
///
/// A CTA has rows * head_dim numbers of O for each quarter of a tile of keys: a warp has 16 keys of every tile, for
/// 16 * row_tiles rows.
struct Config {
    static constexpr int kKeys = 64;       ///< keys of a tile
    static constexpr int kKeyWarps = 4;    ///< warps that share a tile of keys
    static constexpr int kMaxSplit = 512;  ///< the most keys of a split

    int head_dim;
    int row_warps;  ///< groups of kKeyWarps warps: each has rows of its own
    int row_tiles;  ///< of 16 rows, of a warp
    int stages;     ///< tiles of K or V in shared memory: all but one of them are on their way while one is used
    int ctas = 1;   ///< of a multiprocessor, for which registers suffice

    constexpr int rows() const { return 16 * row_warps * row_tiles; }
    constexpr int threads() const { return 32 * kKeyWarps * row_warps; }
    constexpr int tile_bytes() const { return kKeys * head_dim * 2; }
    /// Numbers from row to row of the sums of a warp in shared memory. 8 more than head_dim keep off bank conflicts.
    constexpr int sum_pitch() const { return head_dim + 8; }
    constexpr int sums_bytes() const { return kKeyWarps * rows() * (sum_pitch() * 4 + 8); }
    /// The ring of tiles, which the sums of the warps use after it.
    constexpr int ring_bytes() const {
        return stages * tile_bytes() > sums_bytes() ? stages * tile_bytes() : sums_bytes();
    }
    constexpr int query_bytes() const { return rows() * head_dim * 2; }
    /// The ring, the rows of Q, and the place in the cache of each key of a split.
    constexpr int shared_bytes() const { return ring_bytes() + query_bytes() + kMaxSplit * 8; }
};

struct HeadDim64Rows16 {
    static constexpr Config kConfig{.head_dim = 64, .row_warps = 1, .row_tiles = 1, .stages = 6, .ctas = 3};
};
struct HeadDim64Rows64 {
    static constexpr Config kConfig{.head_dim = 64, .row_warps = 2, .row_tiles = 2, .stages = 8};
};
struct HeadDim128Rows16 {
    static constexpr Config kConfig{.head_dim = 128, .row_warps = 1, .row_tiles = 1, .stages = 4, .ctas = 3};
};
struct HeadDim128Rows64 {
    static constexpr Config kConfig{.head_dim = 128, .row_warps = 2, .row_tiles = 2, .stages = 8};
};
struct HeadDim256Rows16 {
    static constexpr Config kConfig{.head_dim = 256, .row_warps = 1, .row_tiles = 1, .stages = 3};
};
struct HeadDim256Rows32 {
    static constexpr Config kConfig{.head_dim = 256, .row_warps = 2, .row_tiles = 1, .stages = 5};
};
using Shapes =
    ShapeList<HeadDim64Rows16, HeadDim64Rows64, HeadDim128Rows16, HeadDim128Rows64, HeadDim256Rows16, HeadDim256Rows32>;

/// Sequences whose numbers of splits a CTA sums up, where their lengths are in device memory alone.
inline constexpr int kMostMembers = 512;

/// Keys of a split of a row that sees `keys` keys. It depends on nothing else, so a row has the same bits in any batch
/// and beside any other queries. About 16 splits keep a GPU busy with one sequence. Longer splits have fewer partial
/// sums to write.
TESSERA_HOST_DEVICE constexpr int split_keys(std::int64_t keys) {
    constexpr int kWanted = 16;
    int split = Config::kKeys;
    while (split < Config::kMaxSplit && std::int64_t{split} * kWanted < keys) split *= 2;
    return split;
}

/// The splits of a row: multiples of `keys`, from the one with the first visible key on.
struct Splits {
    int keys;   ///< of a split
    int first;  ///< number of the first split: its keys begin at first * keys
    int count;

    /// `visible`: the keys that the row sees. `of`: keys of a split.
    TESSERA_HOST_DEVICE constexpr Splits(const Range& visible, int of)
        : keys(of),
          first(static_cast<int>(visible.begin / keys)),
          count(visible.empty() ? 0 : static_cast<int>((visible.end + keys - 1) / keys) - first) {}
    TESSERA_HOST_DEVICE explicit constexpr Splits(const Range& visible) : Splits(visible, split_keys(visible.size())) {}
};

/// The most splits of any row that sees up to `keys` keys. The first key that it sees need not be a multiple of a
/// split's keys, which is one split more.
TESSERA_HOST_DEVICE constexpr int most_splits(std::int64_t keys) {
    const std::int64_t of_short = (keys + Config::kKeys - 1) / Config::kKeys;
    const std::int64_t of_long = (keys + Config::kMaxSplit - 1) / Config::kMaxSplit;
    return static_cast<int>(of_short < 16 ? of_short : of_long < 16 ? 16 : of_long) + 1;
}

/// The most splits of the rows of one CTA, which may have splits of two lengths: where one row sees up to 16 splits of
/// some length, and the next row more, which are half as many.
TESSERA_HOST_DEVICE constexpr int most_splits_of_rows(std::int64_t keys) {
    const int most = most_splits(keys);
    return keys < 16 * Config::kKeys || most > 27 ? most : 27;
}

}  // namespace tessera::cuda::decode
