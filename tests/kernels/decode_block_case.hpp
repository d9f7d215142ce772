// SPDX-License-Identifier: Apache-2.0
//
// A call of decode_block() with its tensors, for tests: weights and rows at random, and a cache whose unused rows and
// table entries hold poison.
#pragma once

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "core/decode_block_tensors.hpp"
#include "core/tensors.hpp"
#include "device/device_copy.hpp"
#include "device/memory.hpp"
#include "tessera/decode_block.hpp"

namespace tessera::decode_block_case {

using test::Tensor;

/// The tensors of a call. `lengths`: keys of each sequence before the call.
struct Block {
    DecodeBlockProblem problem{};
    std::vector<std::int32_t> lengths{};
    std::vector<std::int32_t> padding{};
    bool with_positions = false;  ///< positions that are not the lengths
    bool with_residual = false;   ///< one that is not x
    std::uint64_t seed = 1;

    Tensor x{}, norm{}, w_qkv{}, b_qkv{}, q_norm{}, k_norm{}, cos{}, sin{}, positions{}, k_cache{}, v_cache{};
    Tensor kv_lengths{}, table{}, slots{}, left{}, sinks{}, w_o{}, b_o{}, residual{}, out{}, o{}, lse{};

    std::int64_t batch() const { return problem.batch; }
    std::int32_t length(std::int64_t b) const { return lengths[static_cast<std::size_t>(b)]; }
    /// Keys that the query of a sequence may see: [first(b), end(b)).
    std::int64_t end(std::int64_t b) const {
        return std::clamp<std::int64_t>(std::int64_t{length(b)} + 1, 0, problem.capacity);
    }
    std::int64_t first(std::int64_t b) const {
        const std::int64_t from = problem.left_padding ? padding[static_cast<std::size_t>(b)] : 0;
        const std::int64_t window = problem.window_left;
        const std::int64_t keys_from = std::clamp<std::int64_t>(from, 0, end(b));
        return window == unbounded ? keys_from : std::max(keys_from, end(b) - 1 - window);
    }
    bool writes(std::int64_t b) const { return length(b) >= 0 && length(b) < problem.capacity; }
    std::int64_t position(std::int64_t b) const {
        return with_positions ? static_cast<std::int64_t>(*positions.view().at<std::int64_t>(b)) : length(b);
    }
    /// Key `row` of sequence b in the cache: its page or slot, and the row there.
    std::pair<std::int64_t, std::int64_t> place(std::int64_t b, std::int64_t row) const {
        const DecodeBlockProblem& p = problem;
        if (p.page_size > 0) return {*table.view().at<std::int32_t>(b, row / p.page_size), row % p.page_size};
        return {p.cache_batch_index ? *slots.view().at<std::int32_t>(b) : b, row};
    }

    void make() {
        const DecodeBlockProblem& p = problem;
        std::mt19937_64 random(seed);
        const auto normal = [&](Tensor& t, DType dtype, std::initializer_list<std::int64_t> shape, double deviation,
                                double mean = 0) {
            t = Tensor(dtype, shape);
            std::normal_distribution<double> numbers(mean, deviation);
            for (std::int64_t i = 0; i < t.view().size(); ++i)
                store_from_double(t.bytes().data() + i * size_of(dtype), dtype, numbers(random));
        };
        const std::int64_t columns = p.heads_q * p.head_dim, hidden = p.hidden;
        normal(x, p.dtype, {p.batch, hidden}, 2);
        normal(norm, p.dtype, {hidden}, 0.2, 1);
        normal(w_qkv, p.weights_dtype, {p.qkv_rows(), hidden}, 1 / std::sqrt(static_cast<double>(hidden)));
        normal(w_o, p.weights_dtype, {hidden, columns}, 1 / std::sqrt(static_cast<double>(columns)));
        if (p.qkv_bias) normal(b_qkv, p.weights_dtype, {p.qkv_rows()}, 0.5);
        if (p.out_bias) normal(b_o, p.weights_dtype, {hidden}, 0.5);
        if (p.qk_norm) normal(q_norm, p.dtype, {p.head_dim}, 0.2, 1), normal(k_norm, DType::fp32, {p.head_dim}, 0.2, 1);
        if (p.sinks) normal(sinks, DType::fp32, {p.heads_q}, 1);
        if (with_residual) normal(residual, p.dtype, {p.batch, hidden}, 2);
        make_rotary(random);
        make_cache(random);
        clear_outputs();
    }

    void clear_outputs() {
        const DecodeBlockProblem& p = problem;
        out = Tensor(p.dtype, {p.batch, p.hidden});
        o = Tensor(p.dtype, {p.batch, p.heads_q, p.head_dim});
        lse = Tensor(DType::fp32, {p.batch, p.heads_q});
        for (Tensor* t : {&out, &o, &lse}) std::fill(t->bytes().begin(), t->bytes().end(), std::byte{0xFF});
    }

    DecodeBlockArgs args() const {
        return {.x = x,
                .norm = norm,
                .w_qkv = w_qkv,
                .b_qkv = b_qkv,
                .q_norm = q_norm,
                .k_norm = k_norm,
                .rotary_cos = cos,
                .rotary_sin = sin,
                .positions = positions,
                .k_cache = k_cache,
                .v_cache = v_cache,
                .kv_lengths = kv_lengths,
                .page_table = table,
                .cache_batch_index = slots,
                .left_padding = left,
                .sinks = sinks,
                .w_o = w_o,
                .b_o = b_o,
                .residual = residual,
                .out = out,
                .o = o,
                .lse = lse};
    }

 private:
    static Tensor int32s(const std::vector<std::int32_t>& values) {
        Tensor t(DType::int32, {static_cast<std::int64_t>(values.size())});
        std::copy(values.begin(), values.end(), t.view().at<std::int32_t>(0));
        return t;
    }

    void make_rotary(std::mt19937_64& random) {
        if (problem.rotary_dim == 0) return;
        const std::int64_t pairs = problem.rotary_dim / 2;
        std::int64_t rows = problem.capacity;
        if (with_positions) {
            positions = Tensor(DType::int64, {batch()});
            for (std::int64_t b = 0; b < batch(); ++b)
                *positions.view().at<std::int64_t>(b) = static_cast<std::int64_t>(random() % 50);
            rows = 50;
        }
        cos = Tensor(DType::fp32, {rows, pairs});
        sin = Tensor(DType::fp32, {rows, pairs});
        for (std::int64_t p = 0; p < rows; ++p) {
            for (std::int64_t n = 0; n < pairs; ++n) {
                const double angle =
                    static_cast<double>(p) * std::pow(1e4, -static_cast<double>(n) / static_cast<double>(pairs));
                cos.set(std::cos(angle), p, n);
                sin.set(std::sin(angle), p, n);
            }
        }
    }

    void make_cache(std::mt19937_64& random) {
        const DecodeBlockProblem& p = problem;
        kv_lengths = int32s(lengths);
        if (p.left_padding) left = int32s(padding);
        std::int64_t count = p.batch;
        table = slots = Tensor();
        if (p.page_size > 0) {
            const std::int64_t each = p.capacity / p.page_size;
            count = p.batch * each + 2;
            std::vector<std::int32_t> pages(static_cast<std::size_t>(count));
            std::iota(pages.begin(), pages.end(), 0);
            std::shuffle(pages.begin(), pages.end(), random);
            table = Tensor(DType::int32, {p.batch, each});
            for (std::int64_t b = 0; b < p.batch; ++b) {
                for (std::int64_t n = 0; n < each; ++n) {
                    const bool used = n * p.page_size < end(b);
                    const std::int32_t page = pages[static_cast<std::size_t>(b * each + n)];
                    *table.view().at<std::int32_t>(b, n) = used ? page : 0x7FFFFFF0;
                }
            }
        } else if (p.cache_batch_index) {
            count = p.batch + 2;
            std::vector<std::int32_t> of(static_cast<std::size_t>(count));
            std::iota(of.begin(), of.end(), 0);
            std::shuffle(of.begin(), of.end(), random);
            of.resize(static_cast<std::size_t>(p.batch));
            slots = int32s(of);
        }
        const std::int64_t rows = p.page_size > 0 ? p.page_size : p.capacity;
        k_cache = Tensor(p.dtype, {count, rows, p.heads_kv, p.head_dim});
        v_cache = k_cache;
        std::normal_distribution<double> numbers(0, 1);
        for (Tensor* cache : {&k_cache, &v_cache}) {
            std::fill(cache->bytes().begin(), cache->bytes().end(), std::byte{0xFF});  // NaN
            for (std::int64_t b = 0; b < p.batch; ++b) {
                for (std::int64_t row = 0; row < end(b) && row < length(b); ++row) {
                    const auto [at, in] = place(b, row);
                    for (std::int64_t h = 0; h < p.heads_kv; ++h) {
                        // A key has the same numbers in any layout of the cache.
                        std::mt19937_64 of_row(seed * 1'000'003 +
                                               static_cast<std::uint64_t>((b * 100'000 + row) * 64 + h * 2) +
                                               (cache == &v_cache ? 1 : 0));
                        const bool hidden = row < first(b);
                        for (std::int64_t c = 0; c < p.head_dim; ++c)
                            cache->set(hidden ? test::kNan : numbers(of_row), at, in, h, c);
                    }
                }
            }
        }
    }
};

/// Runs the call on the device with a poisoned workspace, and copies the results back.
inline void run(const DecodeBlockPlan& plan, const DecodeBlockArgs& host) {
    if (plan.device.type == DeviceType::cpu) {
        const Workspace workspace(plan.workspace_bytes);
        std::fill(workspace.span().begin(), workspace.span().end(), std::byte{0xFF});
        decode_block(plan, host, workspace.span().first(plan.workspace_bytes));
        return;
    }
    device::DeviceCopy copy(plan.device);
    DecodeBlockArgs there;
    const bool in_x = host.out.data == host.x.data, in_residual = host.out.data == host.residual.data;
    for (const DecodeBlockTensor& t : kDecodeBlockTensors) {
        if (t.view != &DecodeBlockArgs::out || !(in_x || in_residual)) there.*t.view = copy.add(host.*t.view);
    }
    if (in_x || in_residual) there.out = in_x ? there.x : there.residual;
    const std::span<std::byte> workspace = copy.workspace(plan.workspace_bytes);
    if (plan.counter_bytes > 0) device::fill(plan.device, workspace.data(), 0, plan.counter_bytes);
    decode_block(plan, there, workspace);
    copy.copy_back();
}

}  // namespace tessera::decode_block_case
