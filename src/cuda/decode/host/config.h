// SPDX-License-Identifier: Apache-2.0
//
// The compiled shapes of the decode kernels, and how the keys of a sequence are split. Plain C++.
#pragma once

#include "cuda/host/shape_list.hpp"
#include "tessera/mask.hpp"

namespace tessera::cuda::decode {

/// One compiled shape. head_dim and head_dim_v of a Problem are padded with zeros to `head_dim`.
struct Config {
    static constexpr int kKeys = 64;  ///< keys of a tile

    int head_dim;
    int tiles;  ///< tiles of K or V in shared memory: all but one of them are on their way while one is used

    constexpr int tile_bytes() const { return kKeys * head_dim * 2; }
    constexpr int shared_bytes() const { return tiles * tile_bytes(); }
};

struct HeadDim64 {
    static constexpr Config kConfig{.head_dim = 64, .tiles = 6};
};
struct HeadDim128 {
    static constexpr Config kConfig{.head_dim = 128, .tiles = 4};
};
struct HeadDim256 {
    static constexpr Config kConfig{.head_dim = 256, .tiles = 3};
};
using Shapes = ShapeList<HeadDim64, HeadDim128, HeadDim256>;

inline constexpr int kMaxQueries = 8;    ///< of a sequence; each has a warp
inline constexpr int kHeadsOfTile = 16;  ///< query heads of a CTA: the rows of an MMA

/// Keys of a split of a sequence whose queries see `keys` keys. It depends on nothing else, so a row has the same bits
/// in any batch. About 16 splits keep a GPU busy with one sequence; longer splits have fewer partial sums to write.
TESSERA_HOST_DEVICE constexpr int split_keys(std::int64_t keys) {
    constexpr int kFewest = Config::kKeys, kMost = 512, kWanted = 16;
    int split = kFewest;
    while (split < kMost && std::int64_t{split} * kWanted < keys) split *= 2;
    return split;
}

/// The splits of a sequence: multiples of `keys`, from the one with the first visible key on.
struct Splits {
    int keys;   ///< of a split
    int first;  ///< number of the first split: its keys begin at first * keys
    int count;

    /// `visible`: the keys that the queries of the sequence see.
    TESSERA_HOST_DEVICE explicit constexpr Splits(const Range& visible)
        : keys(split_keys(visible.size())),
          first(static_cast<int>(visible.begin / keys)),
          count(visible.empty() ? 0 : static_cast<int>((visible.end + keys - 1) / keys) - first) {}
};

/// The most splits of any sequence of up to `len_kv` keys.
constexpr std::int64_t max_splits(std::int64_t len_kv) {
    // Range::begin need not be a multiple of a split's keys: one more.
    const std::int64_t while_growing = len_kv < 16 * Config::kKeys ? (len_kv + Config::kKeys - 1) / Config::kKeys : 16;
    const std::int64_t of_long = (len_kv + split_keys(len_kv) - 1) / split_keys(len_kv);
    return (of_long > while_growing ? of_long : while_growing) + 1;
}

}  // namespace tessera::cuda::decode
