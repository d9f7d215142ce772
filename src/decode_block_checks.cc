// SPDX-License-Identifier: Apache-2.0
#include "decode_block_checks.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <initializer_list>
#include <string>

#include "core/checks.hpp"
#include "core/decode_block_tensors.hpp"
#include "core/invalid.hpp"

namespace tessera {
namespace {

using Args = DecodeBlockArgs;

std::string memory_of(const Device& device) {
    return device.type == DeviceType::cpu ? "in host memory" : fmt::format("on CUDA device {}", device.index);
}

class BlockChecks {
 public:
    BlockChecks(const DecodeBlockProblem& problem, const Args& args) : p_(problem), a_(args) {}

    void run(const Device& device, std::span<const std::byte> workspace) const {
        check_devices(device);
        check_rows();
        check_weights();
        check_rotary();
        check_cache();
        check_outputs(workspace);
    }

 private:
    static constexpr TensorView Args::*kOutputs[] = {&Args::k_cache, &Args::v_cache, &Args::out, &Args::o, &Args::lse};

    static bool is_output(TensorView Args::*view) {
        return std::find(std::begin(kOutputs), std::end(kOutputs), view) != std::end(kOutputs);
    }

    void expect(const char* name, const TensorView& t, std::initializer_list<std::int64_t> shape,
                std::initializer_list<DType> dtypes) const {
        expect_tensor(name, t, std::span(shape.begin(), shape.size()), std::span(dtypes.begin(), dtypes.size()));
    }

    /// A tensor that is given exactly when a field of the Problem is set.
    void expect_if(bool is_set, const char* field, const char* name, const TensorView& t,
                   std::initializer_list<std::int64_t> shape, std::initializer_list<DType> dtypes) const {
        if (is_set) return expect(name, t, shape, dtypes);
        if (!t.given()) return;
        invalid(name, fmt::format("expected nothing, since problem.{} is not set, got {}", field, t.describe()));
    }

    void expect_contiguous_rows(const char* name, const TensorView& t) const {
        const auto last = static_cast<std::size_t>(t.rank) - 1;
        if (t.shape[last] <= 1 || t.strides[last] == 1) return;
        invalid(name, "expected contiguous rows (a last stride of 1), got " + t.describe());
    }

    void check_devices(const Device& device) const {
        for (const DecodeBlockTensor& t : kDecodeBlockTensors) {
            const TensorView& view = a_.*t.view;
            if (view.rank < 0) invalid(t.name, fmt::format("expected a rank >= 0, got {}", view.rank));
            if (!view.given()) continue;
            const bool same = view.device.type == device.type &&
                              (device.type == DeviceType::cpu || view.device.index == device.index);
            if (same) continue;
            invalid(t.name, fmt::format("expected a tensor {}, got one {}", memory_of(device), memory_of(view.device)));
        }
    }

    /// Tensors that have the hidden size.
    void check_rows() const {
        expect("x", a_.x, {p_.batch, p_.hidden}, {p_.dtype});
        expect("norm", a_.norm, {p_.hidden}, {DType::fp32, p_.dtype});
        expect("out", a_.out, {p_.batch, p_.hidden}, {p_.dtype});
        if (a_.residual.given()) expect("residual", a_.residual, {p_.batch, p_.hidden}, {p_.dtype});
        for (const auto& [name, t] : {std::pair("x", &a_.x), {"residual", &a_.residual}, {"out", &a_.out}}) {
            if (t->given()) expect_contiguous_rows(name, *t);
        }
    }

    void check_weights() const {
        const std::int64_t columns = p_.heads_q * p_.head_dim;
        expect("w_qkv", a_.w_qkv, {p_.qkv_rows(), p_.hidden}, {p_.weights_dtype});
        expect("w_o", a_.w_o, {p_.hidden, columns}, {p_.weights_dtype});
        expect_contiguous_rows("w_qkv", a_.w_qkv);
        expect_contiguous_rows("w_o", a_.w_o);
        expect_if(p_.qkv_bias, "qkv_bias", "b_qkv", a_.b_qkv, {p_.qkv_rows()}, {p_.weights_dtype});
        expect_if(p_.out_bias, "out_bias", "b_o", a_.b_o, {p_.hidden}, {p_.weights_dtype});
        expect_if(p_.qk_norm, "qk_norm", "q_norm", a_.q_norm, {p_.head_dim}, {DType::fp32, p_.dtype});
        expect_if(p_.qk_norm, "qk_norm", "k_norm", a_.k_norm, {p_.head_dim}, {DType::fp32, p_.dtype});
        expect_if(p_.sinks, "sinks", "sinks", a_.sinks, {p_.heads_q}, {DType::fp32});
    }

    void check_rotary() const {
        const bool rotates = p_.rotary_dim > 0;
        const std::int64_t rows = a_.rotary_cos.shape[0], pairs = p_.rotary_dim / 2;
        expect_if(rotates, "rotary_dim", "rotary_cos", a_.rotary_cos, {rows, pairs}, {DType::fp32, p_.dtype});
        expect_if(rotates, "rotary_dim", "rotary_sin", a_.rotary_sin, {rows, pairs}, {DType::fp32, p_.dtype});
        if (rotates && rows == 0) invalid("rotary_cos", "expected 1 position or more, got 0");
        if (!rotates || a_.positions.given()) {
            expect_if(rotates, "rotary_dim", "positions", a_.positions, {p_.batch}, {DType::int64, DType::int32});
        }
    }

    void check_cache() const {
        const bool pages = p_.page_size > 0;
        const bool any_count = pages || p_.cache_batch_index;
        const std::int64_t count = any_count ? a_.k_cache.shape[0] : p_.batch;
        const std::int64_t rows = pages ? p_.page_size : p_.capacity;
        expect("k_cache", a_.k_cache, {count, rows, p_.heads_kv, p_.head_dim}, {p_.dtype});
        expect("v_cache", a_.v_cache, {count, rows, p_.heads_kv, p_.head_dim}, {p_.dtype});
        if (any_count && count == 0) {
            invalid("k_cache", fmt::format("expected 1 {} or more, got 0", pages ? "page" : "slot"));
        }
        if (count > 0 && may_overlap(row_of(a_.k_cache), row_of(a_.v_cache))) {
            invalid("v_cache", "expected rows that share no memory with those of k_cache, got rows that overlap them");
        }
        expect("kv_lengths", a_.kv_lengths, {p_.batch}, {DType::int32});
        expect_if(pages, "page_size", "page_table", a_.page_table, {p_.batch, pages ? p_.capacity / p_.page_size : 0},
                  {DType::int32});
        expect_if(p_.cache_batch_index, "cache_batch_index", "cache_batch_index", a_.cache_batch_index, {p_.batch},
                  {DType::int32});
        expect_if(p_.left_padding, "left_padding", "left_padding", a_.left_padding, {p_.batch}, {DType::int32});
    }

    /// The first row of a cache: [heads_kv, head_dim].
    static TensorView row_of(const TensorView& cache) {
        TensorView row = cache;
        row.rank = 2;
        row.shape = {cache.shape[2], cache.shape[3]};
        row.strides = {cache.strides[2], cache.strides[3]};
        return row;
    }

    static bool same_memory_as(const TensorView& a, const TensorView& b) {
        return a.data == b.data && a.shape == b.shape && a.strides == b.strides;
    }

    /// May these two overlap? The caches may, if their rows do not, and `out` may be x or the residual.
    bool may_share_memory(TensorView Args::*out, TensorView Args::*other) const {
        const auto is_cache = [](TensorView Args::*view) { return view == &Args::k_cache || view == &Args::v_cache; };
        if (is_cache(out) && is_cache(other)) return true;
        const bool in_place = out == &Args::out && (other == &Args::x || other == &Args::residual);
        return in_place && same_memory_as(a_.out, a_.*other);
    }

    void check_outputs(std::span<const std::byte> workspace) const {
        if (a_.o.given()) {
            expect("o", a_.o, {p_.batch, p_.heads_q, p_.head_dim}, {p_.dtype});
            const bool packed =
                a_.o.strides[0] == p_.heads_q * p_.head_dim && a_.o.strides[1] == p_.head_dim && a_.o.strides[2] == 1;
            if (a_.o.size() > 0 && !packed) invalid("o", "expected a packed tensor, got " + a_.o.describe());
        }
        if (a_.lse.given()) expect("lse", a_.lse, {p_.batch, p_.heads_q}, {DType::fp32});
        for (const DecodeBlockTensor& out : kDecodeBlockTensors) {
            const TensorView& view = a_.*out.view;
            if (!view.given()) continue;
            if (may_touch(view, workspace))
                invalid("workspace", fmt::format("expected memory of its own, got memory that overlaps {}", out.name));
            if (!is_output(out.view)) continue;
            if (overlaps_itself(view)) {
                invalid(out.name, "expected an output whose elements are all distinct, got " + view.describe());
            }
            for (const DecodeBlockTensor& other : kDecodeBlockTensors) {
                const TensorView& met = a_.*other.view;
                if (out.view == other.view || !met.given() || may_share_memory(out.view, other.view)) continue;
                if (may_overlap(view, met))
                    invalid(out.name,
                            fmt::format("expected memory of its own, got memory that overlaps {}", other.name));
            }
        }
    }

    const DecodeBlockProblem& p_;
    const Args& a_;
};

}  // namespace

void check_decode_block(const DecodeBlockProblem& problem, const DecodeBlockArgs& args, const Device& device,
                        std::span<const std::byte> workspace) {
    BlockChecks(problem, args).run(device, workspace);
}

}  // namespace tessera
