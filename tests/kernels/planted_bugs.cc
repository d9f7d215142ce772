// SPDX-License-Identifier: Apache-2.0
#include "kernels/planted_bugs.hpp"

#include <cmath>
#include <vector>

#include "check/gold.hpp"
#include "check/heads.hpp"

namespace tessera::check {
namespace {

using reference::Head;

constexpr std::int64_t kTile = 64;
constexpr std::int64_t kSickTile = 1;  // the tile that has the bug, if only one has it
constexpr std::int64_t kSickRow = 77;

/// x with a significand of `bits` bits, cut or rounded.
double keep_bits(double x, int bits, bool cut) {
    if (x == 0 || !std::isfinite(x)) return x;
    int exponent = 0;
    const double mantissa = std::ldexp(std::frexp(x, &exponent), bits);
    return std::ldexp(cut ? std::trunc(mantissa) : std::nearbyint(mantissa), exponent - bits);
}

/// The roundings of one dtype. fp32 rounds to itself; where a bug loses bits it loses them from 24.
struct Precision {
    DType dtype;
    int bits() const { return dtype == DType::bf16 ? 8 : dtype == DType::fp16 ? 11 : 24; }
    double round(double x) const {
        if (dtype == DType::fp32) return static_cast<float>(x);
        return dtype == DType::bf16 ? to_double(from_double<Bf16>(x)) : to_double(from_double<Fp16>(x));
    }
    /// x as a bug rounds it: to the dtype, in fp32 to `fp32_bits` bits.
    double lose(double x, int fp32_bits, bool cut = false) const {
        return keep_bits(x, dtype == DType::fp32 ? fp32_bits : bits(), cut);
    }
};

double stored(const Precision& precision, double x, Bug bug, Bug cuts) {
    if (bug != cuts) return precision.round(x);
    return precision.dtype == DType::fp32 ? x * (1 - 4e-6) : precision.lose(x, 0, true);
}

/// One head of a forward.
class ForwardHead {
 public:
    ForwardHead(const Head& head, DType dtype, Bug bug)
        : head_(head), p_(head.problem), precision_{dtype}, bug_(bug), query_(size(p_.head_dim)) {}

    /// Row i: fills o, returns LSE.
    double row(std::int64_t i, std::vector<double>& o) {
        head_.load_query(i, query_.data());
        m_ = -INFINITY, l_ = 0;
        acc_.assign(size(p_.head_dim_v), 0.0F);
        for (std::int64_t first = 0; first < head_.sequence.len_kv; first += kTile) {
            if (!(bug_ == Bug::skipped_tile && sick(i) && first == kSickTile * kTile)) tile(i, first);
        }
        for (std::int64_t c = 0; c < p_.head_dim_v; ++c) o[size(c)] = l_ == 0 ? 0 : acc_[size(c)] / l_;
        return l_ == 0 ? -INFINITY : m_ + std::log(l_);
    }

 private:
    static std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }
    static bool sick(std::int64_t i) { return i / kTile == kSickTile; }

    bool sees(std::int64_t i, std::int64_t j) const {
        const std::int64_t more = !sick(i)                          ? 0
                                  : bug_ == Bug::diagonal_one_more  ? 1
                                  : bug_ == Bug::diagonal_one_fewer ? -1
                                                                    : 0;
        const Range keys = head_.band.row(i);
        return j >= keys.begin && j < keys.end + more;
    }

    double score(std::int64_t i, std::int64_t j) const {
        if (j >= head_.sequence.len_kv) return 0;  // padding
        double dot = static_cast<float>(head_.dot(query_.data(), j));
        if (bug_ == Bug::queries_prescaled) {
            dot = 0;
            for (std::int64_t c = 0; c < p_.head_dim; ++c)
                dot += precision_.lose(p_.effective_scale() * query_[size(c)], 12) * head_.k[j * p_.head_dim + c];
        }
        const double s = static_cast<float>(head_.score(i, j, dot));
        return bug_ == Bug::scores_in_dtype ? precision_.lose(s, 12) : s;
    }

    float exponential(double x) const {
        const double size_of_error = precision_.dtype == DType::fp32 ? 1e-5 : 4e-3;
        const double error = bug_ == Bug::exponential_coarse ? size_of_error * std::sin(40 * x) : 0;
        return static_cast<float>(std::exp(x) * (1 + error));
    }

    double dropout(std::int64_t i, std::int64_t j) const {
        const std::int64_t key = bug_ == Bug::dropout_of_neighbour ? j + 1 : j;
        const double factor = head_.dropout_factor(i, key);
        return bug_ == Bug::dropout_unscaled_once && sick(i) ? std::min(1.0, factor) : factor;
    }

    void tile(std::int64_t i, std::int64_t first) {
        const bool last = first + kTile >= head_.sequence.len_kv;
        const std::int64_t padded = bug_ == Bug::padding_counted && last ? first + kTile : head_.sequence.len_kv;
        double maximum = m_;
        for (std::int64_t j = first; j < std::min(first + kTile, padded); ++j) {
            if (sees(i, j) || j >= head_.sequence.len_kv) maximum = std::max(maximum, score(i, j));
        }
        if (maximum == -INFINITY) return;
        const float rescale = exponential(m_ - maximum);
        const bool stale = sick(i) && m_ != -INFINITY;
        if (!(bug_ == Bug::stale_sum && stale)) l_ *= rescale;
        if (!(bug_ == Bug::stale_output && stale)) {
            for (float& x : acc_) x *= rescale;
        }
        m_ = maximum;
        for (std::int64_t j = first; j < std::min(first + kTile, padded); ++j) {
            if (bug_ == Bug::key_dropped_at_edge && j == first + kTile - 1) continue;
            if (!sees(i, j) && j < head_.sequence.len_kv) continue;
            add(i, j, bug_ == Bug::key_doubled_at_edge && j == first && first > 0 ? 2 : 1);
        }
    }

    void add(std::int64_t i, std::int64_t j, double times) {
        const auto weight = static_cast<float>(times * exponential(score(i, j) - m_));
        l_ += weight;
        if (bug_ == Bug::sum_in_dtype) l_ = static_cast<float>(precision_.lose(l_, 16));
        if (j >= head_.sequence.len_kv) return;
        const double kept = bug_ == Bug::weights_cut ? precision_.lose(weight, 16, true) : precision_.round(weight);
        const bool off = bug_ == Bug::value_of_neighbour && j == kTile + 5;
        const double* v = head_.v + (off ? j + 1 : j) * p_.head_dim_v;
        const auto factor = static_cast<float>(kept * dropout(i, j));
        for (std::int64_t c = 0; c < p_.head_dim_v; ++c) {
            acc_[size(c)] += factor * static_cast<float>(v[c]);
            if (bug_ == Bug::output_in_dtype) acc_[size(c)] = static_cast<float>(precision_.lose(acc_[size(c)], 16));
        }
    }

    const Head& head_;
    const Problem& p_;
    Precision precision_;
    Bug bug_;
    std::vector<double> query_;
    std::vector<float> acc_;  // [head_dim_v]
    double m_ = 0;
    float l_ = 0;
};

/// The head whose keys and values a query head reads.
template <class Args, class F>
void for_each_planted_head(const PackedCall<Args>& packed, Bug bug, F&& f) {
    const Problem& p = packed.problem;
    std::vector<double> k(static_cast<std::size_t>(p.len_kv * p.head_dim));
    std::vector<double> v(static_cast<std::size_t>(p.len_kv * p.head_dim_v));
    for (std::int64_t b = 0; b < p.batch; ++b) {
        const Sequence sequence = sequence_of(p, {}, {}, b);
        for (std::int64_t h = 0; h < p.heads_q; ++h) {
            Head head(p, packed.call, sequence, h, k.data(), v.data());
            if (bug == Bug::other_kv_head) {
                const std::int64_t kv_head = h % p.heads_kv;
                Head::unpack(head_rows(packed.call.k, sequence, 0, kv_head), p.len_kv, p.head_dim, k.data());
                Head::unpack(head_rows(packed.call.v, sequence, 0, kv_head), p.len_kv, p.head_dim_v, v.data());
            }
            f(head, sequence, h);
        }
    }
}

/// Makes the error of an element three times as large.
double tripled(double got, double right) { return right + 3 * (got - right); }

/// One head of a backward: adds to fp32 sums of dQ, dK and dV, all [len, dim].
class BackwardHead {
 public:
    BackwardHead(const Head& head, DType dtype, Bug bug)
        : head_(head),
          p_(head.problem),
          precision_{dtype},
          bug_(bug),
          query_(size(p_.head_dim)),
          weights_(size(p_.len_kv)),
          dots_(size(p_.len_kv)) {}

    void row(std::int64_t i, const HeadRows& d_o, const HeadRows& dlse, float* dq, float* dk, float* dv) {
        head_.load_query(i, query_.data());
        head_.softmax(i, query_.data(), weights_.data(), dots_.data());
        const Range keys = head_.band.row(i);
        std::vector<float> dp(size(p_.len_kv));
        for (std::int64_t j = keys.begin; j < keys.end; ++j) {
            double sum = 0;
            for (std::int64_t c = 0; c < p_.head_dim_v; ++c) sum += slot(d_o, i, c) * head_.v[j * p_.head_dim_v + c];
            dp[size(j)] =
                static_cast<float>(sum * (bug_ == Bug::dropout_missing_in_dp ? 1 : head_.dropout_factor(i, j)));
        }
        const auto delta = static_cast<float>(
            delta_of(i, d_o, keys, dp) - (dlse.data != nullptr && bug_ != Bug::dlse_ignored ? slot(dlse, i, 0) : 0));
        const std::int64_t tiles = (p_.len_q + kTile - 1) / kTile;
        const bool to_keys = !(bug_ == Bug::last_queries_missing && i / kTile == tiles - 1) &&
                             !(bug_ == Bug::group_head_missing && head_.head % p_.group() == 1);
        for (std::int64_t j = keys.begin; j < keys.end; ++j) {
            const auto weight = static_cast<float>(weights_[size(j)]);
            const double slope = bug_ == Bug::softcap_slope_missing ? 1 : head_.score_slope(dots_[size(j)]);
            const double exact = weight * (dp[size(j)] - delta) * static_cast<float>(slope);
            const double ds =
                bug_ == Bug::score_gradient_cut ? precision_.lose(exact, 14, true) : precision_.round(exact);
            const double dropped = weight * head_.dropout_factor(i, j);
            const double p =
                bug_ == Bug::transposed_weights_cut ? precision_.lose(dropped, 14, true) : precision_.round(dropped);
            for (std::int64_t c = 0; c < p_.head_dim; ++c) {
                dq[i * p_.head_dim + c] += static_cast<float>(ds * head_.k[j * p_.head_dim + c]);
                if (to_keys) dk[j * p_.head_dim + c] += static_cast<float>(ds * query_[size(c)]);
            }
            for (std::int64_t c = 0; to_keys && c < p_.head_dim_v; ++c)
                dv[j * p_.head_dim_v + c] += static_cast<float>(p * slot(d_o, i, c));
        }
    }

 private:
    static std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }

    double delta_of(std::int64_t i, const HeadRows& d_o, const Range& keys, const std::vector<float>& dp) const {
        if (bug_ == Bug::delta_missing_in_tile && i / kTile == kSickTile) return 0;
        double delta = 0;
        if (bug_ != Bug::delta_of_rounded_o) {
            for (std::int64_t j = keys.begin; j < keys.end; ++j) delta += weights_[size(j)] * dp[size(j)];
            return delta;
        }
        for (std::int64_t c = 0; c < p_.head_dim_v; ++c) {
            double o = 0;
            for (std::int64_t j = keys.begin; j < keys.end; ++j)
                o += weights_[size(j)] * head_.dropout_factor(i, j) * head_.v[j * p_.head_dim_v + c];
            delta += slot(d_o, i, c) * precision_.lose(o, 14);
        }
        return delta;
    }

    const Head& head_;
    const Problem& p_;
    Precision precision_;
    Bug bug_;
    std::vector<double> query_, weights_, dots_;
};

}  // namespace

void planted_forward(Attention& a, Bug bug) {
    const Problem& p = a.problem;
    const Precision precision{p.dtype};
    const PackedCall<ForwardArgs> packed = pack(p, a.forward_args());
    const ForwardGold gold(p, a.forward_args());
    const bool noisy = bug == Bug::late_rows_noisy || bug == Bug::peaked_rows_noisy;
    std::vector<double> row(static_cast<std::size_t>(p.head_dim_v));
    for_each_planted_head(packed, bug, [&](const Head& head, const Sequence& sequence, std::int64_t h) {
        ForwardHead kernel(head, p.dtype, bug);
        const HeadRows right = head_rows(gold.o(), sequence, 0, h);
        for (std::int64_t i = 0; i < p.len_q; ++i) {
            double lse = kernel.row(bug == Bug::wrong_row && i == kSickRow ? i - 1 : i, row);
            if (bug == Bug::wrong_row && i == kSickRow) lse = slot(lse_rows(gold.lse(), sequence, h), i, 0);
            if (bug == Bug::lse_of_base_two) lse /= std::log(2.0);
            if (bug == Bug::lse_off_in_one_row && i == kSickRow) lse += 2e-5;
            if (bug == Bug::scores_in_dtype || bug == Bug::queries_prescaled)
                lse = slot(lse_rows(gold.lse(), sequence, h), i, 0);
            a.lse.set(lse, sequence.batch, h, i);
            const bool worse = noisy && (bug == Bug::peaked_rows_noisy || i >= p.len_q - kTile);
            for (std::int64_t c = 0; c < p.head_dim_v; ++c) {
                double x = stored(precision, row[static_cast<std::size_t>(c)], bug, Bug::output_cut);
                if (worse)
                    x = tripled(p.dtype == DType::fp32 ? x * (1 + (c % 2 ? 2e-6 : -2e-6)) : x, slot(right, i, c));
                a.o.set(x, sequence.batch, i, h, c);
            }
        }
    });
}

void planted_backward(Attention& a, Bug bug) {
    const Problem& p = a.problem;
    const Precision precision{p.dtype};
    const PackedCall<BackwardArgs> packed = pack(p, a.backward_args());
    const BackwardGold gold(p, a.backward_args());
    const auto len_q = static_cast<std::size_t>(p.len_q), len_kv = static_cast<std::size_t>(p.len_kv);
    const auto dim = static_cast<std::size_t>(p.head_dim), dim_v = static_cast<std::size_t>(p.head_dim_v);
    std::vector<float> dk, dv;
    for_each_planted_head(packed, bug, [&](const Head& head, const Sequence& sequence, std::int64_t h) {
        BackwardHead kernel(head, p.dtype, bug);
        std::vector<float> dq(len_q * dim);
        if (h % p.group() == 0) dk.assign(len_kv * dim, 0), dv.assign(len_kv * dim_v, 0);
        const HeadRows d_o = head_rows(packed.d_o.view, sequence, 0, h);
        for (std::int64_t i = 0; i < p.len_q; ++i)
            kernel.row(i, d_o, lse_rows(packed.dlse.view, sequence, h), dq.data(), dk.data(), dv.data());
        const double scale = p.effective_scale();
        const HeadRows right = head_rows(gold.dq(), sequence, 0, h);
        for (std::int64_t i = 0; i < p.len_q; ++i) {
            const std::int64_t from = bug == Bug::gradient_row_wrong && i == kSickRow ? i - 1 : i;
            for (std::int64_t c = 0; c < p.head_dim; ++c) {
                double x =
                    precision.round(scale * dq[static_cast<std::size_t>(from) * dim + static_cast<std::size_t>(c)]);
                if (bug == Bug::late_dq_noisy && i >= p.len_q - kTile)
                    x = tripled(p.dtype == DType::fp32 ? x * (1 + (c % 2 ? 1e-5 : -1e-5)) : x, slot(right, i, c));
                a.dq.set(x, sequence.batch, i, h, c);
            }
        }
        if (h % p.group() + 1 < p.group()) return;
        const double scale_of_dk = bug == Bug::scale_twice_in_dk ? scale * scale : scale;
        for (std::size_t j = 0; j < len_kv; ++j) {
            const auto row = static_cast<std::int64_t>(j);
            for (std::size_t c = 0; c < dim; ++c)
                a.dk.set(precision.round(scale_of_dk * dk[j * dim + c]), sequence.batch, row, h / p.group(),
                         static_cast<std::int64_t>(c));
            for (std::size_t c = 0; c < dim_v; ++c)
                a.dv.set(precision.round(dv[j * dim_v + c]), sequence.batch, row, h / p.group(),
                         static_cast<std::int64_t>(c));
        }
    });
}

}  // namespace tessera::check
