// SPDX-License-Identifier: Apache-2.0
#include "session.hpp"

#include <fmt/format.h>
#include <poll.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "progress.hpp"
#include "tessera/error.hpp"

namespace tessera::cli {
namespace {

/// Writes everything; false with errno set when that fails.
bool write_all(int descriptor, std::string_view text) {
    while (!text.empty()) {
        const ssize_t written = ::write(descriptor, text.data(), text.size());
        if (written >= 0) {
            text.remove_prefix(static_cast<std::size_t>(written));
        } else if (errno == EAGAIN) {  // the other end made the pipe non-blocking
            pollfd waiting{descriptor, POLLOUT, 0};
            ::poll(&waiting, 1, -1);
        } else if (errno != EINTR) {
            return false;
        }
    }
    return true;
}

std::string escaped(std::string_view text) {
    std::string result;
    for (const char c : text) {
        const auto byte = static_cast<unsigned char>(c);
        if (byte < 0x20 || byte == 0x7F) result += fmt::format("\\x{:02x}", byte);
        else result += c;
    }
    return result;
}

void print_lines(std::string_view first_kind, std::string_view message) {
    std::string text;
    std::string_view kind = first_kind;
    while (!message.empty()) {
        const std::size_t end = message.find('\n');
        std::string_view line = message.substr(0, end);
        line.remove_prefix(std::min(line.find_first_not_of(' '), line.size()));
        if (!line.empty()) text += fmt::format("tessera: {}: {}\n", kind, escaped(line));
        kind = "note";
        message.remove_prefix(end == std::string_view::npos ? message.size() : end + 1);
    }
    const auto lock = terminal_without_progress();
    // Nothing is left to tell anybody when stderr fails.
    [[maybe_unused]] const bool told = write_all(STDERR_FILENO, text);
}

}  // namespace

/// As it is but for control characters: texts of files (a machine's title, a Record's device) must not steer a
/// terminal.
static std::string without_control(std::string_view text) {
    std::string result;
    result.reserve(text.size());
    while (!text.empty()) {
        const std::size_t end = std::min(text.find('\n'), text.size());
        result += escaped(text.substr(0, end));
        if (end < text.size()) result += '\n';
        text.remove_prefix(std::min(end + 1, text.size()));
    }
    return result;
}

void Session::print(std::string_view text) const {
    const auto lock = terminal_without_progress();
    if (write_all(STDOUT_FILENO, without_control(text))) return;
    if (errno == EPIPE) throw ReaderGone();
    throw Error(ErrorCode::cannot_write, "stdout", std::strerror(errno));
}

void Session::print_json(const Json& document) const {
    print(document.dump(2, ' ', false, Json::error_handler_t::replace) + "\n");
}

void print_error(std::string_view message) { print_lines("error", message.empty() ? "unknown" : message); }

void print_error_json(std::string_view message, int code) {
    Json notes = Json::array();
    std::string first;
    for (std::size_t begin = 0; begin <= message.size();) {
        const std::size_t end = std::min(message.find('\n', begin), message.size());
        std::string_view line = message.substr(begin, end - begin);
        line.remove_prefix(std::min(line.find_first_not_of(' '), line.size()));
        if (begin == 0) first = line;
        else if (!line.empty()) notes.push_back(std::string(line));
        begin = end + 1;
    }
    Json document{{"error", first}, {"notes", notes}, {"exit_code", code}};
    const std::string text = document.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
    [[maybe_unused]] const bool told = write_all(STDOUT_FILENO, text);  // stderr has it too
}

void print_note(std::string_view message) { print_lines("note", message); }

}  // namespace tessera::cli
