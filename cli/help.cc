// SPDX-License-Identifier: Apache-2.0
//
// Formats --help: usage, a description, options in groups that fit the terminal, examples.
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>

#include "commands.hpp"
#include "help.hpp"
#include "table.hpp"

namespace tessera::cli {
namespace {

constexpr const char* kCommonGroup = "Options";
constexpr std::size_t kNameColumn = 26;  // longer option names get a line of their own

/// Formats "-o,--output FILE".
std::string option_text(const CLI::Option& option) {
    std::string text = option.get_positional() ? option.get_name(true, false) : option.get_name(false, true);
    if (!option.get_positional() && option.get_items_expected_max() > 0) text += " " + option.get_type_name();
    return text;
}

/// Formats one entry: the name at the left, its description wrapped beside it, or below a long name.
std::string entry(const std::string& name, const std::string& description, std::size_t width) {
    std::string text = "  " + name;
    bool beside = name.size() + 4 <= kNameColumn;
    for (const std::string& line : wrapped(description, width - kNameColumn)) {
        if (beside) text = fmt::format("{:<{}}{}", text, kNameColumn, line);
        else text += fmt::format("\n{:{}}{}", "", kNameColumn, line);
        beside = false;
    }
    return text + "\n";
}

std::string options_text(const CLI::App& app, std::size_t width) {
    std::vector<std::string> groups;
    std::string text;
    const auto options = app.get_options();
    for (const CLI::Option* option : options) {
        const std::string& group = option->get_group();
        if (!group.empty() && std::find(groups.begin(), groups.end(), group) == groups.end()) groups.push_back(group);
    }
    // Options of every command come last.
    std::stable_partition(groups.begin(), groups.end(), [](const std::string& group) { return group != kCommonGroup; });
    for (const std::string& group : groups) {
        text += "\n" + group + ":\n";
        for (const CLI::Option* option : options) {
            if (option->get_group() == group) text += entry(option_text(*option), option->get_description(), width);
        }
    }
    return text;
}

std::string usage_text(const CLI::App& app) {
    std::string text = "Usage: ";
    for (const CLI::App* at = app.get_parent(); at != nullptr; at = at->get_parent()) text += at->get_name() + " ";
    text += app.get_name();
    if (!app.get_subcommands([](const CLI::App*) { return true; }).empty()) text += " COMMAND";
    for (const CLI::Option* option : app.get_options()) {
        if (!option->get_positional()) continue;
        text += " " + option->get_name(true, false) + (option->get_expected_max() > 1 ? "..." : "");
    }
    return text + " [OPTIONS]\n\n";
}

}  // namespace

std::string HelpFormatter::make_help(const CLI::App* app, std::string, CLI::AppFormatMode) const {
    const auto width = static_cast<std::size_t>(terminal_width(STDOUT_FILENO));
    std::string text = usage_text(*app);
    for (const std::string& line : wrapped(app->get_description(), width)) text += line + "\n";
    const auto commands = app->get_subcommands([](const CLI::App*) { return true; });
    if (!commands.empty()) text += "\nCommands:\n";
    for (const CLI::App* command : commands) text += entry(command->get_name(), command->get_description(), width);
    text += options_text(*app, width);
    if (!app->get_footer().empty()) text += "\n" + app->get_footer();
    return text;
}

std::string examples_text(const std::vector<Example>& examples) {
    std::string text = "Examples:\n";
    for (const auto& [command, meaning] : examples) text += fmt::format("  # {}\n  {}\n", meaning, command);
    return text;
}

void expect_only(const CLI::App& command, const std::string& mode, const std::vector<std::string>& allowed) {
    for (const CLI::Option* option : command.get_options()) {
        const std::string name = option->get_positional() ? option->get_name(true) : option->get_name(false, false);
        const bool known = name == mode || name == "--json" || name == "--csv" || name == "--help" ||
                           std::find(allowed.begin(), allowed.end(), name) != allowed.end();
        if (!known && option->count() > 0) throw UsageError(name, "has no effect with " + mode + "; leave it out");
    }
}

/// Rejects empty values, which come from unset shell variables and are never intended.
static void expect_no_empty_values(const CLI::App& command) {
    for (const CLI::Option* option : command.get_options()) {
        const auto& values = option->results();
        if (option->count() > 0 && std::find(values.begin(), values.end(), "") != values.end())
            throw UsageError(option->get_name(false, false), "expected a value, got an empty text");
    }
}

CLI::App* add_command(CLI::App& app, Session& session, const std::string& name, const std::string& description,
                      const std::vector<Example>& examples) {
    CLI::App* command = app.add_subcommand(name, description);
    command->set_help_flag("-h,--help", "Print this help and exit")->group(kCommonGroup);
    command->add_flag("--json", session.json, "Print the result as one JSON document")->group(kCommonGroup);
    command->footer(examples_text(examples));
    command->parse_complete_callback([command, name, &session] {
        session.command = name;
        expect_no_empty_values(*command);
        if (session.csv && session.json)
            throw UsageError("--csv", "expected without --json, which is another form of the same answer");
    });
    return command;
}

void add_csv_flag(CLI::App& command, Session& session) {
    command.add_flag("--csv", session.csv, "Print the result as comma-separated values, a line for each row")
        ->group(kCommonGroup);
}

}  // namespace tessera::cli
