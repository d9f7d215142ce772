// SPDX-License-Identifier: Apache-2.0
//
// Packing of bf16 matrices into row tiles and pair tiles. Included inside the namespace and the target attributes of a
// unit's file (packed_amx.cc, packed_dot.cc).

/// Transposes 16 x 16 elements of 32 bits: x[r] holds row r before, column r after.
inline void transpose(__m512i (&x)[16]) {
    __m512i y[16];
    for (int r = 0; r < 16; r += 2) {
        y[r] = _mm512_unpacklo_epi32(x[r], x[r + 1]);
        y[r + 1] = _mm512_unpackhi_epi32(x[r], x[r + 1]);
    }
    for (int r = 0; r < 16; r += 4) {  // x[r + i], in each of its four quarters q: column 4q + i of rows r .. r + 3
        x[r] = _mm512_unpacklo_epi64(y[r], y[r + 2]);
        x[r + 1] = _mm512_unpackhi_epi64(y[r], y[r + 2]);
        x[r + 2] = _mm512_unpacklo_epi64(y[r + 1], y[r + 3]);
        x[r + 3] = _mm512_unpackhi_epi64(y[r + 1], y[r + 3]);
    }
    for (int i = 0; i < 4; ++i) {
        y[i] = _mm512_shuffle_i32x4(x[i], x[i + 4], 0x88);           // quarters 0, 2 of rows 0-3, 4-7
        y[i + 4] = _mm512_shuffle_i32x4(x[i], x[i + 4], 0xDD);       // quarters 1, 3
        y[i + 8] = _mm512_shuffle_i32x4(x[i + 8], x[i + 12], 0x88);  // of rows 8-11, 12-15
        y[i + 12] = _mm512_shuffle_i32x4(x[i + 8], x[i + 12], 0xDD);
    }
    for (int i = 0; i < 4; ++i) {
        x[i] = _mm512_shuffle_i32x4(y[i], y[i + 8], 0x88);
        x[i + 8] = _mm512_shuffle_i32x4(y[i], y[i + 8], 0xDD);
        x[i + 4] = _mm512_shuffle_i32x4(y[i + 4], y[i + 12], 0x88);
        x[i + 12] = _mm512_shuffle_i32x4(y[i + 4], y[i + 12], 0xDD);
    }
}

/// Reads a matrix in vectors of 32 elements of a row, 0 outside of it.
class RowReader {
 public:
    explicit RowReader(const PackJob& job) : job_(job) {}

    __m512i operator()(std::int64_t row, std::int64_t column) {
        if (row >= job_.rows || column >= job_.dim) return _mm512_setzero_si512();
        const std::int64_t left = job_.dim - column;
        const __mmask32 inside = left >= 32 ? ~__mmask32{0} : static_cast<__mmask32>((std::uint64_t{1} << left) - 1);
        const void* at = job_.from.at(job_.first + row, column);
        const __m512i x = job_.from.column_stride == 1 ? _mm512_maskz_loadu_epi16(inside, at) : gather(at, left);
        if (!job_.finite_only) return x;
        const __m512i exponent = _mm512_set1_epi16(0x7F80);
        const __mmask32 special = _mm512_cmpeq_epi16_mask(_mm512_and_si512(x, exponent), exponent);
        special_ |= special;
        return _mm512_maskz_mov_epi16(static_cast<__mmask32>(~special), x);
    }
    bool all_finite() const { return special_ == 0; }

 private:
    __m512i gather(const void* at, std::int64_t count) const {
        alignas(64) std::uint16_t values[32] = {};
        const auto* from = static_cast<const std::uint16_t*>(at);
        for (std::int64_t i = 0; i < (count < 32 ? count : 32); ++i) values[i] = from[i * job_.from.column_stride];
        return _mm512_load_si512(values);
    }

    const PackJob& job_;
    __mmask32 special_ = 0;
};

inline Bf16* tile_of(const Tiles& tiles, std::int64_t i, std::int64_t j) {
    return tiles.data + i * tiles.row_step + j * tiles.column_step;
}

inline void store_tile(const __m512i (&x)[16], Bf16* to) {
    for (int r = 0; r < 16; ++r) _mm512_store_si512(to + r * kTileDepth, x[r]);
}

/// Row tiles of M, or with `pairs` pair tiles of M^T: the same 16 x 16 elements of 32 bits, transposed.
inline void pack_along_rows(const PackJob& job, RowReader& read, bool pairs) {
    for (std::int64_t row = 0; row < job.rows; row += kTileRows) {
        for (std::int64_t column = 0; column < job.dim; column += kTileDepth) {
            __m512i x[16];
            for (int r = 0; r < 16; ++r) x[r] = read(row + r, column);
            if (pairs) transpose(x);
            store_tile(x, pairs ? tile_of(job.to, column / kTileDepth, row / kTileRows)
                                : tile_of(job.to, row / kTileRows, column / kTileDepth));
        }
    }
}

/// Pair tiles of M, or with `transposed` row tiles of M^T.
inline void pack_across_rows(const PackJob& job, RowReader& read, bool transposed) {
    const __m512i first_half = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
    const __m512i second_half = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
    for (std::int64_t row = 0; row < job.rows; row += kTileDepth) {
        for (std::int64_t column = 0; column < job.dim; column += 2 * kTileRows) {
            __m512i x[2][16];  // the columns of two tiles
            for (int pair = 0; pair < 16; ++pair) {
                const __m512i even = read(row + 2 * pair, column);
                const __m512i odd = read(row + 2 * pair + 1, column);
                const __m512i low = _mm512_unpacklo_epi16(even, odd);
                const __m512i high = _mm512_unpackhi_epi16(even, odd);
                x[0][pair] = _mm512_permutex2var_epi64(low, first_half, high);
                x[1][pair] = _mm512_permutex2var_epi64(low, second_half, high);
            }
            for (std::int64_t half = 0; half < 2 && column + half * kTileRows < job.dim; ++half) {
                if (transposed) transpose(x[half]);
                const std::int64_t tile = column / kTileRows + half;
                store_tile(x[half], transposed ? tile_of(job.to, tile, row / kTileDepth)
                                               : tile_of(job.to, row / kTileDepth, tile));
            }
        }
    }
}

inline bool pack(const PackJob& job) {
    RowReader read(job);
    switch (job.form) {
        case Form::rows: pack_along_rows(job, read, false); break;
        case Form::column_pairs: pack_along_rows(job, read, true); break;
        case Form::row_pairs: pack_across_rows(job, read, false); break;
        case Form::columns: pack_across_rows(job, read, true); break;
    }
    return read.all_finite();
}

/// The even and the odd elements of a vector of bf16, as fp32.
inline __m512 even_of(__m512i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(x, 16)); }
inline __m512 odd_of(__m512i x) {
    return _mm512_castsi512_ps(_mm512_and_si512(x, _mm512_set1_epi32(static_cast<int>(0xFFFF0000U))));
}

inline void row_dots(const HeadRows& a, const HeadRows& b, std::int64_t first, std::int64_t rows, std::int64_t dim,
                     float* sums) {
    const PackJob job_a{.from = a, .first = first, .rows = rows, .dim = dim};
    const PackJob job_b{.from = b, .first = first, .rows = rows, .dim = dim};
    RowReader read_a(job_a);
    RowReader read_b(job_b);
    for (std::int64_t row = 0; row < rows; ++row) {
        __m512 even = _mm512_setzero_ps();
        __m512 odd = _mm512_setzero_ps();
        for (std::int64_t c = 0; c < dim; c += 32) {
            const __m512i x = read_a(row, c);
            const __m512i y = read_b(row, c);
            even = _mm512_fmadd_ps(even_of(x), even_of(y), even);
            odd = _mm512_fmadd_ps(odd_of(x), odd_of(y), odd);
        }
        sums[row] = _mm512_reduce_add_ps(_mm512_add_ps(even, odd));
    }
}

/// 16 columns of O^T from `column` on for 16 rows, as 16 vectors of one row each.
inline void scaled_rows(const float* from, std::int64_t stride, std::int64_t column, __m512 scale, __m512i (&x)[16]) {
    for (int c = 0; c < 16; ++c) {
        const __m512 values = _mm512_mul_ps(_mm512_loadu_ps(from + (column + c) * stride), scale);
        x[c] = _mm512_castps_si512(_mm512_add_ps(values, _mm512_setzero_ps()));  // + 0: -0 becomes 0
    }
    transpose(x);
}

inline bool store_columns(const float* from, std::int64_t stride, std::int64_t rows, std::int64_t dim,
                          const float* lane_scale, const HeadRows& to, std::int64_t first) {
    const __m512i exponent = _mm512_set1_epi32(0x7F800000);
    __mmask16 special = 0;
    for (std::int64_t row = 0; row < rows; row += 16) {
        const __m512 scale = _mm512_loadu_ps(lane_scale + row);
        const std::int64_t present = rows - row < 16 ? rows - row : 16;
        for (std::int64_t column = 0; column < dim; column += 16) {
            __m512i x[16];
            scaled_rows(from + row, stride, column, scale, x);
            const std::int64_t left = dim - column;
            const auto inside = static_cast<__mmask16>(left >= 16 ? 0xFFFF : (1 << left) - 1);
            for (std::int64_t r = 0; r < present; ++r) {
                special |= _mm512_mask_cmpeq_epi32_mask(inside, _mm512_and_si512(x[r], exponent), exponent);
                const __m256bh narrow = _mm512_cvtneps_pbh(_mm512_castsi512_ps(x[r]));
                __m256i bits16;
                std::memcpy(&bits16, &narrow, sizeof bits16);
                auto* at = static_cast<std::uint16_t*>(to.at(first + row + r, column));
                if (to.column_stride == 1) {
                    _mm256_mask_storeu_epi16(at, inside, bits16);
                } else {
                    alignas(32) std::uint16_t values[16];
                    _mm256_store_si256(reinterpret_cast<__m256i*>(values), bits16);
                    for (std::int64_t c = 0; c < (left < 16 ? left : 16); ++c) at[c * to.column_stride] = values[c];
                }
            }
        }
    }
    return special == 0;
}
