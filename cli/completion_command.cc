// SPDX-License-Identifier: Apache-2.0
//
// tessera completion: the words of the command for a shell. tessera man: the manual page.
#include <algorithm>
#include <memory>

#include "commands.hpp"
#include "commit.hpp"
#include "completion.hpp"
#include "parse.hpp"

namespace tessera::cli {

void add_completion_command(CLI::App& app, Session& session) {
    CLI::App* command =
        add_command(app, session, "completion", "Print the completion of commands, options and values for a shell",
                    {{"source <(tessera completion bash)", "for this session of bash; in ~/.bashrc for all"},
                     {"tessera completion zsh > ~/.zfunc/_tessera", "for zsh, with ~/.zfunc in fpath"},
                     {"tessera completion fish > ~/.config/fish/completions/tessera.fish", "for fish"}});
    auto shell = std::make_shared<std::string>();
    command->add_option("SHELL", *shell, "bash, zsh or fish")->required();
    command->callback([shell, &app, &session] {
        const std::vector<std::string> shells = completed_shells();
        const std::string name = usual_name(*shell);
        if (std::find(shells.begin(), shells.end(), name) == shells.end()) expected_one_of("SHELL", shells, *shell);
        const std::string script = completion_script(name, completed_commands(app));
        if (session.json) session.print_json(Json{{"shell", name}, {"script", script}});
        else session.print(script);
    });
}

void add_man_command(CLI::App& app, Session& session) {
    CLI::App* command = add_command(
        app, session, "man", "Print the manual page, made from the texts of --help",
        {{"tessera man | man -l -", "read it"}, {"tessera man > /usr/local/share/man/man1/tessera.1", "install it"}});
    command->callback([&app, &session] {
        const std::string page = manual_text(app, TESSERA_VERSION);
        if (session.json) session.print_json(Json{{"roff", page}});
        else session.print(page);
    });
}

}  // namespace tessera::cli
