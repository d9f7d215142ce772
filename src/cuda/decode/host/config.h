// SPDX-License-Identifier: Apache-2.0
//
// The compiled shapes of the decode kernels, and how the keys that a query sees are split. Plain C++.
#pragma once

#include "cuda/host/band32.hpp"
#include "cuda/host/shape_list.hpp"
#include "tessera/mask.hpp"

namespace tessera::cuda::decode {

/// One compiled shape. head_dim and head_dim_v of a Problem are padded with zeros to `head_dim`. A CTA has up to `rows`
/// rows, queries of the heads of a group, four warps that compute and two that load.
struct Config {
    static constexpr int kKeys = 64;      ///< keys of a tile
    static constexpr int kWarps = 4;      ///< that compute
    static constexpr int kMostShift = 9;  ///< the most keys of a split are 2^9

    int head_dim;
    int rows;
    int stages;    ///< tiles of K in shared memory, and of V
    int q_stages;  ///< splits whose Q is in shared memory, since the producer warps are ahead
    int ctas;      ///< of a multiprocessor

    static constexpr int threads() { return 32 * kWarps + 64; }
    constexpr int tile_bytes() const { return kKeys * head_dim * 2; }
    constexpr int query_bytes() const { return rows * head_dim * 2; }
    constexpr int shared_bytes() const { return 2 * stages * tile_bytes() + q_stages * query_bytes(); }
    /// An upper bound of a CTA's static shared memory: lengths, rows of the splits on their way, exchange of the warps.
    constexpr int static_bytes() const { return (3072 + q_stages * rows * 16 + rows * 320 + 1023) / 1024 * 1024; }
};

struct HeadDim64Rows16 {
    static constexpr Config kConfig{.head_dim = 64, .rows = 16, .stages = 6, .q_stages = 3, .ctas = 2};
};
struct HeadDim64Rows64 {
    static constexpr Config kConfig{.head_dim = 64, .rows = 64, .stages = 4, .q_stages = 2, .ctas = 2};
};
struct HeadDim128Rows16 {
    static constexpr Config kConfig{.head_dim = 128, .rows = 16, .stages = 3, .q_stages = 2, .ctas = 2};
};
struct HeadDim128Rows64 {
    static constexpr Config kConfig{.head_dim = 128, .rows = 64, .stages = 2, .q_stages = 2, .ctas = 2};
};
struct HeadDim192 {
    static constexpr Config kConfig{.head_dim = 192, .rows = 32, .stages = 3, .q_stages = 2, .ctas = 1};
};
struct HeadDim256Rows16 {
    static constexpr Config kConfig{.head_dim = 256, .rows = 16, .stages = 3, .q_stages = 2, .ctas = 1};
};
struct HeadDim256Rows32 {
    static constexpr Config kConfig{.head_dim = 256, .rows = 32, .stages = 2, .q_stages = 2, .ctas = 1};
};
using Shapes = ShapeList<HeadDim64Rows16, HeadDim64Rows64, HeadDim128Rows16, HeadDim128Rows64, HeadDim192,
                         HeadDim256Rows16, HeadDim256Rows32>;

/// The most splits of a tile whose rows have splits of two lengths. With up to 64 queries, rows with the shorter ones
/// see up to 16 of them and the tile 63 keys more. These touch 18 splits, and 10 of the longer ones.
inline constexpr int kMostMixedSplits = 28;

/// Sequences whose numbers of splits a CTA sums up, where their lengths are in device memory alone.
inline constexpr int kMostSequences = 512;

/// Log2 of the keys of a split of a row that sees `keys` keys. It depends on nothing else, so a row has the same bits
/// in any batch and beside any other queries. (FlashAttention's num_splits_heuristic goes by the batch and the number
/// of multiprocessors.) About 16 splits keep a GPU busy with one sequence. Longer splits have fewer partial sums to
/// write.
TESSERA_HOST_DEVICE constexpr int split_shift(int keys) {
    constexpr int kWanted = 16;
    int shift = 6;
    while (shift < Config::kMostShift && kWanted << shift < keys) ++shift;
    return shift;
}

/// The splits of a row that sees keys begin ... end - 1: multiples of 2^shift, from the one with the first key on.
struct Splits {
    int shift = 0;  ///< log2 of the keys of a split
    int first = 0;  ///< number of the first split: its keys begin at first << shift
    int count = 0;

    Splits() = default;
    TESSERA_HOST_DEVICE constexpr Splits(const Span& keys, int of_shift)
        : shift(of_shift),
          first(keys.begin >> of_shift),
          count(keys.begin < keys.end ? ((keys.end - 1) >> of_shift) - first + 1 : 0) {}
    TESSERA_HOST_DEVICE explicit constexpr Splits(const Span& keys) : Splits(keys, split_shift(keys.count())) {}
};

/// The keys that a query sees; 0 ... -1 if none.
TESSERA_HOST_DEVICE constexpr Span visible_of(const Band32& band, int query) {
    const int begin = band.first(query) < 0 ? 0 : band.first(query), end = band.last(query) + 1;
    return band.low <= band.high && begin < end ? Span{begin, end} : Span{0, 0};
}

/// The splits of rows whose queries are first ... last. Rows that see more keys than their neighbours may have splits
/// twice as long: the splits of `small` come first, then those of `large`.
struct RowSplits {
    Span visible{0, 0};  ///< keys that one of the queries sees
    Splits small, large;

    TESSERA_HOST_DEVICE constexpr RowSplits(const Band32& band, int first, int last) {
        if (band.low > band.high) return;
        const int begin = band.first(first) < 0 ? 0 : band.first(first), end = band.last(last) + 1;
        if (begin >= end) return;
        visible = {begin, end};
        if (first == last) {
            small = large = Splits(visible);
            return;
        }
        const auto keys = [&](int query) {
            return visible_of(band, query < first ? first : query > last ? last : query).count();
        };
        const auto larger = [](int a, int b) { return a > b ? a : b; };
        const int at_first = keys(first), at_last = keys(last);
        // The number of keys grows, stays and falls with the query: the most are at an end or where that turns.
        const int most = larger(larger(at_first, at_last), larger(keys(-band.low), keys(band.last_key - band.high)));
        small = Splits(visible, split_shift(at_first < at_last ? at_first : at_last));
        large = Splits(visible, split_shift(most));
    }
    TESSERA_HOST_DEVICE constexpr bool alike() const { return small.shift == large.shift; }
    TESSERA_HOST_DEVICE constexpr int count() const { return small.count + (alike() ? 0 : large.count); }
};

/// The most splits of any row that sees up to `keys` keys. The first key that it sees need not be a multiple of a
/// split's keys, which is one split more.
TESSERA_HOST_DEVICE constexpr int most_splits(int keys) {
    const int of_short = (keys + Config::kKeys - 1) / Config::kKeys;
    const int of_long = (keys >> Config::kMostShift) + 1;
    return (of_short < 16 ? of_short : of_long < 16 ? 16 : of_long) + 1;
}

/// The splits to go through for the rows of one kv head of a sequence: `tiles` tiles of rows, `splits` of each. With
/// several tiles `splits` is a bound, and some tiles have fewer.
struct Items {
    int tiles = 0;
    int splits = 0;

    /// The most splits of a tile. Up to 16 * 64 keys all splits have one length.
    TESSERA_HOST_DEVICE static constexpr int of_any_tile(int len_kv) {
        const int most = most_splits(len_kv);
        return len_kv <= 16 * Config::kKeys || most > kMostMixedSplits ? most : kMostMixedSplits;
    }

    /// queries: those whose rows the tiles have, begin ... end - 1.
    TESSERA_HOST_DEVICE constexpr Items(const Band32& band, Span queries, int len_kv, int group, int rows_of_tile)
        : tiles((queries.count() * group + rows_of_tile - 1) / rows_of_tile) {
        if (tiles == 1) splits = RowSplits(band, queries.begin, queries.end - 1).count();
        else if (tiles > 1) splits = of_any_tile(len_kv);
    }
};

}  // namespace tessera::cuda::decode
