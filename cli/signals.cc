// SPDX-License-Identifier: Apache-2.0
#include "signals.hpp"

#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <cerrno>

#include "io/atomic_file.hpp"
#include "progress.hpp"

namespace tessera::cli {
namespace {

extern "C" void end_by_signal(int signal_number) {
    io::remove_uncommitted_files();
    clear_progress_line();
    ::_exit(128 + signal_number);
}

void set_action(int signal_number, void (*handler)(int)) {
    struct sigaction action {};
    action.sa_handler = handler;
    sigfillset(&action.sa_mask);
    ::sigaction(signal_number, &action, nullptr);
}

/// Installs the handler, unless our parent ignores the signal (nohup, a background job of a plain shell).
void end_at(int signal_number) {
    struct sigaction current {};
    ::sigaction(signal_number, nullptr, &current);
    if (current.sa_handler != SIG_IGN) set_action(signal_number, end_by_signal);
}

}  // namespace

void occupy_standard_descriptors() {
    for (const int descriptor : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
        if (::fcntl(descriptor, F_GETFD) != -1 || errno != EBADF) continue;
        // open() returns the lowest free number, which is this one. The wrong direction makes every use of it fail.
        ::open("/dev/null", descriptor == STDIN_FILENO ? O_WRONLY : O_RDONLY);
    }
}

void install_signal_handlers() {
    end_at(SIGINT);
    end_at(SIGTERM);
    end_at(SIGHUP);
    set_action(SIGPIPE, SIG_IGN);
    set_action(SIGXFSZ, SIG_IGN);
}

void end_by_closed_pipe() {
    set_action(SIGPIPE, SIG_DFL);
    sigset_t pipe_only;
    sigemptyset(&pipe_only);
    sigaddset(&pipe_only, SIGPIPE);
    ::sigprocmask(SIG_UNBLOCK, &pipe_only, nullptr);
    ::raise(SIGPIPE);
    ::_exit(128 + SIGPIPE);
}

}  // namespace tessera::cli
