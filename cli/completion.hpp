// SPDX-License-Identifier: Apache-2.0
//
// Completion of the command's words in a shell, generated from its options.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

namespace tessera::cli {

/// The words of an option for a shell.
struct CompletedOption {
    std::vector<std::string> names;  ///< "--output", "-o"; empty for an argument without a name
    std::string about;               ///< one line
    bool takes_value = false;
    bool file = false;                ///< the value is a file
    std::vector<std::string> values;  ///< the known values; empty: any
};

struct CompletedCommand {
    std::vector<std::string> names;  ///< the name, then its aliases
    std::string about;
    std::vector<CompletedOption> options;
};

/// Reads the options of every subcommand.
std::vector<CompletedCommand> completed_commands(const CLI::App& app);

/// The names of the shells: bash, zsh, fish.
std::vector<std::string> completed_shells();

/// Returns the script for a shell of completed_shells(). The script needs nothing but the shell itself.
std::string completion_script(const std::string& shell, const std::vector<CompletedCommand>& commands);

/// Returns the manual page of the command in roff, from the texts of --help.
std::string manual_text(const CLI::App& app, const std::string& version);

}  // namespace tessera::cli
