// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "commands.hpp"

namespace tessera::cli {

/// Writes --help. CLI11's own formatter does not wrap descriptions (2.1), or changes a footer (2.5).
class HelpFormatter final : public CLI::FormatterBase {
 public:
    std::string make_help(const CLI::App* app, std::string name, CLI::AppFormatMode mode) const override;
};

/// Formats "Examples:", then the effect and the command of each.
std::string examples_text(const std::vector<Example>& examples);

}  // namespace tessera::cli
