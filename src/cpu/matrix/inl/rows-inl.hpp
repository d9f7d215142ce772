// SPDX-License-Identifier: Apache-2.0
//
// The GEMM with V as it lies in memory. Included inside the namespace and the target attributes of a unit's file. The
// file must have defined RowSums, the sums of up to four neighbouring tiles: add() takes a P tile and V tiles, store()
// writes them.

template <int kParts, class T>
class RowsInSteps {
 public:
    explicit RowsInSteps(const RowsProduct& p)
        : p_(p),
          v_(p.v),
          contiguous_(p.v.from.column_stride == 1),
          dim_tiles_((p.v.dim + kTileRows - 1) / kTileRows),
          key_tiles_((p.v.rows + kTileDepth - 1) / kTileDepth) {
        v_.to = {nullptr, 0, kElements};
    }

    /// Returns whether all of V could be packed.
    bool run() {
        for (std::int64_t i = 0; i < key_tiles_ * kParts; ++i) {
            Bf16* tile = p_.p + i * kTileElements;
            transpose_words(tile, kTileRows, tile, kTileRows);
        }
        for (std::int64_t tile = 0; tile < dim_tiles_; tile += kTilesAtOnce) {
            add_columns(tile, std::min(kTilesAtOnce, dim_tiles_ - tile));
        }
        return all_packable_;
    }

 private:
    static constexpr std::int64_t kTilesAtOnce = 4;
    static constexpr std::int64_t kColumns = kOfVector<T>;
    static constexpr std::int64_t kElements = kParts * kTileElements;

    /// The GEMM is one step behind the packing: a tile load can't forward from stores that are still in flight.
    void add_columns(std::int64_t tile, std::int64_t tiles) {
        RowSums sums(p_.c + tile * kTileRows, p_.c_stride, tiles);
        const auto add = [&](std::int64_t i) {
            sums.template add<kParts>(p_.p + i * kElements, buffer(i) + tile * kElements);
        };
        for (std::int64_t i = 0; i < key_tiles_; ++i) {
            pack(i, tile, tiles);
            if (i > 0) add(i - 1);
        }
        add(key_tiles_ - 1);
        sums.store();
    }

    /// Not inlined: its vectors and its rows in pages stay out of the loop of the GEMM.
    HWY_NOINLINE void pack(std::int64_t i, std::int64_t tile, std::int64_t tiles) {
        const std::int64_t row = i * kTileDepth;
        if (tile == 0 && contiguous_ && v_.from_memory) {  // prefetch for the next step
            const auto cut = [&](std::int64_t r) { return v_.first + std::min(v_.rows, r); };
            fetch_rows(v_.from, cut(row + kTileDepth), cut(row + 2 * kTileDepth), v_.dim);
        }
        TileRows memory;
        const TileRows* pages = memory.find(v_, row, kTileDepth);
        v_.to.data = buffer(i);
        const std::int64_t end = std::min(v_.dim, (tile + tiles) * kTileRows);
        for (std::int64_t column = tile * kTileRows; column < end; column += kColumns) {
            const bool inside = contiguous_ && row + kTileDepth <= v_.rows && column + kColumns <= v_.dim;
            if (!pack_any_tile<Form::row_pairs, T>(v_, row, column, inside, pages)) {
                all_packable_ = false;
            }
        }
    }

    /// The buffer for the V tiles of step i.
    Bf16* buffer(std::int64_t i) const { return p_.v.to.data + i % kRowsBuffer * dim_tiles_ * kElements; }

    const RowsProduct& p_;
    PackJob v_;
    bool contiguous_;
    std::int64_t dim_tiles_;
    std::int64_t key_tiles_;
    bool all_packable_ = true;
};

inline bool multiply_rows(const RowsProduct& p) {
    if (p.parts == 1) return RowsInSteps<1, Bf16>(p).run();
    const FlushSubnormal flush;
    return RowsInSteps<3, float>(p).run();
}
