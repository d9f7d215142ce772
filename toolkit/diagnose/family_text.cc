// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <string_view>

#include "diagnose/family_tree.hpp"

namespace tessera::diagnose {
namespace {

constexpr std::size_t kWidth = 80;

/// The number of generations above a relative.
std::size_t depth_of(const Relative& relative) {
    for (const Relative& other : relatives()) {
        if (std::string_view(other.name) == relative.parent) return depth_of(other) + 1;
    }
    return 0;
}

/// Wraps `text` at kWidth columns; each line is indented by `margin`, and the second and later ones by `hanging` more.
std::string filled(std::string_view text, std::size_t margin, std::size_t hanging = 0) {
    std::string result;
    std::string line;
    while (!text.empty()) {
        const std::size_t end = text.find(' ');
        const std::string_view word = text.substr(0, end);
        if (!line.empty() && margin + line.size() + 1 + word.size() > kWidth) {
            result += std::string(margin, ' ') + line + "\n";
            line.clear();
            margin += hanging;
            hanging = 0;
        }
        if (!line.empty()) line += ' ';
        line += word;
        text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
    }
    return result + std::string(margin, ' ') + line + "\n";
}

/// Appends a relative's line and then its children, in the order of the table, which is by date.
void add_branch(std::string_view parent, std::string& text) {
    for (const Relative& r : relatives()) {
        if (r.parent != parent) continue;
        const std::size_t margin = 2 * depth_of(r);
        text += filled(fmt::format("- {} ({}, {}): {}", r.name, r.title, r.since, r.step), margin, 4);
        add_branch(r.name, text);
    }
}

std::string cell(std::string_view text) {
    std::string result;
    for (const char c : text) {
        if (c == '|') result += '\\';
        result += c;
    }
    return result;
}

}  // namespace

std::string family_text() {
    std::string text = "Family tree\n\n";
    add_branch("", text);
    text += "\nA kernel name of each, which can be pasted to: tessera which -\n\n";
    for (const Relative& r : relatives()) text += fmt::format("{}\n", r.kernel);
    text += "\nKernels that each library can run\n";
    for (const Chooser& c : choosers()) {
        text += '\n';
        text += filled(fmt::format("{} {}", c.name, c.since), 0) + filled(c.ends_in, 2) + filled(c.how, 2);
    }
    return text;
}

std::string family_markdown() {
    std::string text =
        "# The family of attention kernels\n\n"
        "`tessera which --family` prints this page's data. To ask about one kernel, paste its name into `tessera which "
        "-`. If a\ndate has no month, the month was not looked up.\n\n"
        "## Family tree\n\n```\n";
    add_branch("", text);
    text += "```\n\n| name | since | lives in | a kernel of it |\n|---|---|---|---|\n";
    for (const Relative& r : relatives())
        text += fmt::format("| {} | {} | {} | `{}` |\n", r.name, r.since, cell(r.by), cell(r.kernel));
    text +=
        "\n## Kernels that each library can run\n\n| library | release | kernels | how it chooses | source "
        "|\n|---|---|---|---|---|\n";
    for (const Chooser& c : choosers())
        text += fmt::format("| {} | {} | {} | {} | {} |\n", c.name, cell(c.since), c.ends_in, cell(c.how), c.source);
    return text;
}

}  // namespace tessera::diagnose
