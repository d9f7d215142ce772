// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace tessera::cli {

/// Descriptors 0, 1 and 2 that the caller left closed are filled with ones that refuse every transfer, so that no file
/// opened later gets their number and receives what was meant for the terminal.
void guard_standard_streams();

/// SIGINT, SIGTERM and SIGHUP remove unfinished output files and end the process with 128 + their number. A closed
/// pipe and a file size limit arrive as errors of write().
void install_signal_handlers();

/// Ends the process as the closed pipe would have: by SIGPIPE.
[[noreturn]] void end_by_closed_pipe();

}  // namespace tessera::cli
