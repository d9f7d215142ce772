// SPDX-License-Identifier: Apache-2.0
//
// The list of the tensors of a call. Checks, the C ABI, device copies, the command line, the case runner and Python
// read it, so a new tensor argument is described in one row (docs/architecture.md, "A new tensor argument").
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <initializer_list>
#include <iterator>
#include <span>
#include <string_view>

#include "tessera/attention.hpp"
#include "tessera/problem.hpp"

namespace tessera {

/// A pass reads a tensor or writes it.
enum class Use : std::uint8_t { input, output };

/// When a call has the tensor.
enum class Need : std::uint8_t {
    always,
    if_wanted,    ///< optional: the caller decides; with an option, only if that is set
    with_option,  ///< exactly when its option of the Problem is set
};

/// The shape of a tensor, dense | ragged. Strides are free.
enum class ShapeRule : std::uint8_t {
    q,              ///< [batch, len_q, heads_q, head_dim]     | [total_q, heads_q, head_dim]
    k,              ///< [batch, len_kv, heads_kv, head_dim]   | [total_kv, heads_kv, head_dim], or a cache
    v,              ///< [batch, len_kv, heads_kv, head_dim_v] | [total_kv, heads_kv, head_dim_v], or a cache
    o,              ///< [batch, len_q, heads_q, head_dim_v]   | [total_q, heads_q, head_dim_v]
    lse,            ///< [batch, heads_q, len_q]               | [heads_q, total_q]
    bias,           ///< [batch, heads_q, len_q, len_kv], any size also 1
    like_bias,      ///< the shape of the call's bias
    alibi_slopes,   ///< [heads_q] or [batch, heads_q]
    per_head,       ///< [heads_q]
    cu_seqlens_q,   ///< [batch + 1], from 0 to total_q
    cu_seqlens_kv,  ///< [batch + 1], from 0 to total_kv
    of_sequences,   ///< [batch]
    page_table,     ///< [batch, len_kv / page_size]
};

/// The element type of a tensor.
enum class DTypeRule : std::uint8_t {
    problem,          ///< that of the Problem
    fp32,             ///< always
    fp32_or_fp64,     ///< fp32; fp64 too when the Problem is fp64
    fp32_or_problem,  ///< fp32 or that of the Problem
    residual,         ///< int8, of a Problem in 16 bits
    index,            ///< int32 or int64
    int32,            ///< always
};

/// A switch of the Problem that says that a tensor is given.
struct TensorOption {
    const char* name = nullptr;              ///< name of the field
    bool Problem::*field = nullptr;          ///< null: `when`, or no option, decides whether the tensor is given
    bool (*when)(const Problem&) = nullptr;  ///< for options that are not one flag

    bool exists() const { return field != nullptr || when != nullptr; }
    bool is_set(const Problem& p) const { return when != nullptr ? when(p) : p.*field; }
};

// clang-format off
/// Every tensor of a forward call, in the order of tessera_forward_args: row(member, name in messages, Use, Need,
/// option, ShapeRule, DTypeRule, what it is). `none` is no option.
#define TESSERA_FORWARD_TENSORS(row)                                                                                  \
    TESSERA_INPUT_TENSORS(row)                                                                                        \
    row(o,             "o",             output, always,      none,          o,             problem,         "Output") \
    row(lse,           "lse",           output, if_wanted,   none,          lse,           fp32_or_fp64,              \
        "Log-sum-exp of the scores")                                                                                  \
    row(o_residual,    "o_residual",    output, if_wanted,   none,          o,             residual,                  \
        "What rounding took off the output")                                                                          \
    row(sinks,         "sinks",         input,  with_option, sinks,         per_head,      fp32,                      \
        "Logits in the sum of the softmax, fp32 [heads]")                                                             \
    row(kv_lengths,    "kv_lengths",    input,  with_option, kv_lengths,    of_sequences,  int32,                     \
        "Keys of each sequence of a cache, int32 [batch]")                                                            \
    row(page_table,    "page_table",    input,  with_option, pages,         page_table,    int32,                     \
        "Pages of each sequence of a cache, int32 [batch, len_kv / page_size]")                                       \
    row(cache_batch_index, "cache_batch_index", input, with_option, cache_batch_index, of_sequences, int32,           \
        "Slot of each sequence in a cache, int32 [batch]")                                                            \
    row(left_padding,  "left_padding",  input,  with_option, left_padding,  of_sequences,  int32,                     \
        "First key of each sequence of a cache that counts, int32 [batch]")

/// Every tensor of a backward call, in the order of tessera_backward_args.
#define TESSERA_BACKWARD_TENSORS(row)                                                                                 \
    TESSERA_INPUT_TENSORS(row)                                                                                        \
    row(o,             "o",             input,  always,      none,          o,             problem,         "Output") \
    row(lse,           "lse",           input,  always,      none,          lse,           fp32_or_fp64,              \
        "Log-sum-exp of the scores")                                                                                  \
    row(d_o,           "do",            input,  always,      none,          o,             problem,                   \
        "Gradient of the output")                                                                                     \
    row(dlse,          "dlse",          input,  if_wanted,   none,          lse,           fp32_or_fp64,              \
        "Gradient of the LSE")                                                                                        \
    row(dq,            "dq",            output, if_wanted,   none,          q,             problem,                   \
        "Gradient of the queries")                                                                                    \
    row(dk,            "dk",            output, if_wanted,   none,          k,             problem,                   \
        "Gradient of the keys")                                                                                       \
    row(dv,            "dv",            output, if_wanted,   none,          v,             problem,                   \
        "Gradient of the values")                                                                                     \
    row(dbias,         "dbias",         output, with_option, bias_gradient, like_bias,     fp32_or_problem,           \
        "Gradient of the bias")                                                                                       \
    row(o_residual,    "o_residual",    input,  if_wanted,   none,          o,             residual,                  \
        "What rounding took off the output")                                                                          \
    row(sinks,         "sinks",         input,  with_option, sinks,         per_head,      fp32,                      \
        "Logits in the sum of the softmax, fp32 [heads]")                                                             \
    row(dsinks,        "dsinks",        output, if_wanted,   sinks,         per_head,      fp32_or_fp64,              \
        "Gradient of the sinks")

/// The inputs of both passes.
#define TESSERA_INPUT_TENSORS(row)                                                                                    \
    row(q,             "q",             input,  always,      none,          q,             problem,        "Queries") \
    row(k,             "k",             input,  always,      none,          k,             problem,        "Keys")    \
    row(v,             "v",             input,  always,      none,          v,             problem,        "Values")  \
    row(bias,          "bias",          input,  with_option, bias,          bias,          fp32_or_problem,           \
        "Additive bias [batch, heads, len_q, len_kv], any size also 1")                                               \
    row(alibi_slopes,  "alibi_slopes",  input,  with_option, alibi,         alibi_slopes,  fp32,                      \
        "ALiBi slopes, fp32 [heads] or [batch, heads]")                                                               \
    row(cu_seqlens_q,  "cu_seqlens_q",  input,  with_option, ragged,        cu_seqlens_q,  index,                     \
        "First rows of the sequences of a ragged batch, int [batch + 1]")                                             \
    row(cu_seqlens_kv, "cu_seqlens_kv", input,  with_option, ragged_kv,     cu_seqlens_kv, index,                     \
        "First rows of their keys, int [batch + 1]")
// clang-format on

/// One row of the list.
template <class Args>
struct TensorArgument {
    const char* name;
    TensorView Args::*view;
    Use use;
    Need need;
    TensorOption option;
    ShapeRule shape;
    DTypeRule dtype;
    const char* about;
};

namespace argument_option {
inline constexpr TensorOption none{};
inline constexpr TensorOption bias{"bias", &Problem::bias};
inline constexpr TensorOption bias_gradient{"bias_gradient", &Problem::bias_gradient};
inline constexpr TensorOption alibi{"alibi", &Problem::alibi};
inline constexpr TensorOption sinks{"sinks", &Problem::sinks};
inline constexpr TensorOption ragged{"ragged", &Problem::ragged};
inline constexpr TensorOption ragged_kv{"ragged", nullptr, [](const Problem& p) { return p.ragged && !p.kv_lengths; }};
inline constexpr TensorOption kv_lengths{"kv_lengths", &Problem::kv_lengths};
inline constexpr TensorOption pages{"page_size", nullptr, [](const Problem& p) { return p.page_size > 0; }};
inline constexpr TensorOption cache_batch_index{"cache_batch_index", &Problem::cache_batch_index};
inline constexpr TensorOption left_padding{"left_padding", &Problem::left_padding};
}  // namespace argument_option

template <class Args>
inline constexpr std::array<TensorArgument<Args>, 0> kTensors{};

#define TESSERA_ROW(member, name, use, need, option, shape, dtype, about) \
    {name, &Rows::member, Use::use, Need::need, argument_option::option, ShapeRule::shape, DTypeRule::dtype, about},
template <>
inline constexpr auto kTensors<ForwardArgs> = [] {
    using Rows = ForwardArgs;
    return std::to_array<TensorArgument<Rows>>({TESSERA_FORWARD_TENSORS(TESSERA_ROW)});
}();
template <>
inline constexpr auto kTensors<BackwardArgs> = [] {
    using Rows = BackwardArgs;
    return std::to_array<TensorArgument<Rows>>({TESSERA_BACKWARD_TENSORS(TESSERA_ROW)});
}();
#undef TESSERA_ROW

static_assert(sizeof(ForwardArgs) == std::size(kTensors<ForwardArgs>) * sizeof(TensorView), "a tensor is not listed");
static_assert(sizeof(BackwardArgs) == std::size(kTensors<BackwardArgs>) * sizeof(TensorView), "a tensor is not listed");

/// Up to kMaxRank sizes, without an allocation: every call comes through the checks.
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
    friend bool operator==(const Shape& a, const Shape& b) {
        return std::equal(a.begin(), a.end(), b.begin(), b.end());
    }

 private:
    std::array<std::int64_t, TensorView::kMaxRank> sizes_{};
    std::size_t rank_;
};

/// The largest shape that a rule allows for a Problem: that of ShapeRule without sizes 1, [heads_q] for ALiBi's slopes.
/// For a cache: a slot, or pages of its own, for each sequence.
Shape full_shape(const Problem& problem, ShapeRule rule);

/// The dtype that a rule prefers for a Problem: int32 for indices, the Problem's own where there is a choice.
DType usual_dtype(const Problem& problem, DTypeRule rule);

/// Does the forward compute this tensor of a backward? That holds for o, lse and o_residual.
constexpr bool is_result(const TensorArgument<BackwardArgs>& argument) {
    for (const TensorArgument<ForwardArgs>& of_forward : kTensors<ForwardArgs>) {
        if (of_forward.use == Use::output && std::string_view(of_forward.name) == argument.name) return true;
    }
    return false;
}

/// The inputs that both passes have, from a call of the other one.
template <class To, class From>
To inputs_of(const From& from) {
    To to;
    for (const TensorArgument<To>& here : kTensors<To>) {
        for (const TensorArgument<From>& there : kTensors<From>) {
            const bool same = std::string_view(here.name) == there.name;
            if (same && here.use == Use::input && there.use == Use::input) to.*here.view = from.*there.view;
        }
    }
    return to;
}

/// The tensors that were given; all others are default-constructed views, whatever the caller left in them. A kernel
/// gets these, and may ask for a null pointer instead of a rank.
template <class Args>
Args only_given(const Args& args) {
    Args result = args;
    for (const TensorArgument<Args>& tensor : kTensors<Args>) {
        if (!(args.*tensor.view).given()) result.*tensor.view = {};
    }
    return result;
}

}  // namespace tessera
