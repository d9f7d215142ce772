// SPDX-License-Identifier: Apache-2.0
//
// tessera completion and man: the shells and man themselves are asked, where they are installed.
#include <algorithm>
#include <sstream>

#include "process.hpp"

namespace tessera::completion_test {
namespace {

class CompletionTest : public CommandTest {
 protected:
    static bool installed(const std::string& program) {
        return std::system(fmt::format("command -v {} >/dev/null 2>&1", program).c_str()) == 0;
    }

    /// The words that bash offers after `typed`, whose last word is being typed.
    std::set<std::string> offered(const std::vector<std::string>& typed) const {
        std::string words;
        for (const std::string& word : typed) words += "'" + word + "' ";
        std::ofstream(path("ask.sh")) << fmt::format(
            "source tessera.bash\ncomplete -p tessera >&2 || exit 1\nCOMP_WORDS=({})\nCOMP_CWORD={}\n_tessera\n"
            "printf '%s\\n' \"${{COMPREPLY[@]}}\"\n",
            words, typed.size() - 1);
        EXPECT_EQ(std::system(fmt::format("cd {} && bash ask.sh > offered.txt 2> said.txt", folder().string()).c_str()),
                  0)
            << text_of(path("said.txt"));
        EXPECT_EQ(text_of(path("said.txt")), "complete -F _tessera tessera\n");
        std::istringstream lines(text_of(path("offered.txt")));
        std::set<std::string> result;
        for (std::string line; std::getline(lines, line);)
            if (!line.empty()) result.insert(line);
        return result;
    }
    using Words = std::set<std::string>;
};

TEST_F(CompletionTest, bash_offers_commands_options_and_values) {
    if (!installed("bash")) GTEST_SKIP() << "no bash";
    std::ofstream(path("tessera.bash")) << run_ok("completion bash").out;
    EXPECT_EQ(offered({"tessera", "ro"}), (Words{"roofline"}));
    EXPECT_EQ(offered({"tessera", "roofline", "--dev"}), (Words{"--device"}));
    EXPECT_EQ(offered({"tessera", "roofline", "--device", "h2"}), (Words{"h20", "h200"}));
    EXPECT_EQ(offered({"tessera", "why", "--dtype", "b"}), (Words{"bf16"}));
    EXPECT_EQ(offered({"tessera", "plan", "--pass", "=", "ba"}), (Words{"backward"}));
    EXPECT_EQ(offered({"tessera", "roofline", "--compare", "a100,h2"}), (Words{"a100,h20", "a100,h200"}));
    EXPECT_EQ(offered({"tessera", "completion", ""}), (Words{"bash", "zsh", "fish"}));
    EXPECT_EQ(offered({"tessera", "machine", "rtx4"}), (Words{"rtx4090"}));
    EXPECT_EQ(offered({"tessera", "machine", "h200", "--set", "cor"}), (Words{"cores="}));
    EXPECT_EQ(offered({"tessera", "roofline", "--baseline", "e"}), (Words{"eager", "efficient"}));
    EXPECT_EQ(offered({"tessera", "roofline", "--schedule", ""}), (Words{"all", "standard", "fa1", "fa2", "fa3"}));
    EXPECT_EQ(offered({"tessera", "plan", "--schedule", "a"}), (Words{"auto"}));
    EXPECT_EQ(offered({"tessera", "walk", "--schedule", "fa"}), (Words{"fa1", "fa2"}));
    EXPECT_EQ(offered({"tessera", "check", "--backend", ""}), (Words{"cpu", "cuda", "reference"}));
    EXPECT_EQ(offered({"tessera", "learn", "e"}), (Words{"exam", "estimate"}));
    std::ofstream(path("my tensors.safetensors")) << "";
    EXPECT_EQ(offered({"tessera", "run", "my"}), (Words{"my tensors.safetensors"}));
    EXPECT_EQ(offered({"tessera", "gen", "--output", "my"}), (Words{"my tensors.safetensors"}));
    EXPECT_EQ(offered({"tessera", "roofline", "--len", ""}), Words{});
    EXPECT_EQ(offered({"tessera", "nosuch", "--"}), Words{});
    // Every command is offered, and every option of each.
    const std::string help = run_ok("--help").out;
    for (const std::string& command : offered({"tessera", ""})) {
        if (command.starts_with("-")) continue;
        const std::string of_command = run_ok(command + " --help").out;
        EXPECT_NE((help + of_command).find(command == "why" ? "plan" : command), std::string::npos) << command;
        for (const std::string& option : offered({"tessera", command, "--"}))
            EXPECT_NE(of_command.find(option), std::string::npos) << command << " " << option;
    }
    EXPECT_GE(offered({"tessera", ""}).size(), 16U);
}

TEST_F(CompletionTest, scripts_are_right_for_their_shells) {
    for (const char* shell : {"bash", "zsh", "fish"}) {
        const std::string script = run_ok(fmt::format("completion {}", shell)).out;
        for (const char* word : {"roofline", "worksheet", "h200", "backward"})
            EXPECT_NE(script.find(word), std::string::npos) << shell << " " << word;
        std::ofstream(path(shell)) << script;
        if (!installed(shell)) continue;
        EXPECT_EQ(std::system(fmt::format("cd {} && {} -n {}", folder().string(), shell, shell).c_str()), 0) << shell;
    }
    expect_error("completion tcsh", 2, "SHELL: expected one of bash, zsh, fish, got \"tcsh\"");
    expect_error("completion", 2, "SHELL");
}

TEST_F(CompletionTest, the_manual_page_is_what_help_says) {
    const std::string page = run_ok("man").out;
    std::ofstream(path("tessera.1")) << page;
    EXPECT_EQ(page.rfind(".TH TESSERA 1", 0), 0U);
    for (const char* section : {"NAME", "SYNOPSIS", "DESCRIPTION", "COMMANDS", "EXIT STATUS", "ENVIRONMENT"})
        EXPECT_NE(page.find(std::string("\n.SH ") + section + "\n"), std::string::npos) << section;
    // A line that begins with a dot is a request of the macros used here, and no text.
    std::istringstream lines(page);
    for (std::string line; std::getline(lines, line);) {
        if (!line.starts_with('.') && !line.starts_with('\'')) continue;
        const std::string request = line.substr(0, line.find(' '));
        EXPECT_TRUE(
            (std::set<std::string>{".TH", ".SH", ".SS", ".TP", ".B", ".I", ".PP", ".nf", ".fi"}.contains(request)))
            << line;
    }
    if (!installed("groff")) return;
    const char* groff = "groff -man -Tascii -ww -P-cbou tessera.1 > page.txt 2> warnings.txt";
    EXPECT_EQ(std::system(fmt::format("cd {} && {}", folder().string(), groff).c_str()), 0);
    EXPECT_EQ(text_of(path("warnings.txt")), "");
    const std::string text = text_of(path("page.txt"));
    for (const char* word : {"tessera roofline", "--worksheet", "EXIT STATUS", "an input file has bad data"})
        EXPECT_NE(text.find(word), std::string::npos) << word;
}

TEST_F(CompletionTest, help_and_docs_have_the_same_exit_codes) {
    const std::string help = run_ok("--help").out;
    std::istringstream lines(help.substr(help.find("\nExit codes:\n") + 13));
    std::string rows;
    for (std::string line; std::getline(lines, line);) {
        if (line.empty()) continue;
        const std::string code = line.substr(2, 15);
        rows += "| " + code.substr(0, code.find_last_not_of(' ') + 1) + " | " + line.substr(17) + " |\n";
    }
    EXPECT_NE(rows.find("| 65 | an input file has bad data |\n"), std::string::npos) << rows;
    EXPECT_NE(text_of(TESSERA_SOURCE_DIR "/docs/cli.md").find("|---|---|\n" + rows), std::string::npos) << rows;
}

}  // namespace
}  // namespace tessera::completion_test
