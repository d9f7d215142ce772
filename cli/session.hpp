// SPDX-License-Identifier: Apache-2.0
//
// State and functions that main() and the subcommands share: output of results, and the end of a run.
#pragma once

#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <string_view>

namespace tessera::cli {

/// Keys keep the order in which a command writes them.
using Json = nlohmann::ordered_json;

/// Exit codes of the command (docs/cli.md).
enum ExitCode : int {
    kOk = 0,
    kCheckFailed = 1,
    kUsage = 2,
    kBadData = 65,
    kCannotOpen = 66,
    kUnavailable = 69,
    kInternal = 70,
    kOutOfMemory = 71,
    kCannotWrite = 73,
    kInterrupted = 130,
};

/// Reports an error of the command line itself. The message names the option, what was expected and what came.
class UsageError : public std::runtime_error {
 public:
    UsageError(const std::string& option, const std::string& message) : std::runtime_error(option + ": " + message) {}
};

/// The reader of stdout has gone (EPIPE), so that the run ends quietly.
class ReaderGone : public std::exception {};

struct Session {
    bool json = false;    ///< --json: exactly one JSON document goes to stdout
    bool csv = false;     ///< --csv: a table of comma-separated values goes to stdout
    std::string command;  ///< the subcommand, by which its JSON documents are called
    int exit_code = kOk;  ///< exit code of the process if nothing throws; a failed check sets kCheckFailed

    /// Writes a result to stdout at once. Throws Error(cannot_write), or ReaderGone.
    void print(std::string_view text) const;

    /// Writes the one JSON document of a command, indented. Text that is not UTF-8 is replaced and causes no error. Its
    /// first field is "schema": "tessera.COMMAND/1", or "tessera.COMMAND.VARIANT/1" for another form of answer; in a
    /// list each object has it. A document that has a schema keeps it.
    void print_json(const Json& document, const std::string& variant = "") const;

    /// Writes objects as a table (csv_text()).
    void print_csv(const Json& rows) const;
};

/// Writes one line to stderr: "tessera: error: message". Control characters are escaped, so that a hostile file name
/// cannot control the terminal. Further lines of `message` become lines "tessera: note: ...".
void print_error(std::string_view message);
/// Writes the error as a --json document to stdout: {"schema": "tessera.error/1", "error": first line, "notes": the
/// others, "exit_code": code}.
void print_error_json(std::string_view message, int code);
void print_note(std::string_view message);

}  // namespace tessera::cli
