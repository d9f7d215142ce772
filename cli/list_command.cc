// SPDX-License-Identifier: Apache-2.0
//
// tessera list: every kernel of this build.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include "commands.hpp"
#include "commit.hpp"
#include "table.hpp"
#include "tessera/kernel.hpp"

namespace tessera::cli {
namespace {

std::vector<std::string> dtype_names(const KernelInfo& kernel) {
    std::vector<std::string> names;
    for (const DType dtype : kernel.dtypes) names.emplace_back(name_of(dtype));
    return names;
}

void print_rows(const Session& session) {
    Json rows = Json::array();
    for (const KernelInfo& kernel : kernels()) {
        rows.push_back({{"name", kernel.name},
                        {"backend", name_of(kernel.backend)},
                        {"schedule", name_of(kernel.schedule)},
                        {"pass", name_of(kernel.pass)},
                        {"dtypes", dtype_names(kernel)},
                        {"summary", kernel.summary},
                        {"limits", kernel.limits}});
    }
    if (session.csv) return session.print_csv(rows);
    session.print_json(Json{{"version", TESSERA_VERSION}, {"commit", TESSERA_COMMIT}, {"kernels", rows}});
}

void print_table(const Session& session) {
    Table table({{"kernel"}, {"dtypes"}, {"what it does"}});
    for (const KernelInfo& kernel : kernels()) {
        const std::string needs = kernel.limits == "none" ? "" : "; needs: " + kernel.limits;
        table.add({kernel.name, fmt::format("{}", fmt::join(dtype_names(kernel), " ")), kernel.summary + needs});
    }
    const int width = terminal_width(STDOUT_FILENO);
    session.print(table.text(width) + "\n");
    for (const char* note :
         {"A kernel refuses a problem that lacks what it needs.",
          "Kernels are listed in order of preference: the first one that takes a problem runs it."}) {
        for (const std::string& line : wrapped(note, static_cast<std::size_t>(width))) session.print(line + "\n");
    }
}

}  // namespace

void add_list_command(CLI::App& app, Session& session) {
    CLI::App* command =
        add_command(app, session, "list", "List every kernel of this build and its limits, in order of preference",
                    {{"tessera list", "as a table"},
                     {"tessera list --json | jq -r '.kernels[].name'", "the names, for a program"}});
    add_csv_flag(*command, session);
    command->callback([&session] { session.json || session.csv ? print_rows(session) : print_table(session); });
}

}  // namespace tessera::cli
