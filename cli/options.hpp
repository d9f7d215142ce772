// SPDX-License-Identifier: Apache-2.0
//
// Options that several commands share: the problem and how to compute it. Each struct declares its options, keeps their
// text, and parses it into the library's types. No text is parsed elsewhere.
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

/// Options that change the scores: mask, scale, softcap, dropout.
struct ScoreOptions {
    std::string causal = "none";
    std::string window;
    std::string scale;
    std::string softcap;
    std::string dropout;
    std::string seed;
    bool seed_makes_inputs = false;  ///< if false, the seed is for dropout only, and is refused without it

    void declare(CLI::App& command);
    /// Sets the fields of the Problem. `causal` must be a single value at this point.
    void apply(Problem& problem) const;
};

/// Shapes, dtype and optional tensors of a Problem without files.
struct ShapeOptions {
    std::string batch;
    std::string len;
    std::string len_q;
    std::string len_kv;
    std::string heads = "8";
    std::string head_dim = "64";
    std::string dtype = "fp32";
    std::string ragged;
    bool alibi = false;
    bool bias = false;

    /// With `lists`, options take several values joined by commas, which make as many Problems.
    void declare(CLI::App& command, bool lists);

    /// Declares lengths, heads and head_dim only.
    void declare_sizes(CLI::App& command);

    /// Every combination of the lists, in the order dtype, head_dim, heads, mask, length. Validated.
    std::vector<Problem> problems(const ScoreOptions& scores) const;

    /// The only Problem of options that must give exactly one.
    Problem problem(const ScoreOptions& scores) const;

    /// The lengths (queries, keys) of the sequences of a ragged batch; empty if it is dense.
    std::vector<std::pair<std::int64_t, std::int64_t>> sequences() const;

 private:
    std::vector<std::pair<std::int64_t, std::int64_t>> lengths() const;
    std::vector<Problem> shapes() const;
    Problem ragged_shape() const;
    Problem sized(std::int64_t len_of_q, std::int64_t len_of_kv) const;
};

/// Options that choose the kernel and how it runs.
struct HowOptions {
    std::string backend = "auto";
    std::string schedule = "auto";
    std::string tile;
    std::string threads;

    void declare(CLI::App& command, bool lists);
    /// Declares schedule and tile only.
    void declare_order(CLI::App& command);
    /// `schedule_name` is one from the list in `schedule`.
    PlanOptions plan_options(Pass pass, const std::string& schedule_name) const;
};

/// The passes of a command: `--pass NAME`, or `--backward` for `--pass backward`.
struct PassOptions {
    std::string text;  ///< empty without --pass, which means the forward
    bool backward = false;

    /// `names` are the values of --pass for --help. `group` is the options' group in --help; empty: the default one.
    void declare(CLI::App& command, const std::string& names, const std::string& backward_description,
                 const char* group = "");
    bool given() const { return backward || !text.empty(); }
    /// Each pass once, in the order of the list; "both" means forward,backward.
    std::vector<Pass> list() const;
    /// The pass of a command that takes only one. Throws UsageError for a list and for "both".
    Pass one() const;
};

/// Calls plan(), with errors that name the options of this command. Throws UsageError. Throws Error(unsupported) or
/// Error(device_unavailable) with one line if this build lacks the backend or schedule.
Plan plan_with(const Problem& problem, const PlanOptions& options);

/// Calls plan_on(), with errors that name the options of this command.
PlanOn plan_on_with(const model::Machine& machine, const Problem& problem, const PlanOptions& options,
                    const std::vector<std::pair<std::int64_t, std::int64_t>>& sequences);

/// Throws UsageError naming the option for any error of Problem::validate().
void validate_options(const Problem& problem);

/// Maps "window_left" to "--window"; empty for an argument that no option sets.
std::string option_of(const std::string& argument);

}  // namespace tessera::cli
