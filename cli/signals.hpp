// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace tessera::cli {

/// Opens descriptors 0, 1 and 2, if the caller left them closed, so that every transfer on them fails. Otherwise a file
/// opened later could get such a number and receive the terminal's output.
void occupy_standard_descriptors();

/// Makes SIGINT, SIGTERM and SIGHUP remove unfinished output files and end the process with 128 + their number. A
/// closed pipe and a file size limit arrive as errors of write().
void install_signal_handlers();

/// Ends the process by SIGPIPE, as the closed pipe would have.
[[noreturn]] void end_by_closed_pipe();

}  // namespace tessera::cli
