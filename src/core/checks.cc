// SPDX-License-Identifier: Apache-2.0
#include "core/checks.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <span>
#include <string_view>
#include <vector>

#include "core/arguments.hpp"
#include "core/batch.hpp"
#include "core/invalid.hpp"

namespace tessera {
namespace {

struct Named {
    const char* name;
    const TensorView* view;
};

/// Some of the tensors of a call.
class NamedList {
 public:
    void add(const Named& named) { list_[size_++] = named; }
    operator std::span<const Named>() const { return {list_.data(), size_}; }

 private:
    std::array<Named, std::max(std::size(kTensors<BackwardArgs>), std::size(kTensors<ForwardArgs>))> list_{};
    std::size_t size_ = 0;
};

std::span<const std::int64_t> shape_of(const TensorView& t) {
    return std::span(t.shape).first(static_cast<std::size_t>(std::clamp(t.rank, 0, TensorView::kMaxRank)));
}

/// Do all offsets of elements fit in int64? Strides come from the caller and may have any value.
bool within_reach(const TensorView& t) {
    double elements = 1;
    for (std::size_t d = 0; d < shape_of(t).size(); ++d) {
        const auto steps = static_cast<double>(std::max<std::int64_t>(t.shape[d] - 1, 0));
        elements += steps * std::abs(static_cast<double>(t.strides[d]));
    }
    return elements * static_cast<double>(size_of(t.dtype)) <= 0x1p61;
}

std::string text_of_device(const Device& device) {
    return device.type == DeviceType::cpu ? "in host memory" : fmt::format("on CUDA device {}", device.index);
}

/// All host devices are one memory, whatever their index.
bool same_memory(const Device& a, const Device& b) {
    return a.type == b.type && (a.type == DeviceType::cpu || a.index == b.index);
}

void expect_device(const char* name, const TensorView& t, const Device& device) {
    if (same_memory(t.device, device)) return;
    invalid(name, fmt::format("expected a tensor {}, got one {}", text_of_device(device), text_of_device(t.device)));
}

/// Checks the pointer, its alignment and its reach. The dtype must have been checked: the alignment follows from it.
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

/// Is the number of pages, or of slots, of a cache the caller's choice?
bool has_any_slots(const Problem& p) { return p.kv_lengths && (p.page_size > 0 || p.cache_batch_index); }

/// The shape that a rule asks for. If a rule allows two ranks, the tensor's own rank decides.
Shape expected_shape(const Problem& p, ShapeRule rule, const TensorView& t) {
    if (rule == ShapeRule::alibi_slopes && t.rank == 2) return {p.batch, p.heads_q};
    const Shape full = full_shape(p, rule);
    const bool of_keys = rule == ShapeRule::k || rule == ShapeRule::v;
    if (of_keys && has_any_slots(p) && t.rank == 4) return {t.shape[0], full[1], full[2], full[3]};
    return full;
}

/// The full shape, any size also 1.
void expect_bias_shape(const Problem& p, const char* name, const TensorView& t) {
    const Shape full = full_shape(p, ShapeRule::bias);
    const auto shape = shape_of(t);
    bool fits = t.rank == static_cast<int>(full.size());
    for (std::size_t d = 0; fits && d < full.size(); ++d) fits = shape[d] == full[d] || shape[d] == 1;
    if (fits) return;
    invalid(name, fmt::format("expected [{}], any size also 1, got {}", fmt::join(full, ", "),
                              t.given() ? fmt::format("[{}]", fmt::join(shape, ", ")) : "nothing"));
}

void expect_dtype(const Problem& p, const char* name, const TensorView& t, DTypeRule rule) {
    const auto expect = [&](DType expected) { expect_dtype(name, t, expected); };
    switch (rule) {
        case DTypeRule::problem: return expect(p.dtype);
        case DTypeRule::fp32: return expect(DType::fp32);
        case DTypeRule::fp32_or_fp64:
            if (p.dtype != DType::fp64 || t.dtype != DType::fp64) expect(DType::fp32);
            return;
        case DTypeRule::fp32_or_problem:
            if (t.dtype != DType::fp32 && t.dtype != p.dtype) {
                const std::string own = p.dtype == DType::fp32 ? "" : fmt::format(" or {}", name_of(p.dtype));
                invalid(name, fmt::format("expected dtype fp32{}, got {}", own, name_of(t.dtype)));
            }
            return;
        case DTypeRule::residual:
            if (!is_16_bit(p.dtype)) {
                invalid(name, fmt::format("expected nothing, since O in {} is not rounded to 16 bits, got {}",
                                          name_of(p.dtype), t.describe()));
            }
            return expect(DType::int8);
        case DTypeRule::int32: return expect(DType::int32);
        case DTypeRule::index:
            if (t.dtype != DType::int32 && t.dtype != DType::int64) {
                invalid(name, fmt::format("expected dtype int32 or int64, got {}", name_of(t.dtype)));
            }
            return;
    }
}

/// Expects values from 0 up to the total at most that never fall, and no sequence longer than the Problem's bound: rows
/// past the last one belong to no sequence. Values on a CUDA device are left to the kernels, since reading them would
/// wait for the device.
void check_cu_seqlens(const Problem& p, const char* name, const TensorView& t, std::int64_t total,
                      std::int64_t longest) {
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
}

/// Expects that the table names pages of the cache for the keys that the queries of a sequence see. Other entries are
/// not read.
void check_page_table(const Problem& p, const ForwardArgs& args, std::int64_t pages) {
    for (std::int64_t b = 0; b < p.batch; ++b) {
        const Sequence m = sequence_of(p, args, b);
        if (m.len_kv > 0 && pages == 0) {
            invalid("k", fmt::format("expected pages for the {} keys of sequence {}, got none", m.len_kv, b));
        }
        const Range keys = p.mask.bind(m.len_q, m.len_kv).kv_range(0, m.len_q);
        if (keys.empty()) continue;
        const std::int64_t last = (m.first_kv + keys.end - 1) / p.page_size;
        for (std::int64_t at = (m.first_kv + keys.begin) / p.page_size; at <= last; ++at) {
            const std::int32_t page = *args.page_table.at<const std::int32_t>(b, at);
            if (page >= 0 && page < pages) continue;
            invalid("page_table", fmt::format("expected pages from 0 to {} for the keys that sequence {} sees, got {} "
                                              "at [{}, {}]",
                                              pages - 1, b, page, b, at));
        }
    }
}

void check_slots(const Problem& p, const TensorView& slots, std::int64_t count) {
    for (std::int64_t b = 0; b < p.batch; ++b) {
        const std::int32_t slot = *slots.at<const std::int32_t>(b);
        if (slot >= 0 && slot < count) continue;
        invalid("cache_batch_index",
                fmt::format("expected slots from 0 to {}, got {} at index {}", count - 1, slot, b));
    }
}

/// Checks what the shapes of single tensors do not say. Values on a CUDA device are left to the kernels, since reading
/// them would wait for the device.
void check_cache(const Problem& p, const ForwardArgs& args, const Device& device) {
    if (!p.kv_lengths) return;
    const std::int64_t count = args.k.shape[0];
    if (args.v.shape[0] != count) {
        invalid("v", fmt::format("expected {} {}, as k has, got {}", count, p.page_size > 0 ? "pages" : "slots",
                                 args.v.shape[0]));
    }
    if (device.type == DeviceType::cuda) return;
    if (p.cache_batch_index) check_slots(p, args.cache_batch_index, count);
    if (p.page_size > 0) check_page_table(p, args, count);
}
void check_cache(const Problem&, const BackwardArgs&, const Device&) {}

void check_values(const Problem& p, const char* name, const TensorView& t, ShapeRule rule) {
    if (rule == ShapeRule::cu_seqlens_q) check_cu_seqlens(p, name, t, p.total_q, p.len_q);
    if (rule == ShapeRule::cu_seqlens_kv) check_cu_seqlens(p, name, t, p.total_kv, p.len_kv);
}

/// `bias`: the shape that ShapeRule::like_bias requires.
template <class Args>
void check_tensor(const Problem& p, const TensorArgument<Args>& argument, const TensorView& t, const TensorView& bias) {
    const char* name = argument.name;
    if (t.rank < 0) invalid(name, fmt::format("expected rank 0..{}, got {}", TensorView::kMaxRank, t.rank));
    if (argument.need == Need::if_wanted && !t.given()) return;
    if (argument.option.exists() && !argument.option.is_set(p)) {
        if (!t.given()) return;
        invalid(name, fmt::format("expected nothing, since problem.{} is not set, got {}", argument.option.name,
                                  t.describe()));
    }
    const bool of_bias = argument.shape == ShapeRule::bias || argument.shape == ShapeRule::like_bias;
    if (of_bias) expect_bias_shape(p, name, t);
    else expect_shape(name, t, expected_shape(p, argument.shape, t));
    expect_dtype(p, name, t, argument.dtype);
    expect_memory(name, t);
    if (argument.shape == ShapeRule::like_bias) expect_shape(name, t, Shape(shape_of(bias)));
    check_values(p, name, t, argument.shape);
}

/// No output may share memory with itself, with another output or with an input, and no tensor with the workspace.
void check_memory(std::span<const Named> outputs, std::span<const Named> inputs, std::span<const std::byte> workspace) {
    for (std::size_t i = 0; i < outputs.size(); ++i) {
        const auto& [name, view] = outputs[i];
        if (overlaps_itself(*view)) {
            invalid(name, "expected an output whose elements are all distinct, got " + view->describe());
        }
        for (const Named& other : outputs.subspan(i + 1)) {
            if (may_overlap(*view, *other.view))
                invalid(other.name,
                        fmt::format("expected memory of its own, got memory that overlaps the output {}", name));
        }
        for (const Named& input : inputs) {
            if (may_overlap(*view, *input.view))
                invalid(name,
                        fmt::format("expected memory of its own, got memory that overlaps the input {}", input.name));
        }
    }
    for (const auto& tensors : {inputs, outputs}) {
        for (const auto& [name, view] : tensors) {
            if (may_touch(*view, workspace))
                invalid("workspace", fmt::format("expected memory of its own, got memory that overlaps {}", name));
        }
    }
}

template <class Args>
void check_call(const Problem& p, const Args& args, const Device& device, std::span<const std::byte> workspace) {
    NamedList inputs;
    NamedList outputs;
    for (const TensorArgument<Args>& argument : kTensors<Args>) {
        const TensorView& view = args.*argument.view;
        if (!view.given()) continue;
        expect_device(argument.name, view, device);
        (argument.use == Use::input ? inputs : outputs).add({argument.name, &view});
    }
    for (const TensorArgument<Args>& argument : kTensors<Args>) {
        check_tensor(p, argument, args.*argument.view, args.bias);
    }
    check_cache(p, args, device);
    check_memory(outputs, inputs, workspace);
}

}  // namespace

Shape full_shape(const Problem& p, ShapeRule rule) {
    const auto rows = [&](bool of_queries, std::int64_t dim) {
        const std::int64_t heads = of_queries ? p.heads_q : p.heads_kv;
        if (!of_queries && p.page_size > 0) return Shape{p.batch * (p.len_kv / p.page_size), p.page_size, heads, dim};
        if (p.ragged && (of_queries || !p.kv_lengths)) return Shape{of_queries ? p.total_q : p.total_kv, heads, dim};
        return Shape{p.batch, of_queries ? p.len_q : p.len_kv, heads, dim};
    };
    switch (rule) {
        case ShapeRule::q: return rows(true, p.head_dim);
        case ShapeRule::k: return rows(false, p.head_dim);
        case ShapeRule::v: return rows(false, p.head_dim_v);
        case ShapeRule::o: return rows(true, p.head_dim_v);
        case ShapeRule::lse: return p.ragged ? Shape{p.heads_q, p.total_q} : Shape{p.batch, p.heads_q, p.len_q};
        case ShapeRule::bias:
        case ShapeRule::like_bias: return {p.batch, p.heads_q, p.len_q, p.len_kv};
        case ShapeRule::alibi_slopes:
        case ShapeRule::per_head: return {p.heads_q};
        case ShapeRule::cu_seqlens_q:
        case ShapeRule::cu_seqlens_kv: return {p.batch + 1};
        case ShapeRule::of_sequences: return {p.batch};
        case ShapeRule::page_table: return {p.batch, p.page_size > 0 ? p.len_kv / p.page_size : 0};
    }
    return {};
}

DType usual_dtype(const Problem& p, DTypeRule rule) {
    switch (rule) {
        case DTypeRule::problem:
        case DTypeRule::fp32_or_problem: return p.dtype;
        case DTypeRule::fp32: return DType::fp32;
        case DTypeRule::fp32_or_fp64: return p.dtype == DType::fp64 ? DType::fp64 : DType::fp32;
        case DTypeRule::residual: return DType::int8;
        case DTypeRule::index:
        case DTypeRule::int32: return DType::int32;
    }
    return p.dtype;
}

void expect_tensor(const char* name, const TensorView& t, std::span<const std::int64_t> shape,
                   std::span<const DType> dtypes) {
    expect_shape(name, t, Shape(shape));
    if (std::any_of(shape.begin(), shape.end(), [](std::int64_t n) { return n < 0; })) {
        invalid(name, "expected sizes >= 0, got " + t.describe());
    }
    if (std::find(dtypes.begin(), dtypes.end(), t.dtype) == dtypes.end()) {
        std::vector<std::string_view> names;
        for (const DType dtype : dtypes) {
            if (names.empty() || names.back() != name_of(dtype)) names.push_back(name_of(dtype));
        }
        invalid(name, fmt::format("expected dtype {}, got {}", fmt::join(names, " or "), name_of(t.dtype)));
    }
    expect_memory(name, t);
}

void check_tensors(const Problem& p, const ForwardArgs& args, const Device& device,
                   std::span<const std::byte> workspace) {
    check_call(p, args, device, workspace);
}

void check_tensors(const Problem& p, const BackwardArgs& args, const Device& device,
                   std::span<const std::byte> workspace) {
    check_call(p, args, device, workspace);
}

}  // namespace tessera
