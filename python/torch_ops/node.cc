// SPDX-License-Identifier: Apache-2.0
#include "node.hpp"

#include <cstdint>
#include <utility>

namespace tessera::torch_ops {
namespace {

constexpr std::uint64_t kMark = std::uint64_t{1} << 52;  // a double holds all integers up to twice this one

/// From the lowest bit: causal 2 bits, heads_first 1, left + 1 and right + 1 of the window 21 each, and 6 for the
/// logarithm of the elements of q times keys from which on the residual of O is kept.
struct Code {
    Settings settings;
    std::uint64_t least_for_residual = 0;

    Code(double code, std::optional<double> scale) {
        if (!(code >= static_cast<double>(kMark) && code < 2 * static_cast<double>(kMark))) {
            invalid("dropout_p", "expected tessera's settings: this operator is tessera's on this device");
        }
        auto bits = static_cast<std::uint64_t>(code) - kMark;
        const auto next = [&](int count) {
            const auto value = static_cast<std::int64_t>(bits & ((std::uint64_t{1} << count) - 1));
            bits >>= count;
            return value;
        };
        settings.causal = next(2);
        settings.heads_first = next(1) != 0;
        settings.window_left = next(21) - 1;
        settings.window_right = next(21) - 1;
        settings.scale = scale;
        least_for_residual = std::uint64_t{1} << next(6);
    }

    /// Where kernels write and read it: keeps_residual() and pays_residual() of python/tessera/torch/_operators.py.
    bool keeps_residual(const Inputs& in) const {
        if (!in.q.is_cuda() || dtype_of("q", in.q) != DType::bf16 || in.k.dim() != 4) return false;
        const std::int64_t len_kv = in.k.size(settings.heads_first ? 2 : 1);
        return static_cast<std::uint64_t>(in.q.numel() * len_kv) >= least_for_residual;
    }
};

}  // namespace

std::tuple<Tensor, Tensor> node_forward(const Inputs& in, double code, std::optional<double> scale) {
    const Code given(code, scale);
    const bool rest = given.keeps_residual(in);
    Results found = run_forward(in, given.settings, {.rest = rest, .together = rest});
    return {std::move(found.o), *std::move(found.lse)};
}

std::tuple<Tensor, Tensor, Tensor> node_backward(const Tensor& d_o, const Inputs& in, TensorRef o, TensorRef kept,
                                                 double code, std::optional<double> scale) {
    if (!d_o.defined()) return {Tensor(), Tensor(), Tensor()};  // O has no gradient: nor have they
    Gradients found = run_backward(d_o, {}, in, o, kept, {}, Code(code, scale).settings, false);
    return {std::move(found.dq), std::move(found.dk), std::move(found.dv)};
}

}  // namespace tessera::torch_ops
