// SPDX-License-Identifier: Apache-2.0
#include "core/checks.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <initializer_list>
#include <span>

#include "core/batch.hpp"
#include "tessera/error.hpp"

namespace tessera {
namespace {

/// Up to kMaxRank sizes: nothing here allocates, since every call comes through.
class Shape {
 public:
    Shape(std::initializer_list<std::int64_t> sizes) : Shape(std::span(sizes.begin(), sizes.size())) {}
    explicit Shape(std::span<const std::int64_t> sizes) : rank_(sizes.size()) {
        std::copy(sizes.begin(), sizes.end(), sizes_.begin());
    }
    const std::int64_t* begin() const { return sizes_.data(); }
    const std::int64_t* end() const { return begin() + rank_; }
    std::size_t size() const { return rank_; }
    std::int64_t operator[](std::size_t d) const { return sizes_[d]; }

 private:
    std::array<std::int64_t, TensorView::kMaxRank> sizes_{};
    std::size_t rank_;
};

struct Named {
    const char* name;
    const TensorView* view;
};

/// The tensors of a list that were given: at most four.
class Given {
 public:
    explicit Given(std::initializer_list<Named> all) {
        for (const Named& named : all) {
            if (named.view->given()) list_[size_++] = named;
        }
    }
    operator std::span<const Named>() const { return {list_.data(), size_}; }

 private:
    std::array<Named, 4> list_{};
    std::size_t size_ = 0;
};

[[noreturn]] void invalid(const char* name, const std::string& message) {
    throw Error(ErrorCode::invalid_argument, name, message);
}

std::span<const std::int64_t> shape_of(const TensorView& t) {
    return std::span(t.shape).first(static_cast<std::size_t>(std::clamp(t.rank, 0, TensorView::kMaxRank)));
}

/// Do all elements lie within a distance that int64 can hold? Strides come from the caller: nothing is sure of them.
bool within_reach(const TensorView& t) {
    double elements = 1;
    for (std::size_t d = 0; d < shape_of(t).size(); ++d) {
        const auto steps = static_cast<double>(std::max<std::int64_t>(t.shape[d] - 1, 0));
        elements += steps * std::abs(static_cast<double>(t.strides[d]));
    }
    return elements * static_cast<double>(size_of(t.dtype)) <= 0x1p61;
}

std::string place_of(const Device& device) {
    return device.type == DeviceType::cpu ? "in host memory" : fmt::format("on CUDA device {}", device.index);
}

/// There is one host memory: its index says nothing.
bool same_memory(const Device& a, const Device& b) {
    return a.type == b.type && (a.type == DeviceType::cpu || a.index == b.index);
}

void expect_devices(std::span<const Named> tensors, const Device& device) {
    for (const auto& [name, view] : tensors) {
        if (!view->given() || same_memory(view->device, device)) continue;
        invalid(name, fmt::format("expected a tensor {}, got one {}", place_of(device), place_of(view->device)));
    }
}

/// The dtype is known to be right: without it there is no telling what is aligned.
void expect_memory(const char* name, const TensorView& t) {
    if (t.size() > 0 && t.data == nullptr) invalid(name, "expected an address, got null for " + t.describe());
    if (reinterpret_cast<std::uintptr_t>(t.data) % static_cast<std::uintptr_t>(size_of(t.dtype)) != 0) {
        invalid(name, fmt::format("expected an address aligned to its {} bytes per element, got {}", size_of(t.dtype),
                                  static_cast<const void*>(t.data)));
    }
    if (!within_reach(t)) invalid(name, "expected elements within 2^61 bytes of each other, got " + t.describe());
}

void expect_shape(const char* name, const TensorView& t, const Shape& expected) {
    if (!t.given()) invalid(name, fmt::format("expected a tensor [{}], got nothing", fmt::join(expected, ", ")));
    const auto shape = shape_of(t);
    const bool same =
        t.rank == static_cast<int>(expected.size()) && std::equal(shape.begin(), shape.end(), expected.begin());
    if (!same) {
        invalid(name, fmt::format("expected shape [{}], got [{}] of rank {}", fmt::join(expected, ", "),
                                  fmt::join(shape, ", "), t.rank));
    }
}

void expect_dtype(const char* name, const TensorView& t, DType expected) {
    if (t.dtype != expected) {
        invalid(name, fmt::format("expected dtype {}, got {}", name_of(expected), name_of(t.dtype)));
    }
}

/// [batch, len, heads, dim], or [total, heads, dim] when ragged.
void check_rows(const Problem& p, const char* name, const TensorView& t, bool of_queries, std::int64_t dim,
                DType dtype) {
    const std::int64_t heads = of_queries ? p.heads_q : p.heads_kv;
    const Shape expected = p.ragged ? Shape{of_queries ? p.total_q : p.total_kv, heads, dim}
                                    : Shape{p.batch, of_queries ? p.len_q : p.len_kv, heads, dim};
    expect_shape(name, t, expected);
    expect_dtype(name, t, dtype);
    expect_memory(name, t);
}

/// q, k, v, o and gradients: the Problem's dtype.
void check_rows(const Problem& p, const char* name, const TensorView& t, bool of_queries, std::int64_t dim) {
    check_rows(p, name, t, of_queries, dim, p.dtype);
}

void check_lse(const Problem& p, const char* name, const TensorView& t) {
    expect_shape(name, t, p.ragged ? Shape{p.heads_q, p.total_q} : Shape{p.batch, p.heads_q, p.len_q});
    if (p.dtype != DType::fp64 || t.dtype != DType::fp64) expect_dtype(name, t, DType::fp32);
    expect_memory(name, t);
}

/// int8, in the shape of o.
void check_o_residual(const Problem& p, const TensorView& t) {
    if (!t.given()) return;
    if (!is_16_bit(p.dtype)) {
        invalid("o_residual", fmt::format("expected nothing, since O in {} is not rounded to 16 bits, got {}",
                                          name_of(p.dtype), t.describe()));
    }
    check_rows(p, "o_residual", t, true, p.head_dim_v, DType::int8);
}

void check_bias_like(const Problem& p, const char* name, const TensorView& t) {
    const Shape full{p.batch, p.heads_q, p.len_q, p.len_kv};
    const auto shape = shape_of(t);
    bool fits = t.rank == 4;
    for (std::size_t d = 0; fits && d < full.size(); ++d) fits = shape[d] == full[d] || shape[d] == 1;
    if (!fits) {
        invalid(name, fmt::format("expected [{}], any size also 1, got {}", fmt::join(full, ", "),
                                  t.given() ? fmt::format("[{}]", fmt::join(shape, ", ")) : "nothing"));
    }
    if (t.dtype != DType::fp32 && t.dtype != p.dtype) {
        const std::string own = p.dtype == DType::fp32 ? "" : fmt::format(" or {}", name_of(p.dtype));
        invalid(name, fmt::format("expected dtype fp32{}, got {}", own, name_of(t.dtype)));
    }
    expect_memory(name, t);
}

void expect_absent(const char* name, const TensorView& t, const char* field) {
    if (t.given())
        invalid(name, fmt::format("expected nothing, since problem.{} is not set, got {}", field, t.describe()));
}

void check_alibi(const Problem& p, const TensorView& t) {
    if (!p.alibi) return expect_absent("alibi_slopes", t, "alibi");
    expect_shape("alibi_slopes", t, t.rank == 2 ? Shape{p.batch, p.heads_q} : Shape{p.heads_q});
    expect_dtype("alibi_slopes", t, DType::fp32);
    expect_memory("alibi_slopes", t);
}

/// From 0 to the total, never falling, and no sequence longer than the bound that the Problem states. Values on a CUDA
/// device are left to the kernels: to read them would be to wait for the device.
void check_cu_seqlens(const Problem& p, const char* name, const TensorView& t, std::int64_t total,
                      std::int64_t longest) {
    if (!p.ragged) return expect_absent(name, t, "ragged");
    expect_shape(name, t, {p.batch + 1});
    if (t.dtype != DType::int32 && t.dtype != DType::int64) {
        invalid(name, fmt::format("expected dtype int32 or int64, got {}", name_of(t.dtype)));
    }
    expect_memory(name, t);
    if (t.device.type == DeviceType::cuda) return;
    if (cu_seqlen(t, 0) != 0) invalid(name, fmt::format("expected 0 at index 0, got {}", cu_seqlen(t, 0)));
    for (std::int64_t b = 0; b < p.batch; ++b) {
        const std::int64_t begin = cu_seqlen(t, b);
        const std::int64_t end = cu_seqlen(t, b + 1);
        if (end < begin) {
            invalid(name,
                    fmt::format("expected non-decreasing values, got {} after {} at index {}", end, begin, b + 1));
        }
        if (end > total) {
            invalid(name, fmt::format("expected values up to the total {}, got {} at index {}", total, end, b + 1));
        }
        if (end - begin > longest) {
            invalid(name, fmt::format("expected lengths up to {} (the Problem's bound), got {} at index {}", longest,
                                      end - begin, b + 1));
        }
    }
    if (cu_seqlen(t, p.batch) != total) {
        invalid(name, fmt::format("expected the total {} at index {}, got {}", total, p.batch, cu_seqlen(t, p.batch)));
    }
}

template <class Args>
void check_inputs(const Problem& p, const Args& args) {
    check_rows(p, "q", args.q, true, p.head_dim);
    check_rows(p, "k", args.k, false, p.head_dim);
    check_rows(p, "v", args.v, false, p.head_dim_v);
    if (p.bias) check_bias_like(p, "bias", args.bias);
    else expect_absent("bias", args.bias, "bias");
    check_alibi(p, args.alibi_slopes);
    check_cu_seqlens(p, "cu_seqlens_q", args.cu_seqlens_q, p.total_q, p.len_q);
    check_cu_seqlens(p, "cu_seqlens_kv", args.cu_seqlens_kv, p.total_kv, p.len_kv);
}

/// No output may share memory with itself, with another output or with an input, and no tensor with the workspace.
void check_memory(std::span<const Named> outputs, std::span<const Named> inputs, std::span<const std::byte> workspace) {
    for (std::size_t i = 0; i < outputs.size(); ++i) {
        const auto& [name, view] = outputs[i];
        if (overlaps_itself(*view)) {
            invalid(name, "expected an output whose elements are all distinct, got " + view->describe());
        }
        for (const Named& other : outputs.subspan(i + 1)) {
            if (may_overlap(*view, *other.view)) invalid(other.name, fmt::format("overlaps the output {}", name));
        }
        for (const Named& input : inputs) {
            if (may_overlap(*view, *input.view)) invalid(name, fmt::format("overlaps the input {}", input.name));
        }
    }
    for (const auto& tensors : {inputs, outputs}) {
        for (const auto& [name, view] : tensors) {
            if (may_touch(*view, workspace)) invalid("workspace", fmt::format("overlaps {}", name));
        }
    }
}

}  // namespace

void check_tensors(const Problem& p, const ForwardArgs& args, const Device& device,
                   std::span<const std::byte> workspace) {
    const std::array<Named, 7> inputs{{{"q", &args.q},
                                       {"k", &args.k},
                                       {"v", &args.v},
                                       {"bias", &args.bias},
                                       {"alibi_slopes", &args.alibi_slopes},
                                       {"cu_seqlens_q", &args.cu_seqlens_q},
                                       {"cu_seqlens_kv", &args.cu_seqlens_kv}}};
    const Given outputs{{"o", &args.o}, {"lse", &args.lse}, {"o_residual", &args.o_residual}};
    expect_devices(inputs, device);
    expect_devices(outputs, device);
    check_inputs(p, args);
    check_rows(p, "o", args.o, true, p.head_dim_v);
    if (args.lse.given()) check_lse(p, "lse", args.lse);
    check_o_residual(p, args.o_residual);
    check_memory(outputs, inputs, workspace);
}

void check_tensors(const Problem& p, const BackwardArgs& args, const Device& device,
                   std::span<const std::byte> workspace) {
    const std::array<Named, 12> inputs{{{"q", &args.q},
                                        {"k", &args.k},
                                        {"v", &args.v},
                                        {"o", &args.o},
                                        {"o_residual", &args.o_residual},
                                        {"lse", &args.lse},
                                        {"do", &args.d_o},
                                        {"dlse", &args.dlse},
                                        {"bias", &args.bias},
                                        {"alibi_slopes", &args.alibi_slopes},
                                        {"cu_seqlens_q", &args.cu_seqlens_q},
                                        {"cu_seqlens_kv", &args.cu_seqlens_kv}}};
    const Given outputs{{"dq", &args.dq}, {"dk", &args.dk}, {"dv", &args.dv}, {"dbias", &args.dbias}};
    expect_devices(inputs, device);
    expect_devices(outputs, device);
    check_inputs(p, args);
    check_rows(p, "o", args.o, true, p.head_dim_v);
    check_lse(p, "lse", args.lse);
    check_o_residual(p, args.o_residual);
    check_rows(p, "do", args.d_o, true, p.head_dim_v);
    if (args.dlse.given()) check_lse(p, "dlse", args.dlse);
    if (args.dq.given()) check_rows(p, "dq", args.dq, true, p.head_dim);
    if (args.dk.given()) check_rows(p, "dk", args.dk, false, p.head_dim);
    if (args.dv.given()) check_rows(p, "dv", args.dv, false, p.head_dim_v);
    if (p.bias_gradient) {
        check_bias_like(p, "dbias", args.dbias);
        expect_shape("dbias", args.dbias, Shape(shape_of(args.bias)));
    } else {
        expect_absent("dbias", args.dbias, "bias_gradient");
    }
    check_memory(outputs, inputs, workspace);
}

}  // namespace tessera
