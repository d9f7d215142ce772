// SPDX-License-Identifier: Apache-2.0
//
// Packing of matrices into row tiles and pair tiles. Included inside the namespace and the target attributes of a
// unit's file, after parts-inl.hpp.
//
// A matrix is read in WORDS of 32 bits, 16 to a vector: one fp32 element, or two neighbouring bf16 elements of a row.
// Transpositions run on words, before fp32 is split into parts: one transposition instead of three.

/// Transposes 16 x 16 elements of 32 bits: x[r] is row r on entry and column r on return.
inline void transpose(__m512i (&x)[16]) {
    __m512i y[16];
    for (int r = 0; r < 16; r += 2) {
        y[r] = _mm512_unpacklo_epi32(x[r], x[r + 1]);
        y[r + 1] = _mm512_unpackhi_epi32(x[r], x[r + 1]);
    }
    for (int r = 0; r < 16; r += 4) {  // quarter q of x[r + i]: column 4q + i of rows r .. r + 3
        x[r] = _mm512_unpacklo_epi64(y[r], y[r + 2]);
        x[r + 1] = _mm512_unpackhi_epi64(y[r], y[r + 2]);
        x[r + 2] = _mm512_unpacklo_epi64(y[r + 1], y[r + 3]);
        x[r + 3] = _mm512_unpackhi_epi64(y[r + 1], y[r + 3]);
    }
    for (int i = 0; i < 4; ++i) {
        y[i] = _mm512_shuffle_i32x4(x[i], x[i + 4], 0x88);           // quarters 0, 2 of rows 0-3, 4-7
        y[i + 4] = _mm512_shuffle_i32x4(x[i], x[i + 4], 0xDD);       // quarters 1, 3
        y[i + 8] = _mm512_shuffle_i32x4(x[i + 8], x[i + 12], 0x88);  // the same of rows 8-11, 12-15
        y[i + 12] = _mm512_shuffle_i32x4(x[i + 8], x[i + 12], 0xDD);
    }
    for (int i = 0; i < 4; ++i) {
        x[i] = _mm512_shuffle_i32x4(y[i], y[i + 8], 0x88);
        x[i + 8] = _mm512_shuffle_i32x4(y[i], y[i + 8], 0xDD);
        x[i + 4] = _mm512_shuffle_i32x4(y[i + 4], y[i + 12], 0x88);
        x[i + 12] = _mm512_shuffle_i32x4(y[i + 4], y[i + 12], 0xDD);
    }
}

inline void transpose_words(const void* from, std::int64_t from_stride, void* to, std::int64_t to_stride) {
    __m512i x[16];
    TESSERA_UNROLL for (int r = 0; r < 16; ++r) {
        x[r] = _mm512_loadu_si512(static_cast<const char*>(from) + 4 * r * from_stride);
    }
    transpose(x);
    TESSERA_UNROLL for (int r = 0; r < 16; ++r) {
        _mm512_storeu_si512(static_cast<char*>(to) + 4 * r * to_stride, x[r]);
    }
}

inline Bf16* tile_of(const Tiles& tiles, std::int64_t i, std::int64_t j) {
    return tiles.data + i * tiles.row_step + j * tiles.column_step;
}

/// A mask for the first `count` of up to 32 elements.
inline __mmask32 first_elements(std::int64_t count) {
    if (count >= 32) return ~__mmask32{0};
    return count <= 0 ? 0 : static_cast<__mmask32>((std::uint64_t{1} << count) - 1);
}

/// Elements of type T in a vector.
template <class T>
inline constexpr std::int64_t kOfVector = 64 / sizeof(T);

/// Elements from `at` on, `stride` apart, 0 from `count` on.
template <class T>
inline __m512i load_words(const T* at, std::int64_t stride, std::int64_t count) {
    if (count <= 0) return _mm512_setzero_si512();
    if (stride != 1) {
        alignas(64) T elements[kOfVector<T>] = {};
        for (std::int64_t i = 0; i < std::min(count, kOfVector<T>); ++i) {
            elements[i] = at[i * stride];
        }
        return _mm512_load_si512(elements);
    }
    if constexpr (sizeof(T) == 4) return _mm512_maskz_loadu_epi32(static_cast<__mmask16>(first_elements(count)), at);
    else return _mm512_maskz_loadu_epi16(first_elements(count), at);
}

/// How a tile is read. PLAIN: all its rows are inside the matrix and lie in memory as needed. PAGED: the same, but by
/// addresses of the rows, which pages hold. CHECKED: elements outside, and those that can't be packed, are read as 0.
enum class Reading { plain, paged, checked };

/// Rows of a tile at most.
inline constexpr std::int64_t kMostTileRows = 32;

/// Addresses of the rows of a tile that lie in pages. They are not initialised: most calls have none.
struct TileRows {
    const void* at[kMostTileRows];
    std::int64_t first;  ///< row of the job that at[0] is

    /// Finds the rows of [row, row + count) that a job has. Returns this, or null if its rows are not in pages.
    HWY_INLINE const TileRows* find(const PackJob& job, std::int64_t row, std::int64_t count) {
        if (!job.from.paged()) return nullptr;
        first = row;
        const std::int64_t present = std::min(count, job.rows - row);
        for_each_run(job.from, job.first + row, present, [&](const void* address, std::int64_t i, std::int64_t rows) {
            const auto* next = static_cast<const char*>(address);
            const std::int64_t step = job.from.row_stride * size_of(job.from.dtype);
            for (std::int64_t r = 0; r < rows; ++r, next += step) at[i + r] = next;
        });
        return this;
    }
};

/// Reads 32-bit words of a job's matrix for one tile and detects elements that can't be packed.
template <class T, Reading kReading>
class WordReader {
 public:
    /// rows: of the tile, if they are in pages
    WordReader(const PackJob& job, const TileRows* rows)
        : job_(job),
          rows_(rows),
          begin_(reinterpret_cast<const T*>(job.from.data) + (rows == nullptr ? job.first * job.from.row_stride : 0)),
          stride_(job.from.row_stride),
          scale_(job.scale),
          finite_only_(job.finite_only) {}

    HWY_INLINE __m512i read(std::int64_t row, std::int64_t column) {
        constexpr bool kPlain = kReading != Reading::checked;
        if (!kPlain && row >= job_.rows) return _mm512_setzero_si512();
        __m512i x;
        if constexpr (kReading == Reading::plain) {
            x = _mm512_loadu_si512(begin_ + row * stride_ + column);
        } else if constexpr (kReading == Reading::paged) {
            x = _mm512_loadu_si512(static_cast<const T*>(rows_->at[row - rows_->first]) + column);
        } else {
            const T* at =
                rows_ != nullptr ? static_cast<const T*>(rows_->at[row - rows_->first]) : begin_ + row * stride_;
            const std::int64_t step = job_.from.column_stride;
            x = load_words<T>(at + column * step, step, job_.dim - column);
        }
        if constexpr (kFp32) {
            x = _mm512_castps_si512(_mm512_mul_ps(_mm512_castsi512_ps(x), _mm512_set1_ps(scale_)));
            const __m512i size = _mm512_and_si512(x, _mm512_set1_epi32(0x7FFFFFFF));
            largest_ = _mm512_max_epi32(largest_, size);
            return kPlain ? x : _mm512_maskz_mov_epi32(_mm512_cmple_epi32_mask(size, limit()), x);
        } else {
            const __m512i size = _mm512_and_si512(x, _mm512_set1_epi16(0x7FFF));
            largest_ = _mm512_max_epi16(largest_, size);
            return kPlain ? x : _mm512_maskz_mov_epi16(_mm512_cmple_epi16_mask(size, limit()), x);
        }
    }

    /// A block of 16 rows from `row` on, `step` apart, transposed: x[i] has word i of each row.
    HWY_INLINE void read_transposed(std::int64_t row, std::int64_t step, std::int64_t column, __m512i (&x)[16]) {
        TESSERA_UNROLL for (int r = 0; r < 16; ++r) x[r] = read(row + r * step, column);
        transpose(x);
    }

    HWY_INLINE bool all_packable() const {
        return (kFp32 ? static_cast<__mmask32>(_mm512_cmpgt_epi32_mask(largest_, limit()))
                      : _mm512_cmpgt_epi16_mask(largest_, limit())) == 0;
    }

 private:
    static constexpr bool kFp32 = sizeof(T) == 4;
    /// The largest magnitude that can be packed. Magnitudes compare as integers: infinity is above all numbers, NaN
    /// above infinity.
    HWY_INLINE __m512i limit() const {
        if (kFp32) return _mm512_set1_epi32(0x7EFFFFFF);
        return _mm512_set1_epi16(static_cast<short>(finite_only_ ? 0x7F7F : 0x7FFF));
    }

    const PackJob& job_;
    const TileRows* rows_;
    // Copies, which stores to the tiles cannot alias.
    const T* begin_;
    std::int64_t stride_;
    float scale_;
    bool finite_only_;
    __m512i largest_ = _mm512_setzero_si512();
};

/// Stores a row of fp32 words in parts, for a row tile or for a pair tile.
inline void store_parted_row(Bf16* to, __m512i low, __m512i high) {
    store_in_parts<round_off, exact_bf16>(to, _mm512_castsi512_ps(low), _mm512_castsi512_ps(high));
}
inline void store_parted_pairs(Bf16* to, __m512i even, __m512i odd) {
    store_in_parts<round_off, exact_bf16_pairs>(to, _mm512_castsi512_ps(even), _mm512_castsi512_ps(odd));
}

/// Stores the 16 rows of a row tile from 8 words of two bf16 columns each, for even and odd rows.
HWY_INLINE void store_columns_of_words(Bf16* to, const __m512i* even, const __m512i* odd) {
    TESSERA_UNROLL for (int c = 0; c < 8; ++c) {
        _mm512_store_si512(to + 2 * c * kTileDepth, pairs_of_lower_halves(even[c], odd[c]));
        _mm512_store_si512(to + (2 * c + 1) * kTileDepth, pairs_of_upper_halves(even[c], odd[c]));
    }
}

/// Packs the one or two tiles that begin at (row, column). Returns false if elements became 0 or, in a plain read,
/// would have to.
template <Form kForm, class T, Reading kReading>
inline bool pack_tile(const PackJob& job, std::int64_t row, std::int64_t column, const TileRows* rows = nullptr) {
    constexpr bool kFp32 = sizeof(T) == 4;
    constexpr bool kAlongRows = kForm == Form::rows || kForm == Form::row_pairs;
    constexpr bool kRowTile = kForm == Form::rows || kForm == Form::columns;
    const std::int64_t height = kRowTile ? kTileRows : kTileDepth;
    const std::int64_t width = kRowTile ? kTileDepth : kTileRows;
    Bf16* to =
        kAlongRows ? tile_of(job.to, row / height, column / width) : tile_of(job.to, column / height, row / width);
    // A read of 32 bf16 columns covers two tiles if a tile has 16.
    Bf16* second = to + (kAlongRows ? job.to.column_step : job.to.row_step);
    const bool two = column + kTileRows < job.dim;
    WordReader<T, kReading> from(job, rows);
    if constexpr (kForm == Form::rows && kFp32) {
        for (int r = 0; r < 16; ++r) {
            store_parted_row(to + r * kTileDepth, from.read(row + r, column), from.read(row + r, column + 16));
        }
    } else if constexpr (kForm == Form::rows) {
        for (int r = 0; r < 16; ++r) _mm512_store_si512(to + r * kTileDepth, from.read(row + r, column));
    } else if constexpr (kForm == Form::column_pairs && kFp32) {
        for (int half = 0; half < 2; ++half, to += 8 * kTileDepth) {
            __m512i x[16];
            from.read_transposed(row, 1, column + 16 * half, x);
            for (int i = 0; i < 8; ++i) store_parted_pairs(to + i * kTileDepth, x[2 * i], x[2 * i + 1]);
        }
    } else if constexpr (kForm == Form::column_pairs) {
        __m512i x[16];
        from.read_transposed(row, 1, column, x);
        for (int i = 0; i < 16; ++i) _mm512_store_si512(to + i * kTileDepth, x[i]);
    } else if constexpr (kForm == Form::columns) {
        __m512i even[16];
        __m512i odd[16];
        from.read_transposed(row, 2, column, even);
        from.read_transposed(row + 1, 2, column, odd);
        if constexpr (kFp32) {
            TESSERA_UNROLL for (int c = 0; c < 16; ++c) store_parted_pairs(to + c * kTileDepth, even[c], odd[c]);
        } else {
            store_columns_of_words(to, even, odd);
            if (two) store_columns_of_words(second, even + 8, odd + 8);
        }
    } else if constexpr (kFp32) {
        for (int i = 0; i < 16; ++i) {
            store_parted_pairs(to + i * kTileDepth, from.read(row + 2 * i, column), from.read(row + 2 * i + 1, column));
        }
    } else {
        const __m512i first_half = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
        const __m512i second_half = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
        for (int i = 0; i < 16; ++i) {
            const __m512i even = from.read(row + 2 * i, column);
            const __m512i odd = from.read(row + 2 * i + 1, column);
            const __m512i low = _mm512_unpacklo_epi16(even, odd);
            const __m512i high = _mm512_unpackhi_epi16(even, odd);
            _mm512_store_si512(to + i * kTileDepth, _mm512_permutex2var_epi64(low, first_half, high));
            if (two) _mm512_store_si512(second + i * kTileDepth, _mm512_permutex2var_epi64(low, second_half, high));
        }
    }
    return from.all_packable();
}

/// Packs the tiles that begin at (row, column). `inside`: the matrix has all their rows and columns, one after another.
/// rows: null, or addresses of rows in pages. Returns false if elements became 0.
template <Form kForm, class T>
HWY_INLINE bool pack_any_tile(const PackJob& job, std::int64_t row, std::int64_t column, bool inside,
                              const TileRows* rows) {
    if (inside && rows == nullptr && pack_tile<kForm, T, Reading::plain>(job, row, column)) return true;
    if (inside && rows != nullptr && pack_tile<kForm, T, Reading::paged>(job, row, column, rows)) return true;
    return pack_tile<kForm, T, Reading::checked>(job, row, column, rows);
}

template <Form kForm, class T>
inline bool pack_as(const PackJob& job) {
    constexpr std::int64_t kRows = kForm == Form::rows || kForm == Form::column_pairs ? 16 : 32;
    constexpr std::int64_t kColumns = kRows == 16 ? 32 : kOfVector<T>;
    const bool contiguous = job.from.column_stride == 1;
    const std::int64_t tiles = std::max<std::int64_t>(1, (job.dim + kColumns - 1) / kColumns);
    const std::int64_t share = (kRows + tiles - 1) / tiles;  // rows of the next block that each tile prefetches
    bool all = true;
    for (std::int64_t row = 0; row < job.rows; row += kRows) {
        std::int64_t fetched = row + kRows;
        TileRows memory;
        const TileRows* pages = memory.find(job, row, kRows);
        for (std::int64_t column = 0; column < job.dim; column += kColumns) {
            if (contiguous && job.from_memory) {
                fetch_rows(job.from, job.first + fetched,
                           job.first + std::min({fetched + share, row + 2 * kRows, job.rows}), job.dim);
            }
            fetched += share;
            const bool inside = contiguous && row + kRows <= job.rows && column + kColumns <= job.dim;
            if (!pack_any_tile<kForm, T>(job, row, column, inside, pages)) all = false;
        }
    }
    return all;
}

template <class T>
inline bool pack_elements(const PackJob& job) {
    switch (job.form) {
        case Form::rows: return pack_as<Form::rows, T>(job);
        case Form::columns: return pack_as<Form::columns, T>(job);
        case Form::row_pairs: return pack_as<Form::row_pairs, T>(job);
        case Form::column_pairs: return pack_as<Form::column_pairs, T>(job);
    }
    return true;
}

inline bool pack(const PackJob& job) {
    const FlushSubnormal flush;
    return job.from.dtype == DType::fp32 ? pack_elements<float>(job) : pack_elements<Bf16>(job);
}
