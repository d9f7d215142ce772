// SPDX-License-Identifier: Apache-2.0
//
// One test case: a Problem, how its inputs are filled and how its tensors lie in memory. Case I of seed S is generated
// from (S, I) alone, so that two numbers are enough to reproduce it.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "check/generate.hpp"
#include "tessera/kernel.hpp"
#include "tessera/problem.hpp"

namespace tessera::check {

/// The layout of a case's tensors in memory.
enum class Layout : std::uint8_t {
    bshd,    ///< packed [batch, len, heads, head_dim]
    bhsd,    ///< packed [batch, heads, len, head_dim], seen through strides
    random,  ///< own dimension order, gaps and misalignment per tensor; strides may be negative or (inputs) zero
};

/// How the keys and values of a cache are stored in memory.
enum class CacheLayout : std::uint8_t {
    separate,           ///< K and V one after the other; in a case each in memory of its own, in the case's layout
    side_by_side,       ///< V after K in the last dimension
    heads_first,        ///< as separate, with the rows of a head one after another
    layers,             ///< inside pages of three layers, of which this is the second
    interleaved_pages,  ///< alternating pages of K and of V
};

/// The entries of a bias that are -inf.
enum class BiasHoles : std::uint8_t { none, scattered, prefix, rows };

/// An input that a case may set elements of.
enum class Input : std::uint8_t { q, k, v, d_o, bias, dlse };

/// Sets one element of an input after it was filled, or all elements along a dimension. A finite value over the dtype's
/// largest number becomes that number.
struct SetElements {
    static constexpr std::int64_t all = -1;
    Input input;
    /// In the order of the tensor's dimensions, each modulo the size; `all` sets every index of the dimension.
    std::array<std::int64_t, 4> index;
    double value;
};

struct Case {
    std::string id;  ///< the number of a random case ("17") or the name of a corner case
    std::uint64_t seed = 0;
    Problem problem{};
    std::optional<Tile> tile{};
    int threads = 1;

    Fill q = Fill::normal;
    Fill k = Fill::normal;
    Fill v = Fill::normal;
    Fill d_o = Fill::normal;
    Layout layout = Layout::bshd;
    std::array<bool, 4> expanded{};  ///< random layout: q, k, v, d_o have one dimension of stride 0

    DType bias_dtype = DType::fp32;
    std::array<bool, 4> bias_broadcast{};  ///< batch, heads_q, len_q, len_kv: true if the bias has size 1 there
    BiasHoles bias_holes = BiasHoles::none;
    bool bias_expanded = false;  ///< random layout: the bias has one dimension of stride 0
    bool alibi_per_batch = false;
    bool alibi_both_signs = false;      ///< every second ALiBi slope is negative
    bool sinks_of_all_sizes = false;    ///< sinks of -inf to 330; otherwise N(0, 1)
    std::vector<SetElements> elements;  ///< NaN, infinities and extreme values
    bool lse = true;                    ///< the forward is asked for LSE
    bool dlse = false;                  ///< the backward is given a gradient of LSE
    bool o_residual = false;            ///< kernels that support the residual of O write or read it

    std::vector<std::int64_t> lengths_q;   ///< ragged: one per sequence
    std::vector<std::int64_t> lengths_kv;  ///< likewise; also of a cache, where they may be beyond 0 .. capacity
    std::vector<std::int64_t> padding;     ///< left padding of each sequence of a cache, or empty
    DType cu_seqlens_dtype = DType::int32;
    CacheLayout cache_layout = CacheLayout::separate;  ///< of a cache

    /// Sets ragged lengths, the totals and the bounds.
    void set_lengths(std::vector<std::int64_t> of_q, std::vector<std::int64_t> of_kv);
    /// Turns the keys of a dense case into a cache in slots, or with a page_size in pages, with lengths of its own.
    void set_cache(std::int64_t page_size, std::vector<std::int64_t> lengths,
                   std::vector<std::int64_t> left_padding = {});
    /// Makes the queries of a cache ragged.
    void set_queries(std::vector<std::int64_t> of_q);
    /// Describes the Problem and everything above in one line.
    std::string describe() const;
};

/// Returns case `index` of `seed`: any Problem in the contract that the reference computes quickly.
Case random_case(std::uint64_t seed, std::uint64_t index);

/// The named cases: one per corner of the contract.
std::vector<Case> corner_cases();

/// Returns a random case by number, a corner case by name or one of feature_cases(seed) by id; nullopt if there is
/// none.
std::optional<Case> find_case(std::uint64_t seed, std::string_view id);

/// The command that runs this case on this kernel: "tessera check --kernel cpu.fa2.forward --seed 1 --case 17".
std::string to_command(const Case& which, std::string_view kernel);

}  // namespace tessera::check
