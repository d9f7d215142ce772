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

/// In a scope of this, results under the smallest normal number are 0. Otherwise a part of a tiny number would be
/// subnormal and take a hundred cycles to make, only for the unit to read it as 0.
class FlushSubnormal {
 public:
    FlushSubnormal() { _mm_setcsr(before_ | 0x8040); }
    ~FlushSubnormal() { _mm_setcsr(before_); }
    FlushSubnormal(const FlushSubnormal&) = delete;
    FlushSubnormal& operator=(const FlushSubnormal&) = delete;

 private:
    unsigned before_ = _mm_getcsr();
};

/// bf16 in the upper half of each element of `low` and `high`, as 32 elements one after another.
inline __m512i upper_halves(__m512 low, __m512 high) {
    alignas(64) static constexpr std::uint16_t kOdd[32] = {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21,
                                                           23, 25, 27, 29, 31, 33, 35, 37, 39, 41, 43,
                                                           45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
    return _mm512_permutex2var_epi16(_mm512_castps_si512(low), _mm512_load_si512(kOdd), _mm512_castps_si512(high));
}

/// A mask for the first `count` of up to 32 elements.
inline __mmask32 first_elements(std::int64_t count) {
    return count >= 32 ? ~__mmask32{0} : static_cast<__mmask32>((std::uint64_t{1} << count) - 1);
}

/// `count` elements at steps of `stride`, the rest of 32 zeros.
template <class T>
inline void gather(const void* at, std::int64_t stride, std::int64_t count, T (&to)[32]) {
    const T* from = static_cast<const T*>(at);
    for (std::int64_t i = 0; i < 32; ++i) to[i] = i < count ? from[i * stride] : T{};
}

/// 32 elements of an fp32 row from (row, column) on, 0 from `count` on.
inline void load_floats(const HeadRows& from, std::int64_t row, std::int64_t column, std::int64_t count,
                        __m512 (&x)[2]) {
    const void* at = from.at(row, column);
    if (from.column_stride == 1) {
        const __mmask32 inside = first_elements(count);
        x[0] = _mm512_maskz_loadu_ps(static_cast<__mmask16>(inside), at);
        x[1] = _mm512_maskz_loadu_ps(static_cast<__mmask16>(inside >> 16), static_cast<const float*>(at) + 16);
        return;
    }
    alignas(64) float values[32];
    gather(at, from.column_stride, count, values);
    x[0] = _mm512_load_ps(values);
    x[1] = _mm512_load_ps(values + 16);
}

/// Reads a bf16 matrix in vectors of 32 elements of a row, 0 outside of it.
class Bf16Reader {
 public:
    static constexpr int kParts = 1;
    explicit Bf16Reader(const PackJob& job) : job_(job) {}

    void operator()(std::int64_t row, std::int64_t column, __m512i (&parts)[kParts]) {
        parts[0] = _mm512_setzero_si512();
        if (row >= job_.rows || column >= job_.dim) return;
        const std::int64_t left = job_.dim - column;
        const void* at = job_.from.at(job_.first + row, column);
        __m512i& x = parts[0];
        if (job_.from.column_stride == 1) {
            x = _mm512_maskz_loadu_epi16(first_elements(left), at);
        } else {
            alignas(64) std::uint16_t values[32];
            gather(at, job_.from.column_stride, left, values);
            x = _mm512_load_si512(values);
        }
        if (!job_.finite_only) return;
        const __m512i exponent = _mm512_set1_epi16(0x7F80);
        const __mmask32 special = _mm512_cmpeq_epi16_mask(_mm512_and_si512(x, exponent), exponent);
        special_ |= special;
        x = _mm512_maskz_mov_epi16(static_cast<__mmask32>(~special), x);
    }
    bool all_packable() const { return special_ == 0; }

 private:
    const PackJob& job_;
    __mmask32 special_ = 0;
};

/// The same for an fp32 matrix, each element parted in three: what bf16 rounds it to, what that leaves, rounded, and
/// the rest, which bf16 holds exactly.
class Fp32Reader {
 public:
    static constexpr int kParts = 3;
    explicit Fp32Reader(const PackJob& job) : job_(job) {}

    void operator()(std::int64_t row, std::int64_t column, __m512i (&parts)[kParts]) {
        __m512 x[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
        if (row < job_.rows && column < job_.dim) load(row, column, x);
        __m512 rounded[2] = {nearest(x[0]), nearest(x[1])};
        parts[0] = upper_halves(rounded[0], rounded[1]);
        for (int i = 0; i < 2; ++i) {
            x[i] = _mm512_sub_ps(x[i], rounded[i]);
            rounded[i] = nearest(x[i]);
            x[i] = _mm512_sub_ps(x[i], rounded[i]);
        }
        parts[1] = upper_halves(rounded[0], rounded[1]);
        parts[2] = upper_halves(x[0], x[1]);
    }
    bool all_packable() const { return special_ == 0; }

 private:
    void load(std::int64_t row, std::int64_t column, __m512 (&x)[2]) {
        load_floats(job_.from, job_.first + row, column, job_.dim - column, x);
        for (__m512& half : x) {
            half = _mm512_mul_ps(half, _mm512_set1_ps(job_.scale));
            const __m512 size =
                _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(half), _mm512_set1_epi32(0x7FFFFFFF)));
            const __mmask16 special = _mm512_cmp_ps_mask(size, _mm512_set1_ps(0x1p127F), _CMP_NLT_UQ);  // also NaN
            special_ |= special;
            half = _mm512_maskz_mov_ps(static_cast<__mmask16>(~special), half);
        }
    }

    /// The nearest number of 8 bits, ties away from 0.
    static __m512 nearest(__m512 x) {
        const __m512i up = _mm512_add_epi32(_mm512_castps_si512(x), _mm512_set1_epi32(0x8000));
        return _mm512_castsi512_ps(_mm512_and_si512(up, _mm512_set1_epi32(static_cast<int>(0xFFFF0000U))));
    }

    const PackJob& job_;
    __mmask16 special_ = 0;
};

inline Bf16* tile_of(const Tiles& tiles, std::int64_t i, std::int64_t j) {
    return tiles.data + i * tiles.row_step + j * tiles.column_step;
}

inline void transpose_tile(Bf16* tile) {
    __m512i x[16];
    for (int r = 0; r < 16; ++r) x[r] = _mm512_load_si512(tile + r * kTileDepth);
    transpose(x);
    for (int r = 0; r < 16; ++r) _mm512_store_si512(tile + r * kTileDepth, x[r]);
}

/// Row tiles of M, or with `pairs` pair tiles of M^T: the same 16 x 16 elements of 32 bits, transposed.
template <class Reader>
inline void pack_along_rows(const PackJob& job, Reader& read, bool pairs) {
    constexpr int kParts = Reader::kParts;
    for (std::int64_t row = 0; row < job.rows; row += kTileRows) {
        for (std::int64_t column = 0; column < job.dim; column += kTileDepth) {
            Bf16* to = pairs ? tile_of(job.to, column / kTileDepth, row / kTileRows)
                             : tile_of(job.to, row / kTileRows, column / kTileDepth);
            for (int r = 0; r < 16; ++r) {
                __m512i parts[kParts];
                read(row + r, column, parts);
                for (int part = 0; part < kParts; ++part) {
                    _mm512_store_si512(to + part * kTileElements + r * kTileDepth, parts[part]);
                }
            }
            for (int part = 0; pairs && part < kParts; ++part) transpose_tile(to + part * kTileElements);
        }
    }
}

/// Pair tiles of M, or with `transposed` row tiles of M^T.
template <class Reader>
inline void pack_across_rows(const PackJob& job, Reader& read, bool transposed) {
    constexpr int kParts = Reader::kParts;
    const __m512i first_half = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
    const __m512i second_half = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
    for (std::int64_t row = 0; row < job.rows; row += kTileDepth) {
        for (std::int64_t column = 0; column < job.dim; column += 2 * kTileRows) {
            const auto tile = [&](std::int64_t at) {
                return transposed ? tile_of(job.to, at / kTileRows, row / kTileDepth)
                                  : tile_of(job.to, row / kTileDepth, at / kTileRows);
            };
            const bool two = column + kTileRows < job.dim;  // 32 columns are those of two tiles
            Bf16* first = tile(column);
            Bf16* second = two ? tile(column + kTileRows) : nullptr;
            for (int pair = 0; pair < 16; ++pair) {
                __m512i even[kParts];
                __m512i odd[kParts];
                read(row + 2 * pair, column, even);
                read(row + 2 * pair + 1, column, odd);
                for (int part = 0; part < kParts; ++part) {
                    const __m512i low = _mm512_unpacklo_epi16(even[part], odd[part]);
                    const __m512i high = _mm512_unpackhi_epi16(even[part], odd[part]);
                    const std::int64_t at = part * kTileElements + pair * kTileDepth;
                    _mm512_store_si512(first + at, _mm512_permutex2var_epi64(low, first_half, high));
                    if (two) _mm512_store_si512(second + at, _mm512_permutex2var_epi64(low, second_half, high));
                }
            }
            for (int part = 0; transposed && part < kParts; ++part) {
                transpose_tile(first + part * kTileElements);
                if (two) transpose_tile(second + part * kTileElements);
            }
        }
    }
}

template <class Reader>
inline bool pack_with(const PackJob& job) {
    Reader read(job);
    switch (job.form) {
        case Form::rows: pack_along_rows(job, read, false); break;
        case Form::column_pairs: pack_along_rows(job, read, true); break;
        case Form::row_pairs: pack_across_rows(job, read, false); break;
        case Form::columns: pack_across_rows(job, read, true); break;
    }
    return read.all_packable();
}

inline bool pack(const PackJob& job) {
    const FlushSubnormal flush;
    return job.from.dtype == DType::fp32 ? pack_with<Fp32Reader>(job) : pack_with<Bf16Reader>(job);
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
    Bf16Reader read_a(job_a);
    Bf16Reader read_b(job_b);
    // 32 elements as fp32, in an order that is the same for both.
    const auto load = [&](const HeadRows& x, Bf16Reader& read, std::int64_t row, std::int64_t c, __m512(&to)[2]) {
        if (x.dtype == DType::fp32) return load_floats(x, first + row, c, dim - c, to);
        __m512i packed[1];
        read(row, c, packed);
        to[0] = even_of(packed[0]);
        to[1] = odd_of(packed[0]);
    };
    for (std::int64_t row = 0; row < rows; ++row) {
        __m512 sum[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
        for (std::int64_t c = 0; c < dim; c += 32) {
            __m512 x[2];
            __m512 y[2];
            load(a, read_a, row, c, x);
            load(b, read_b, row, c, y);
            for (int i = 0; i < 2; ++i) sum[i] = _mm512_fmadd_ps(x[i], y[i], sum[i]);
        }
        sums[row] = _mm512_reduce_add_ps(_mm512_add_ps(sum[0], sum[1]));
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

/// Stores the elements of x that `inside` has, the first ones, in bf16 or fp32.
inline void store_row(const HeadRows& to, std::int64_t row, std::int64_t column, __m512 x, __mmask16 inside) {
    void* at = to.at(row, column);
    if (to.dtype == DType::fp32 && to.column_stride == 1) return _mm512_mask_storeu_ps(at, inside, x);
    if (to.dtype == DType::fp32) {
        alignas(64) float values[16];
        _mm512_store_ps(values, x);
        for (int c = 0; c < 16 && (inside >> c & 1) != 0; ++c)
            static_cast<float*>(at)[c * to.column_stride] = values[c];
        return;
    }
    const __m256bh narrow = _mm512_cvtneps_pbh(x);
    __m256i bits16;
    std::memcpy(&bits16, &narrow, sizeof bits16);
    if (to.column_stride == 1) return _mm256_mask_storeu_epi16(at, inside, bits16);
    alignas(32) std::uint16_t values[16];
    _mm256_store_si256(reinterpret_cast<__m256i*>(values), bits16);
    for (int c = 0; c < 16 && (inside >> c & 1) != 0; ++c) {
        static_cast<std::uint16_t*>(at)[c * to.column_stride] = values[c];
    }
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
            const auto inside = static_cast<__mmask16>(first_elements(dim - column));
            for (std::int64_t r = 0; r < present; ++r) {
                special |= _mm512_mask_cmpeq_epi32_mask(inside, _mm512_and_si512(x[r], exponent), exponent);
                store_row(to, first + row + r, column, _mm512_castsi512_ps(x[r]), inside);
            }
        }
    }
    return special == 0;
}
