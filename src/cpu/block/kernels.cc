// SPDX-License-Identifier: Apache-2.0
//
// The RMS norm and the two GEMMs of decode_block() on the CPU. Each thread takes some rows of a matrix, which it
// multiplies by all rows of x.
#include "cpu/block/kernels.hpp"

#include <algorithm>
#include <cmath>

#include "core/numeric.hpp"
#include "cpu/simd/isa.hpp"
#include "cpu/simd/row_products.hpp"

namespace tessera::cpu::block {
namespace {

using simd::kProductOutputs, simd::kProductRows;

double element(const TensorView& t, std::int64_t i, std::int64_t j = 0) {
    const std::int64_t offset = i * t.strides[0] + (t.rank > 1 ? j * t.strides[1] : 0);
    return load_as_double(static_cast<const std::byte*>(t.data) + offset * size_of(t.dtype), t.dtype);
}

/// The value after rounding to bf16 or fp32.
float rounded(double value, DType dtype) {
    return dtype == DType::bf16 ? to_float(from_double<Bf16>(value)) : static_cast<float>(value);
}

std::int64_t columns_of_o(const DecodeBlockProblem& p) { return p.heads_q * p.head_dim; }

std::size_t scratch_bytes(const DecodeBlockProblem& p) {
    return static_cast<std::size_t>(p.batch * std::max(p.hidden, columns_of_o(p))) * sizeof(float);
}

/// Row r of x divided by the root of its mean square, times the weights: computed in fp64 and rounded once.
void norm_row(const DecodeBlockCall& call, std::int64_t r, float* out) {
    const DecodeBlockProblem& p = call.problem;
    double squares = 0;
    for (std::int64_t i = 0; i < p.hidden; ++i) {
        const double x = element(call.args.x, r, i);
        squares += x * x;
    }
    const double factor = 1 / std::sqrt(squares / static_cast<double>(p.hidden) + p.norm_eps);
    for (std::int64_t i = 0; i < p.hidden; ++i)
        out[i] = rounded(element(call.args.x, r, i) * factor * element(call.args.norm, i), p.dtype);
}

/// Computes x w^T for x [batch, inputs] and calls store(row, output, sum) for each element.
template <class Store>
void product(const DecodeBlockCall& call, const TensorView& w, const float* x, const Store& store) {
    const std::int64_t outputs = w.shape[0], inputs = w.shape[1], batch = call.problem.batch;
    const simd::MatrixRows matrix{w.data, outputs > 1 ? w.strides[0] : 0, w.dtype};
    const std::int64_t tasks = (outputs + kProductOutputs - 1) / kProductOutputs;
    call.parallel_for(tasks, call.threads, [&](std::int64_t task, int) {
        const std::int64_t first = task * kProductOutputs;
        const std::int64_t count = std::min(kProductOutputs, outputs - first);
        float sums[kProductOutputs * kProductRows];
        for (std::int64_t row = 0; row < batch; row += kProductRows) {
            const std::int64_t rows = std::min(kProductRows, batch - row);
            simd::row_products(matrix, first, count, x + row * inputs, rows, inputs, sums);
            for (std::int64_t o = 0; o < count; ++o) {
                for (std::int64_t r = 0; r < rows; ++r) store(row + r, first + o, sums[o * kProductRows + r]);
            }
        }
    });
}

void store_rounded(const TensorView& t, std::int64_t i, std::int64_t j, float value) {
    auto* const at = static_cast<std::byte*>(t.data) + (i * t.strides[0] + j * t.strides[1]) * size_of(t.dtype);
    store_from_double(at, t.dtype, value);
}

float bias_of(const TensorView& bias, std::int64_t output) {
    return bias.given() ? static_cast<float>(element(bias, output)) : 0.0F;
}

void norm_and_qkv(const DecodeBlockCall& call, const TensorView& qkv, const TensorView&) {
    auto* const normed = reinterpret_cast<float*>(call.scratch.data());
    call.parallel_for(call.problem.batch, call.threads,
                      [&](std::int64_t r, int) { norm_row(call, r, normed + r * call.problem.hidden); });
    product(call, call.args.w_qkv, normed, [&](std::int64_t r, std::int64_t o, float sum) {
        store_rounded(qkv, r, o, sum + bias_of(call.args.b_qkv, o));
    });
}

void output(const DecodeBlockCall& call, const TensorView& o) {
    auto* const x = reinterpret_cast<float*>(call.scratch.data());
    const std::int64_t columns = columns_of_o(call.problem);
    for (std::int64_t i = 0; i < call.problem.batch * columns; ++i) {
        const auto* const at = static_cast<const std::byte*>(o.data) + i * size_of(o.dtype);
        x[i] = static_cast<float>(load_as_double(at, o.dtype));
    }
    product(call, call.args.w_o, x, [&](std::int64_t r, std::int64_t c, float sum) {
        const auto residual = static_cast<float>(element(call.args.residual, r, c));
        store_rounded(call.args.out, r, c, sum + bias_of(call.args.b_o, c) + residual);
    });
}

}  // namespace

const DecodeBlockKernels& kernels() {
    static const DecodeBlockKernels table{
        .refuse = [](const DecodeBlockProblem&, const Device&) { return simd::isa_refusal(); },
        .refuse_tensors = [](const DecodeBlockProblem&, const DecodeBlockArgs&) -> std::optional<TensorRefusal> {
            return std::nullopt;
        },
        .scratch_bytes = scratch_bytes,
        .norm_and_qkv = norm_and_qkv,
        .output = output};
    return table;
}

}  // namespace tessera::cpu::block
