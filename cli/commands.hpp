// SPDX-License-Identifier: Apache-2.0
//
// One function per subcommand, each in the file of its name. It declares the options of its command and the action that
// runs when the command is chosen. `app` and `session` outlive the parse.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <utility>
#include <vector>

#include "session.hpp"

namespace tessera::cli {

void add_run_command(CLI::App& app, Session& session);
void add_check_command(CLI::App& app, Session& session);
void add_bench_command(CLI::App& app, Session& session);
void add_report_command(CLI::App& app, Session& session);
void add_walk_command(CLI::App& app, Session& session);
void add_which_command(CLI::App& app, Session& session);
void add_plan_command(CLI::App& app, Session& session);
void add_roofline_command(CLI::App& app, Session& session);
void add_machine_command(CLI::App& app, Session& session);
void add_calibrate_command(CLI::App& app, Session& session);
void add_list_command(CLI::App& app, Session& session);
void add_gen_command(CLI::App& app, Session& session);
void add_learn_command(CLI::App& app, Session& session);
void add_completion_command(CLI::App& app, Session& session);
void add_man_command(CLI::App& app, Session& session);

/// A command line and its meaning: {"tessera list --json", "the same for programs"}.
using Example = std::pair<std::string, std::string>;

/// Adds a subcommand with --json, and with examples at the end of its --help.
CLI::App* add_command(CLI::App& app, Session& session, const std::string& name, const std::string& description,
                      const std::vector<Example>& examples);

/// Adds --csv to a command whose answer is a table.
void add_csv_flag(CLI::App& command, Session& session);

/// Throws UsageError for every given option that has no effect beside `mode`: all except it and `allowed` (long names).
/// Ignoring an option silently would answer another question.
void expect_only(const CLI::App& command, const std::string& mode, const std::vector<std::string>& allowed);

}  // namespace tessera::cli
