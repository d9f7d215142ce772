// SPDX-License-Identifier: Apache-2.0
//
// Shared by main() and the subcommands: the output of results, and the exit of a run.
#pragma once

#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <string_view>

namespace tessera::cli {

/// Keys keep the order in which a command writes them.
using Json = nlohmann::ordered_json;

/// Exit codes of the command (docs: contract, "Command line").
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

/// An error in the command line. The message names the option, the expected and the given text.
class UsageError : public std::runtime_error {
 public:
    UsageError(const std::string& option, const std::string& message) : std::runtime_error(option + ": " + message) {}
};

/// The reader of stdout has closed it (EPIPE), so the run ends quietly.
class ReaderGone : public std::exception {};

struct Session {
    bool json = false;    ///< --json: exactly one JSON document goes to stdout
    int exit_code = kOk;  ///< the exit status if nothing throws; a failed check sets kCheckFailed

    /// Writes a result to stdout at once. Throws Error(cannot_write), or ReaderGone.
    void print(std::string_view text) const;

    /// Writes the one JSON document of a command, indented. Bytes that are not UTF-8 are replaced, never an error.
    void print_json(const Json& document) const;
};

/// Writes one line on stderr: "tessera: error: message". It escapes control characters, so that a hostile file name
/// cannot control the terminal. Further lines of `message` become lines "tessera: note: ...".
void print_error(std::string_view message);
/// Writes the error as a document for --json on stdout: {"error": first line, "notes": the others, "exit_code": code}.
void print_error_json(std::string_view message, int code);
void print_note(std::string_view message);

}  // namespace tessera::cli
