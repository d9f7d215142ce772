// SPDX-License-Identifier: Apache-2.0
//
// Inputs with a mean, on which delta = rowsum(dO * O) with a rounded O fails, and gradients against the unfused
// computation with no allowance (docs/decisions/delta-of-rounded-output.md).
#pragma once

#include <cmath>
#include <functional>
#include <numeric>
#include <string>

#include "check/unfused.hpp"
#include "kernels/support.hpp"

namespace tessera::check::rounded_output {

inline constexpr DType kRoundedTypes[] = {DType::bf16, DType::fp16};

inline void change(Tensor& t, const std::function<double(double)>& to) {
    for_each_element(t.view, [&](std::int64_t, std::byte* element) {
        store_from_double(element, t.view.dtype, to(load_as_double(element, t.view.dtype)));
    });
}

inline void shift(Tensor& t, double mean, double deviation = 1) {
    change(t, [&](double x) { return mean + deviation * x; });
}

/// Subtracts its mean from each row. A gradient that came through a normalisation is like that.
inline void remove_row_means(Tensor& t, std::int64_t columns) {
    double* row = nullptr;
    Packed copy = packed_copy(t.view);
    for (std::size_t at = 0; at < copy.data.size(); ++at) {
        if (static_cast<std::int64_t>(at) % columns != 0) continue;
        row = &copy.data[at];
        const double mean = std::accumulate(row, row + columns, 0.0) / static_cast<double>(columns);
        for (std::int64_t c = 0; c < columns; ++c) row[c] -= mean;
    }
    for_each_element(t.view, [&](std::int64_t flat, std::byte* element) {
        store_from_double(element, t.view.dtype, copy.data[static_cast<std::size_t>(flat)]);
    });
}

struct Inputs {
    const char* name;
    std::function<void(Attention&)> make;
};

inline const Inputs kInputs[] = {
    {"K and V about 1", [](Attention& a) { shift(a.k, 1), shift(a.v, 1); }},
    {"all uniform",
     [](Attention& a) {
         std::uint64_t seed = 100;
         for (Tensor* t : {&a.q, &a.k, &a.v, &a.d_o}) {
             const Random random(++seed);
             std::uint64_t index = 0;
             change(*t, [&](double) { return random.uniform(index++); });
         }
     }},
    {"V 3 +- 0.1, dO orthogonal to its mean",
     [](Attention& a) { shift(a.v, 3, 0.1), remove_row_means(a.d_o, a.problem.head_dim_v); }},
};

inline Attention make_attention(const std::string& feature, DType dtype) {
    Problem p = make_problem(1, 70, 300, 2, feature == "grouped" ? 1 : 2, 32, dtype);
    if (feature == "causal") p.mask.causal = Causal::bottom_right;
    if (feature == "window") p.mask = {.window_left = 40, .window_right = 3};
    if (feature == "dropout") p.dropout = {.probability = 0.2, .seed = 7};
    if (feature == "softcap") p.softcap = 3;
    if (feature == "bias") p.bias = p.bias_gradient = true;
    if (feature == "short") p.len_kv = 5;
    if (feature != "ragged") return Attention(p);
    return Attention(make_ragged({33, 0, 70}, {200, 9, 65}, 2, 2, 32, dtype), 1, {33, 0, 70}, {200, 9, 65});
}

/// "plain", "causal" and so on, with the inputs' values.
inline Attention make_call(const std::string& feature, DType dtype, const Inputs& inputs) {
    Attention a = make_attention(feature, dtype);
    inputs.make(a);
    if (feature == "dlse") {
        a.dlse = a.lse;
        fill(a.dlse.view, Fill::normal, 9);
    }
    if (a.problem.bias) {
        a.bias = Tensor(dtype, {1, 2, 70, 300});
        fill(a.bias.view, Fill::normal, 8);
        a.dbias = a.bias;
    }
    return a;
}

struct Errors {
    double rmse = 0;
    double largest = 0;
};

inline Errors errors_of(const TensorView& got, const TensorView& right) {
    Errors e;
    const auto* values = static_cast<const double*>(right.data);
    for_each_element(got, [&](std::int64_t flat, const std::byte* element) {
        const double error = std::abs(load_as_double(element, got.dtype) - values[flat]);
        e.rmse += error * error;
        e.largest = std::max(e.largest, error);
    });
    e.rmse = std::sqrt(e.rmse / static_cast<double>(got.size()));
    return e;
}

/// The gradients of a finished call keep to docs/numerics.md, with no allowance.
class UnfusedRatios {
 public:
    explicit UnfusedRatios(const Attention& a)
        : right_(a.problem, a.backward_args()),
          dq_("dq", a.q.view),
          dk_("dk", a.k.view),
          dv_("dv", a.v.view),
          dbias_("dbias", a.dbias.view) {
        const PackedCall<BackwardArgs> packed = pack(a.problem, a.backward_args());
        add_unfused(packed, a.problem.dtype, {&dq_, &dk_, &dv_, a.dbias.view.given() ? &dbias_ : nullptr});
    }

    void expect_kept(const Attention& a) const {
        expect("dq", a.dq.view, right_.dq(), dq_);
        expect("dk", a.dk.view, right_.dk(), dk_);
        expect("dv", a.dv.view, right_.dv(), dv_);
        if (a.dbias.view.given() && a.dbias.view.dtype == a.problem.dtype) {
            expect("dbias", a.dbias.view, right_.dbias(), dbias_);
        }
    }

 private:
    static void expect(const char* name, const TensorView& got, const TensorView& right, const TensorGold& gold) {
        const Errors of_kernel = errors_of(got, right);
        const Errors of_unfused = errors_of(gold.unfused.view, right);
        EXPECT_LE(of_kernel.rmse, 1.1 * of_unfused.rmse) << name;
        EXPECT_LE(of_kernel.largest, 1.75 * of_unfused.largest) << name;  // of thousands of numbers, 1.65 was seen
    }

    BackwardGold right_;
    TensorGold dq_, dk_, dv_, dbias_;
};

}  // namespace tessera::check::rounded_output
