// SPDX-License-Identifier: Apache-2.0
//
// The options that commands share. Each struct declares its options, keeps their text unchanged, and converts it to the
// types of the library. All option texts are checked in these structs only.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "plan_on.hpp"
#include "tessera/plan.hpp"
#include "tessera/problem.hpp"

namespace tessera::cli {

/// The layout of a dense tensor of rank 4 in a file: [batch, len, heads, dim] or [batch, heads, len, dim].
enum class Layout : std::uint8_t { bshd, bhsd };
const char* name_of(Layout layout);
Layout parse_layout(const std::string& text);
DType parse_dtype(const std::string& text);

/// The options of the scores: mask, scale, softcap, dropout.
struct ScoreOptions {
    std::string causal = "none";
    std::string window;
    std::string scale;
    std::string softcap;
    std::string dropout;
    std::string seed;
    bool seed_makes_inputs = false;  ///< else the seed is for dropout only, and refused without it

    void declare(CLI::App& command);
    /// Sets the fields of the Problem. `causal` must be a single value.
    void apply(Problem& problem) const;
};

/// Shapes and dtype of a Problem without files, and its optional tensors.
struct ShapeOptions {
    std::string batch;
    std::string len;
    std::string len_q;
    std::string len_kv;
    std::string heads = "8";
    std::string head_dim = "64";
    std::string dtype = "fp32";
    std::string ragged;
    std::string kv_lengths;
    std::string pages;
    bool alibi = false;
    bool sinks = false;
    bool bias = false;

    /// `lists` allows several values separated by commas, which make several Problems.
    void declare(CLI::App& command, bool lists);

    /// Declares lengths, heads and head_dim only.
    void declare_sizes(CLI::App& command);

    /// Returns every combination of the lists, validated, in the order dtype, head_dim, heads, mask, length.
    std::vector<Problem> problems(const ScoreOptions& scores) const;

    /// Returns the one Problem of options that must give exactly one.
    Problem problem(const ScoreOptions& scores) const;

    /// Returns the lengths (queries, keys) of the sequences of a ragged batch, or of a cache with --kv-lengths; empty
    /// for others.
    std::vector<std::pair<std::int64_t, std::int64_t>> sequences() const;

 private:
    std::vector<std::pair<std::int64_t, std::int64_t>> lengths() const;
    std::vector<Problem> shapes() const;
    Problem ragged_shape() const;
    std::vector<Problem> cache_shapes() const;
    void set_cache(Problem& problem) const;
    Problem sized(std::int64_t len_of_q, std::int64_t len_of_kv) const;
};

/// The choice of the kernel, and its execution.
struct HowOptions {
    std::string backend = "auto";
    std::string schedule = "auto";
    std::string tile;
    std::string threads;

    void declare(CLI::App& command, bool lists);
    /// Declares schedule and tile only.
    void declare_order(CLI::App& command);
    /// `schedule_name` is one of the list in `schedule`.
    PlanOptions plan_options(Pass pass, const std::string& schedule_name) const;
};

/// The passes of a command: `--pass NAME`, or `--backward` for `--pass backward`.
struct PassOptions {
    std::string text;  ///< empty without --pass: the forward
    bool backward = false;

    /// `names` lists the values of --pass for --help. `group` is the options' group in --help.
    void declare(CLI::App& command, const std::string& names, const std::string& backward_description,
                 const char* group = "");
    bool given() const { return backward || !text.empty(); }
    /// Returns each pass once, in the order of the list; "both" is forward,backward.
    std::vector<Pass> list() const;
    /// Returns the pass of a command with one pass. Throws UsageError for a list and for "both".
    Pass one() const;
};

/// Calls plan(); errors name the options of this command. Throws UsageError, or Error(unsupported) and
/// Error(device_unavailable) in one line if this build has nothing of that backend or schedule.
Plan plan_with(const Problem& problem, const PlanOptions& options);

/// Calls plan_on(); errors name the options of this command.
PlanOn plan_on_with(const model::Machine& machine, const Problem& problem, const PlanOptions& options,
                    const std::vector<std::pair<std::int64_t, std::int64_t>>& sequences);

/// Throws UsageError naming the option for any error of Problem::validate().
void validate_options(const Problem& problem);

/// Returns the option of an argument, such as "--window" for "window_left"; empty if no option sets it.
std::string option_of(const std::string& argument);

}  // namespace tessera::cli
