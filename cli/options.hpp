// SPDX-License-Identifier: Apache-2.0
//
// The options that commands share: what to compute and how. Each struct declares its options, keeps their text as it
// came, and turns it into the nouns of the library; all texts are judged here and nowhere else.
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

/// How a dense tensor of rank 4 lies in a file: [batch, len, heads, dim] or [batch, heads, len, dim].
enum class Layout : std::uint8_t { bshd, bhsd };
const char* name_of(Layout layout);
Layout parse_layout(const std::string& text);
DType parse_dtype(const std::string& text);

/// What happens to the scores: mask, scale, softcap, dropout.
struct ScoreOptions {
    std::string causal = "none";
    std::string window;
    std::string scale;
    std::string softcap;
    std::string dropout;
    std::string seed;
    bool seed_makes_inputs = false;  ///< else it is dropout's alone, and refused without

    void declare(CLI::App& command);
    /// Sets the fields of the Problem. `causal` must be a single value by now.
    void apply(Problem& problem) const;
};

/// Shapes and dtype of a Problem without files, and which optional tensors it has.
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

    /// `lists`: several values with commas between them are offered, and make as many Problems.
    void declare(CLI::App& command, bool lists);

    /// Lengths, heads and head_dim only.
    void declare_sizes(CLI::App& command);

    /// Every combination of the lists, in the order dtype, head_dim, heads, mask, length. Validated.
    std::vector<Problem> problems(const ScoreOptions& scores) const;

    /// The same for options that must give exactly one.
    Problem problem(const ScoreOptions& scores) const;

    /// Lengths (queries, keys) of the sequences of a ragged batch; empty when dense.
    std::vector<std::pair<std::int64_t, std::int64_t>> sequences() const;

 private:
    std::vector<std::pair<std::int64_t, std::int64_t>> lengths() const;
    std::vector<Problem> shapes() const;
    Problem ragged_shape() const;
    Problem sized(std::int64_t len_of_q, std::int64_t len_of_kv) const;
};

/// Which kernel, and how it runs.
struct HowOptions {
    std::string backend = "auto";
    std::string schedule = "auto";
    std::string tile;
    std::string threads;

    void declare(CLI::App& command, bool lists);
    /// Schedule and tile only.
    void declare_order(CLI::App& command);
    /// `schedule_name`: one of the list in `schedule`.
    PlanOptions plan_options(Pass pass, const std::string& schedule_name) const;
};

/// Which passes a command is about: `--pass NAME`, or `--backward` for `--pass backward`.
struct PassOptions {
    std::string text;  ///< empty when --pass was not given: the forward
    bool backward = false;

    /// `names`: what --pass may be, for --help. `group`: of the options in --help, or the default one.
    void declare(CLI::App& command, const std::string& names, const std::string& backward_description,
                 const char* group = "");
    bool given() const { return backward || !text.empty(); }
    /// Each pass once, in the order of the list; "both" is forward,backward.
    std::vector<Pass> list() const;
    /// For commands with one pass. Throws UsageError for a list and for "both".
    Pass one() const;
};

/// plan(), with errors that name the options of this command. Throws UsageError, or Error(unsupported) and
/// Error(device_unavailable) in one line when this build has nothing of that backend or schedule.
Plan plan_with(const Problem& problem, const PlanOptions& options);

/// plan_on(), with errors that name the options of this command.
PlanOn plan_on_with(const model::Machine& machine, const Problem& problem, const PlanOptions& options,
                    const std::vector<std::pair<std::int64_t, std::int64_t>>& sequences);

/// Throws UsageError naming the option for what Problem::validate() finds.
void validate_options(const Problem& problem);

/// "--window" for "window_left"; empty for an argument that no option sets.
std::string option_of(const std::string& argument);

}  // namespace tessera::cli
