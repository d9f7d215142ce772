// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace tessera::cli {

/// An exit code of the command and its meaning.
struct ExitMeaning {
    const char* code;
    const char* meaning;
};

/// All exit codes, as --help, the man page and docs/cli.md list them (ExitCode in session.hpp has the numbers).
inline constexpr ExitMeaning kExitMeanings[] = {
    {"0", "done"},
    {"1", "a check failed: a result is outside its limits, or nothing ran"},
    {"2", "the command line is wrong"},
    {"65", "an input file has bad data"},
    {"66", "an input file cannot be opened"},
    {"69", "no kernel, device or prediction for the question"},
    {"70", "a bug in tessera"},
    {"71", "out of memory"},
    {"73", "the output cannot be written"},
    {"129, 130, 143", "ended by a signal: the terminal was closed, Ctrl-C, terminated"},
};

}  // namespace tessera::cli
