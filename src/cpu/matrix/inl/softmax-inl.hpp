// SPDX-License-Identifier: Apache-2.0
//
// Softmax weights from scores, and the backward's gradient of the scores, packed for the GEMMs that read them. Included
// inside the namespace and the target attributes of a unit's file.

/// exp(x) for x <= 0 (simd/exp.hpp), as in simd/exp-inl.hpp. Results under exp(lowest) are 0.
inline __m512 exp_of_nonpositive(__m512 x, float lowest) {
    // The mask avoids SCALEF on results that are subnormal or 0, which takes hundreds of cycles.
    const __mmask16 normal = _mm512_cmp_ps_mask(x, _mm512_set1_ps(lowest), _CMP_NLT_UQ);
    const __m512 rounder = _mm512_set1_ps(simd::exp::kRounder);
    const __m512 n = _mm512_sub_ps(_mm512_fmadd_ps(x, _mm512_set1_ps(simd::exp::kLog2E), rounder), rounder);
    const __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(simd::exp::kLn2), x);
    __m512 p = _mm512_fmadd_ps(_mm512_set1_ps(simd::exp::kPolynomial[0]), r, _mm512_set1_ps(simd::exp::kPolynomial[1]));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(simd::exp::kPolynomial[2]));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(simd::exp::kPolynomial[3]));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(simd::exp::kPolynomial[4]));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0F));
    return _mm512_maskz_scalef_ps(normal, p, n);
}

/// The exponent under which a weight is flushed to 0: ln 2^-126, or ln 2^-102 with three parts, so that each part is a
/// normal number. Neither adds anything to a sum that holds a 1.
template <int kParts>
inline constexpr float kLowest = kParts == 1 ? simd::exp::kLowest : -70.70101F;

/// Stores weights as a pair tile's row.
template <int kParts>
inline void store_pairs(Bf16* to, __m512 even, __m512 odd) {
    if constexpr (kParts == 1) _mm512_store_si512(to, to_bf16_pairs(even, odd));
    else store_in_parts<cut, exact_bf16_pairs>(to, even, odd);
}
/// Stores weights of 32 lanes as a row tile's row.
template <int kParts>
inline void store_row_of_tile(Bf16* to, __m512 low, __m512 high) {
    if constexpr (kParts == 1) _mm512_store_si512(to, to_bf16(low, high));
    else store_in_parts<cut, exact_bf16>(to, low, high);
}

inline __m512 column_maximum(const float* s, std::int64_t keys, std::int64_t stride) {
    __m512 max[4];
    for (__m512& x : max) x = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
    std::int64_t j = 0;
    for (; j + 4 <= keys; j += 4) {
        for (int i = 0; i < 4; ++i) max[i] = _mm512_max_ps(max[i], _mm512_loadu_ps(s + (j + i) * stride));
    }
    for (; j < keys; ++j) max[0] = _mm512_max_ps(max[0], _mm512_loadu_ps(s + j * stride));
    return _mm512_max_ps(_mm512_max_ps(max[0], max[1]), _mm512_max_ps(max[2], max[3]));
}

inline void maximum(const float* s, std::int64_t keys, std::int64_t lanes, float* of_lanes) {
    for (std::int64_t lane = 0; lane < lanes; lane += kTileRows) {
        const __m512 max = _mm512_max_ps(_mm512_loadu_ps(of_lanes + lane), column_maximum(s + lane, keys, lanes));
        _mm512_storeu_ps(of_lanes + lane, max);
    }
}

/// Runs a WeightsJob in steps of 8 keys and 16 lanes, so that MMAs can be issued in between.
class WeightsInSteps {
 public:
    explicit WeightsInSteps(const WeightsJob& job)
        : job_(job),
          lane_tiles_(job.lanes / kTileRows),
          rows_((job.keys + kTileDepth - 1) / kTileDepth * kTileDepth),
          left_(lane_tiles_ * rows_ / kKeys) {
        if (left_ > 0) begin_lanes();
    }
    std::int64_t left() const { return left_; }

    void run(std::int64_t count) {
        for (; count > 0 && left_ > 0; --count, --left_) {
            if (job_.parts == 1) any_step<1>();
            else any_step<3>();
            key_ += kKeys;
            if (key_ % kTileDepth == 0) end_tile();
        }
    }

 private:
    static constexpr std::int64_t kKeys = 8;

    void begin_lanes() {
        const std::int64_t lane = lane_tile_ * kTileRows;
        const __m512 m = _mm512_mul_ps(_mm512_loadu_ps(job_.maximum + lane), _mm512_set1_ps(job_.scale));
        _mm512_storeu_ps(job_.m + lane, m);
        const __m512 lowest = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
        shift_ = _mm512_mask_mov_ps(m, _mm512_cmp_ps_mask(m, lowest, _CMP_EQ_OQ), _mm512_setzero_ps());
        added_ = _mm512_setzero_ps();
        if (job_.offset != nullptr) {
            const __m512 shift = _mm512_add_ps(shift_, _mm512_loadu_ps(job_.offset + lane));
            added_ = _mm512_sub_ps(shift, shift_);  // the part of the offset that survives rounding beside a large m
            shift_ = shift;
        }
        sum_ = even_sum_ = odd_sum_ = rounded_sum_ = _mm512_setzero_ps();
        key_ = 0;
    }

    template <int kParts>
    static __m512 weight(const float* s, __m512 scale, __m512 shift) {
        return exp_of_nonpositive(_mm512_sub_ps(_mm512_mul_ps(_mm512_loadu_ps(s), scale), shift), kLowest<kParts>);
    }
    /// Adds two rows of weights as they are rounded.
    void add_rounded(__m512 even, __m512 odd) {
        const __m512i pairs = to_bf16_pairs(even, odd);
        const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xFFFF0000U));
        rounded_sum_ = _mm512_add_ps(rounded_sum_, _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)));
        rounded_sum_ = _mm512_add_ps(rounded_sum_, _mm512_castsi512_ps(_mm512_and_si512(pairs, upper)));
    }
    /// The destination of key_'s weights.
    template <int kParts>
    Bf16* pairs() const {
        Bf16* tile = job_.p + (key_ / kTileDepth * lane_tiles_ + lane_tile_) * kTileElements * kParts;
        return tile + key_ % kTileDepth * kTileRows;
    }

    template <int kParts>
    void any_step() {
        if (key_ + kKeys > job_.keys) partial_step<kParts>();
        else if (job_.factors == nullptr) step<kParts, false>();
        else step<kParts, true>();
    }

    template <int kParts, bool kFactors>
    void step() {
        const float* s = job_.s + key_ * job_.lanes + lane_tile_ * kTileRows;
        const std::int64_t lanes = job_.lanes;
        const __m512 scale = _mm512_set1_ps(job_.scale);
        const __m512 shift = shift_;
        Bf16* to = pairs<kParts>();
        __m512 even_sum = even_sum_;
        __m512 odd_sum = odd_sum_;
        for (int pair = 0; pair < kKeys / 2; ++pair) {
            __m512 even = weight<kParts>(s + 2 * pair * lanes, scale, shift);
            __m512 odd = weight<kParts>(s + (2 * pair + 1) * lanes, scale, shift);
            even_sum = _mm512_add_ps(even_sum, even);
            odd_sum = _mm512_add_ps(odd_sum, odd);
            if constexpr (kFactors) {
                if constexpr (kParts == 1) add_rounded(even, odd);
                const float* factors = job_.factors + (s - job_.s) + 2 * pair * lanes;
                even = _mm512_mul_ps(even, _mm512_loadu_ps(factors));
                odd = _mm512_mul_ps(odd, _mm512_loadu_ps(factors + lanes));
            }
            store_pairs<kParts>(to + pair * kTileDepth, even, odd);
        }
        even_sum_ = even_sum;
        odd_sum_ = odd_sum;
    }

    /// A step at the end of the keys; keys beyond the last get weight 0.
    template <int kParts>
    void partial_step() {
        const __m512 scale = _mm512_set1_ps(job_.scale);
        Bf16* to = pairs<kParts>();
        for (std::int64_t key = key_; key < key_ + kKeys; key += 2) {
            __m512 p[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
            for (std::int64_t i = 0; i < 2 && key + i < job_.keys; ++i) {
                const std::int64_t at = (key + i) * job_.lanes + lane_tile_ * kTileRows;
                p[i] = weight<kParts>(job_.s + at, scale, shift_);
                __m512& sum = i == 0 ? even_sum_ : odd_sum_;
                sum = _mm512_add_ps(sum, p[i]);
            }
            if (job_.factors != nullptr) {
                if constexpr (kParts == 1) add_rounded(p[0], p[1]);
                for (std::int64_t i = 0; i < 2 && key + i < job_.keys; ++i) {
                    const std::int64_t at = (key + i) * job_.lanes + lane_tile_ * kTileRows;
                    p[i] = _mm512_mul_ps(p[i], _mm512_loadu_ps(job_.factors + at));
                }
            }
            store_pairs<kParts>(to + (key - key_) / 2 * kTileDepth, p[0], p[1]);
        }
    }

    /// Sums a tile first: the rounding error then grows with the number of tiles, not of keys.
    void end_tile() {
        sum_ = _mm512_add_ps(sum_, _mm512_add_ps(even_sum_, odd_sum_));
        even_sum_ = odd_sum_ = _mm512_setzero_ps();
        if (key_ < rows_) return;
        const std::int64_t lane = lane_tile_ * kTileRows;
        if (job_.offset != nullptr) {
            sum_ = _mm512_div_ps(sum_, exp_of_nonpositive(_mm512_sub_ps(_mm512_setzero_ps(), added_), kLowest<1>));
        }
        _mm512_storeu_ps(job_.l + lane, sum_);
        if (job_.rounded_l != nullptr) _mm512_storeu_ps(job_.rounded_l + lane, rounded_sum_);
        if (++lane_tile_ < lane_tiles_) begin_lanes();
    }

    const WeightsJob& job_;
    std::int64_t lane_tiles_;
    std::int64_t rows_;
    std::int64_t left_;
    std::int64_t lane_tile_ = 0;
    std::int64_t key_ = 0;
    __m512 shift_;
    __m512 added_;  // what shift_ adds to m
    __m512 sum_;
    __m512 rounded_sum_;
    __m512 even_sum_;
    __m512 odd_sum_;
};

inline void weights(const WeightsJob& job) {
    WeightsInSteps in_steps(job);
    in_steps.run(in_steps.left());
}

/// P without dropout and dP with dropout, for one key in 16 lanes.
struct WeightAndDp {
    __m512 p;
    __m512 dp;
};

template <int kParts>
inline WeightAndDp weight_and_dp(const GradientJob& job, std::int64_t key, std::int64_t lane) {
    const std::int64_t at = key * job.lanes + lane;
    const __m512 s = _mm512_mul_ps(_mm512_loadu_ps(job.s + at), _mm512_set1_ps(job.scale));
    // A weight is at most 1: the difference is clamped to 0 if rounding put the LSE below the score. min returns its
    // second operand for NaN.
    const __m512 x = _mm512_min_ps(_mm512_setzero_ps(), _mm512_sub_ps(s, _mm512_loadu_ps(job.lse + lane)));
    __m512 p = exp_of_nonpositive(x, kLowest<kParts>);
    if (job.norm != nullptr) p = _mm512_mul_ps(p, _mm512_loadu_ps(job.norm + lane));
    __m512 dp = _mm512_loadu_ps(job.dp + at);
    if (job.factors != nullptr) {
        dp = _mm512_mul_ps(_mm512_mul_ps(dp, _mm512_set1_ps(job.kept)), _mm512_loadu_ps(job.factors + at));
    }
    return {p, dp};
}

inline __mmask16 seen_of(const GradientJob& job, std::int64_t at) {
    return _mm512_cmp_ps_mask(_mm512_loadu_ps(job.visible + at), _mm512_setzero_ps(), _CMP_NEQ_OQ);
}

inline void add_to_doubles(double* to, __m512 x) {
    const __m256 high = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(x), 1));
    _mm512_storeu_pd(to, _mm512_add_pd(_mm512_loadu_pd(to), _mm512_cvtps_pd(_mm512_castps512_ps256(x))));
    _mm512_storeu_pd(to + 8, _mm512_add_pd(_mm512_loadu_pd(to + 8), _mm512_cvtps_pd(high)));
}

inline void add_weighted_sums(const GradientJob& job, double* weights, double* products) {
    for (std::int64_t lane = 0; lane < job.lanes; lane += kTileRows) {
        __m512 weight[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
        __m512 product[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
        for (std::int64_t key = 0; key < job.keys; ++key) {
            WeightAndDp x = weight_and_dp<1>(job, key, lane);
            if (job.visible != nullptr) {
                const __mmask16 seen = seen_of(job, key * job.lanes + lane);
                x = {_mm512_maskz_mov_ps(seen, x.p), _mm512_maskz_mov_ps(seen, x.dp)};
            }
            weight[key % 2] = _mm512_add_ps(weight[key % 2], x.p);
            product[key % 2] = _mm512_fmadd_ps(x.p, x.dp, product[key % 2]);
        }
        add_to_doubles(weights + lane, _mm512_add_ps(weight[0], weight[1]));
        add_to_doubles(products + lane, _mm512_add_ps(product[0], product[1]));
    }
}

/// P and dS for one key in 16 lanes.
struct WeightAndGradient {
    __m512 p;
    __m512 ds;
};

template <int kParts>
inline WeightAndGradient gradient_of(const GradientJob& job, std::int64_t key, std::int64_t lane) {
    if (key >= job.keys) return {_mm512_setzero_ps(), _mm512_setzero_ps()};
    const std::int64_t at = key * job.lanes + lane;
    auto [p, dp] = weight_and_dp<kParts>(job, key, lane);
    __m512 ds = _mm512_mul_ps(p, _mm512_sub_ps(dp, _mm512_loadu_ps(job.delta + lane)));
    if (job.factors != nullptr) p = _mm512_mul_ps(p, _mm512_loadu_ps(job.factors + at));
    if (job.cap_slope != nullptr) ds = _mm512_mul_ps(ds, _mm512_loadu_ps(job.cap_slope + at));
    if (job.visible != nullptr) {
        const __mmask16 seen = seen_of(job, at);
        p = _mm512_maskz_mov_ps(seen, p);
        ds = _mm512_maskz_mov_ps(seen, ds);
    }
    return {p, ds};
}

template <int kParts>
inline void gradient_in_parts(const GradientJob& job) {
    for (std::int64_t key = 0; key < (job.keys + 31) / 32 * 32; key += 2) {
        for (std::int64_t lane = 0; lane < job.lanes; lane += 32) {
            const WeightAndGradient even_low = gradient_of<kParts>(job, key, lane);
            const WeightAndGradient even_high = gradient_of<kParts>(job, key, lane + 16);
            const WeightAndGradient odd_low = gradient_of<kParts>(job, key + 1, lane);
            const WeightAndGradient odd_high = gradient_of<kParts>(job, key + 1, lane + 16);
            Bf16* p = tile_of(job.p_rows, key / 16, lane / 32) + key % 16 * 32;
            Bf16* ds = tile_of(job.ds_rows, key / 16, lane / 32) + key % 16 * 32;
            store_row_of_tile<kParts>(p, even_low.p, even_high.p);
            store_row_of_tile<kParts>(p + 32, odd_low.p, odd_high.p);
            store_row_of_tile<kParts>(ds, even_low.ds, even_high.ds);
            store_row_of_tile<kParts>(ds + 32, odd_low.ds, odd_high.ds);
            Bf16* pairs = tile_of(job.ds_pairs, key / 32, lane / 16) + key % 32 * 16;
            store_pairs<kParts>(pairs, even_low.ds, odd_low.ds);
            store_pairs<kParts>(pairs + job.ds_pairs.column_step, even_high.ds, odd_high.ds);
        }
    }
}

inline void gradient(const GradientJob& job) {
    if (job.parts == 1) return gradient_in_parts<1>(job);
    const FlushSubnormal flush;
    gradient_in_parts<3>(job);
}
