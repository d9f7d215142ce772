// SPDX-License-Identifier: Apache-2.0
//
// The manual page (man tessera), from the texts of --help.
#include <fmt/format.h>

#include <string_view>

#include "completion.hpp"
#include "exit_codes.hpp"

namespace tessera::cli {
namespace {

/// A text in roff: its own escapes, and no line that begins as a request.
std::string roff(std::string_view text) {
    std::string result;
    bool at_start = true;
    for (const char c : text) {
        if (at_start && (c == '.' || c == '\'')) result += "\\&";
        if (c == '\\') result += "\\e";
        else if (c == '-') result += "\\-";
        else result += c;
        at_start = c == '\n';
    }
    return result;
}

std::string entry_of(const std::string& name, const std::string& description) {
    return fmt::format(".TP\n.B {}\n{}\n", roff(name), roff(description));
}

std::string name_of_option(const CLI::Option& option) {
    if (option.get_positional()) return option.get_name(true, false);
    std::string text = option.get_name(false, true);
    if (option.get_items_expected_max() > 0) text += " " + option.get_type_name();
    return text;
}

/// The examples of a footer, whose lines keep their breaks.
std::string examples_of(const CLI::App& app) {
    std::string footer = app.get_footer();
    while (footer.ends_with('\n')) footer.pop_back();
    return footer.empty() ? "" : ".PP\n.nf\n" + roff(footer) + "\n.fi\n";
}

std::string section_of(const CLI::App& command) {
    std::string text = fmt::format(".SS tessera {}\n{}.\n", roff(command.get_name()), roff(command.get_description()));
    for (const std::string& alias : command.get_aliases()) text += fmt::format(".PP\nAlso: tessera {}\n", roff(alias));
    for (const CLI::Option* option : command.get_options())
        text += entry_of(name_of_option(*option), option->get_description());
    return text + examples_of(command);
}

}  // namespace

std::string manual_text(const CLI::App& app, const std::string& version) {
    std::string text = fmt::format(".TH TESSERA 1 \"\" \"tessera {}\" \"User Commands\"\n", roff(version));
    text += fmt::format(
        ".SH NAME\ntessera \\- exact attention by tiles\n"
        ".SH SYNOPSIS\n.B tessera\n.I COMMAND\n[\\fIOPTIONS\\fR]\n"
        ".SH DESCRIPTION\n{}\n",
        roff(app.get_description()));
    for (const CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; }))
        text += entry_of(command->get_name(), command->get_description());
    text += examples_of(app);
    text += ".SH COMMANDS\n";
    for (const CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; }))
        text += section_of(*command);
    text += ".SH EXIT STATUS\n";
    for (const ExitMeaning& exit : kExitMeanings) text += entry_of(exit.code, exit.meaning);
    text += ".SH ENVIRONMENT\n" + entry_of("TESSERA_MAX_ISA",
                                           "Keeps the CPU kernels to an instruction set: SSE4, AVX2, "
                                           "AVX3 (AVX-512), AVX512-BF16 or AMX");
    return text;
}

}  // namespace tessera::cli
