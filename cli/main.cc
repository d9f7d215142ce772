// SPDX-License-Identifier: Apache-2.0
//
// The command `tessera`: parses, calls the subcommand, and turns every failure into one line and an exit code.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <new>
#include <string_view>
#include <vector>

#include "commands.hpp"
#include "commit.hpp"
#include "exit_codes.hpp"
#include "help.hpp"
#include "parse.hpp"
#include "signals.hpp"
#include "tessera/error.hpp"

namespace tessera::cli {
namespace {

int exit_code_of(ErrorCode code) {
    switch (code) {
        case ErrorCode::ok: return kOk;
        case ErrorCode::invalid_argument: return kUsage;
        case ErrorCode::unsupported:
        case ErrorCode::device_unavailable: return kUnavailable;
        case ErrorCode::out_of_memory: return kOutOfMemory;
        case ErrorCode::cannot_open: return kCannotOpen;
        case ErrorCode::bad_data: return kBadData;
        case ErrorCode::cannot_write: return kCannotWrite;
        case ErrorCode::cancelled: return kInterrupted;
        case ErrorCode::workspace_too_small:
        case ErrorCode::internal: break;
    }
    return kInternal;
}

std::string exit_codes_text() {
    std::string text = "\nExit codes:\n";
    for (const ExitMeaning& exit : kExitMeanings) text += fmt::format("  {:<15}{}\n", exit.code, exit.meaning);
    return text;
}

void add_commands(CLI::App& app, Session& session) {
    app.name("tessera");
    app.description(
        "Exact attention by tiles: computes it, checks it, measures it, and says which kernel ran and why.");
    app.formatter(std::make_shared<HelpFormatter>());
    app.set_help_flag("-h,--help", "Print this help and exit");
    app.set_version_flag("--version", fmt::format("tessera {} ({})", TESSERA_VERSION, TESSERA_COMMIT),
                         "Print the version and exit");
    app.add_flag("--json", session.json, "Print the result as one JSON document; also after the command");
    app.require_subcommand(0, 1);  // throw_no_command() reports a missing one
    add_run_command(app, session);
    add_check_command(app, session);
    add_bench_command(app, session);
    add_report_command(app, session);
    add_walk_command(app, session);
    add_which_command(app, session);
    add_plan_command(app, session);
    add_roofline_command(app, session);
    add_machine_command(app, session);
    add_calibrate_command(app, session);
    add_list_command(app, session);
    add_gen_command(app, session);
    add_learn_command(app, session);
    add_completion_command(app, session);
    add_man_command(app, session);
    app.footer(examples_text({{"tessera run qkv.safetensors --causal bottom-right -o out.safetensors",
                               "compute attention of the tensors q, k and v of a file"},
                              {"tessera plan --len 4096 --heads 32/8 --head-dim 128",
                               "which kernel would run, at what cost, and why no other"},
                              {"tessera roofline --device h200 --len 512:65536 --head-dim 128",
                               "what each schedule would cost on a GPU"}}) +
               "\nEach command teaches by example: tessera COMMAND --help\n" + exit_codes_text());
}

/// The command in which parsing failed, for "see tessera run --help".
std::string command_of(const CLI::App& app) {
    const auto chosen = app.get_subcommands();
    return chosen.empty() ? "tessera" : "tessera " + chosen.back()->get_name();
}

/// Reports the failure to people and, with --json, to programs.
int fail(const Session& session, const std::string& message, int code) {
    print_error(message);
    if (session.json) print_error_json(message, code);
    return code;
}

int fail_usage(const CLI::App& app, const Session& session, const std::string& message) {
    fail(session, message, kUsage);
    print_note(command_of(app) + " --help shows the options");
    return kUsage;
}

/// CLI11's message; its three shortest messages are rewritten.
std::string message_of(const CLI::ParseError& error) {
    const std::string message = error.what();
    constexpr std::string_view kNotConverted = "Could not convert: ";
    if (message.starts_with(kNotConverted)) {  // --check = banana; all other options are strings
        const std::size_t equals = message.find(" = ");
        return fmt::format("{}: expected true, false or nothing after it, got \"{}\"",
                           message.substr(kNotConverted.size(), equals - kNotConverted.size()),
                           message.substr(std::min(equals + 3, message.size())));
    }
    const std::string option = message.substr(0, message.find(':'));
    if (error.get_exit_code() != static_cast<int>(CLI::ExitCodes::ArgumentMismatch)) return message;
    if (message.find("missing") != std::string::npos) return option + ": expected a value, got nothing";
    if (message.find("At Most") != std::string::npos) return option + ": expected once, got it more than once";
    return message;
}

/// Throws for an argument that no option takes, with its name and the most similar option.
[[noreturn]] void throw_unknown_argument(const CLI::App& command) {
    const auto unknown = command.remaining();
    // CLI11 returns them in reverse; the value after an unknown option is not an option.
    const auto option =
        std::find_if(unknown.rbegin(), unknown.rend(), [](const auto& x) { return x.starts_with("-"); });
    const std::string got = option == unknown.rend() ? unknown.back() : option->substr(0, option->find('='));
    std::vector<std::string> known;
    for (const CLI::Option* of_command : command.get_options()) {
        for (const std::string& name : of_command->get_lnames()) known.push_back("--" + name);
    }
    constexpr std::size_t kShortest = 5;  // "--dev" suffices for "--device"
    const std::string nearest = got.size() < kShortest ? "" : nearest_of(got, known);
    throw UsageError(got, fmt::format("expected an option of tessera {}{}", command.get_name(),
                                      nearest.empty() ? "" : ", perhaps " + nearest));
}

[[noreturn]] void throw_no_command(const CLI::App& app, const std::string& got) {
    std::vector<std::string> names;
    for (const CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; }))
        names.push_back(command->get_name());
    if (!got.empty()) expected_one_of("COMMAND", names, got);
    throw UsageError("COMMAND", fmt::format("expected one of {}, got nothing", fmt::join(names, ", ")));
}

void parse(CLI::App& app, int argc, char** argv) {
    try {
        app.parse(argc, argv);
    } catch (const CLI::ExtrasError&) {
        const auto unknown = app.remaining();  // arguments in front of a command: "tessera help roofline"
        const auto chosen = app.get_subcommands();
        if (!chosen.empty() && !chosen.back()->remaining().empty()) throw_unknown_argument(*chosen.back());
        if (unknown.empty()) throw;
        const auto named = std::find_if(unknown.begin(), unknown.end(), [](const auto& x) { return x != "help"; });
        if (named == unknown.end()) throw CLI::CallForHelp();  // for the command after it
        throw_no_command(app, *named);
    }
    if (app.get_subcommands().empty()) throw_no_command(app, "");
}

int run(CLI::App& app, Session& session, int argc, char** argv) {
    try {
        parse(app, argc, argv);
        return session.exit_code;
    } catch (const CLI::CallForHelp&) {
        session.print(app.help());
        return kOk;
    } catch (const CLI::CallForVersion& version) {
        if (session.json)
            return session.print_json(Json{{"version", TESSERA_VERSION}, {"commit", TESSERA_COMMIT}}), kOk;
        session.print(std::string(version.what()) + "\n");
        return kOk;
    } catch (const CLI::ParseError& error) {
        return fail_usage(app, session, message_of(error));
    } catch (const UsageError& error) {
        return fail_usage(app, session, error.what());
    }
}

/// Runs the command and catches every exception, including --help that meets a full disk.
int run_and_report(CLI::App& app, Session& session, int argc, char** argv) {
    try {
        return run(app, session, argc, argv);
    } catch (const Error& error) {
        return fail(session, error.what(), exit_code_of(error.code()));
    } catch (const ReaderGone&) {
        end_by_closed_pipe();
    } catch (const std::bad_alloc&) {
        return fail(session, "out of memory", kOutOfMemory);
    } catch (const std::exception& error) {
        return fail(session, fmt::format("internal: {}", error.what()), kInternal);
    }
}

}  // namespace
}  // namespace tessera::cli

int main(int argc, char** argv) {
    tessera::cli::occupy_standard_descriptors();
    tessera::cli::install_signal_handlers();
    tessera::cli::Session session;
    // This is set before the parse, because the parse may fail.
    session.json = std::find(argv + 1, argv + argc, std::string_view("--json")) != argv + argc;
    CLI::App app;
    tessera::cli::add_commands(app, session);
    return tessera::cli::run_and_report(app, session, argc, argv);
}
