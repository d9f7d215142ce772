// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "commands.hpp"

namespace tessera::cli {

/// Writes --help. CLI11's own formatter neither wraps descriptions (2.1) nor leaves a footer as it is (2.5).
class HelpFormatter final : public CLI::FormatterBase {
 public:
    std::string make_help(const CLI::App* app, std::string name, CLI::AppFormatMode mode) const override;
};

/// Returns "Examples:", then for each example its meaning and the command.
std::string examples_text(const std::vector<Example>& examples);

}  // namespace tessera::cli
