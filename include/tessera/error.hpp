// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <stdexcept>
#include <string>
#include <utility>

#pragma GCC visibility push(default)
namespace tessera {

/// Stable numbers: they are the status codes of the C ABI too (tessera.h). Never renumber.
enum class ErrorCode : int {
    ok = 0,
    invalid_argument = 1,     ///< an argument's value, shape, dtype or pointer is wrong; `argument()` names it
    unsupported = 2,          ///< a legal call that the requested kernel, schedule or backend does not take
    workspace_too_small = 3,  ///< the workspace handed over is shorter or less aligned than the plan asks for
    out_of_memory = 4,
    cannot_open = 5,  ///< an input file is missing, unreadable or not a regular file
    bad_data = 6,     ///< an input file breaks its format
    cannot_write = 7,
    device_unavailable = 8,
    cancelled = 9,
    internal = 10,  ///< a bug in tessera
};

/// The one exception type of the library.
class Error : public std::runtime_error {
 public:
    /// `argument` is the name of the argument as the public API spells it ("k", "cu_seqlens_q", "window_left"),
    /// or empty when no single argument is to blame. `what()` is "argument: message".
    Error(ErrorCode code, std::string argument, const std::string& message)
        : std::runtime_error(argument.empty() ? message : argument + ": " + message),
          code_(code),
          argument_(std::move(argument)) {}

    ErrorCode code() const noexcept { return code_; }
    const std::string& argument() const noexcept { return argument_; }

 private:
    ErrorCode code_;
    std::string argument_;
};

}  // namespace tessera
#pragma GCC visibility pop
