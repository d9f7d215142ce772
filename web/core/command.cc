// SPDX-License-Identifier: Apache-2.0
//
// Runs the command `tessera` inside the page: same subcommands, same options, same JSON.
#include "commands.hpp"
#include "documents.hpp"
#include "help.hpp"
#include "output.hpp"
#include "tessera/error.hpp"

namespace tessera::web {
namespace {

/// Returns the exit status that the process would return.
int run(std::vector<std::string> args) {
    cli::Session session;
    CLI::App app;
    app.name("tessera");
    app.formatter(std::make_shared<cli::HelpFormatter>());
    app.add_flag("--json", session.json, "Print the result as one JSON document; also after the command");
    app.require_subcommand(1);
    cli::add_walk_command(app, session);
    cli::add_which_command(app, session);
    cli::add_roofline_command(app, session);
    try {
        std::reverse(args.begin(), args.end());  // CLI11 takes arguments from the back
        app.parse(args);
        return session.exit_code;
    } catch (const CLI::CallForHelp&) {
        session.print(app.help());
        return cli::kOk;
    } catch (const CLI::ParseError& error) {
        cli::print_error(error.what());
    } catch (const std::exception& error) {
        cli::print_error(error.what());
    }
    return cli::kUsage;
}

}  // namespace

Json ask_command(const Json& question) {
    output() = {};
    const int status = run(question.at("args").get<std::vector<std::string>>());
    return {{"status", status}, {"text", output().text}, {"errors", output().errors}};
}

}  // namespace tessera::web
