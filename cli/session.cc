// SPDX-License-Identifier: Apache-2.0
#include "session.hpp"

#include <fmt/format.h>
#include <poll.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "csv.hpp"
#include "progress.hpp"
#include "schema.hpp"
#include "tessera/error.hpp"

namespace tessera::cli {
namespace {

/// Writes everything; returns false with errno set on failure.
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

/// The length in bytes of the first character if it is safe on a terminal: printable ASCII, or UTF-8 from U+00A0 on,
/// because lower code points control terminals. Returns 0 for any other.
std::size_t printable_at(std::string_view text) {
    const auto byte = [&](std::size_t at) { return static_cast<unsigned char>(text[at]); };
    const unsigned first = byte(0);
    if (first < 0x80) return first >= 0x20 && first != 0x7F ? 1 : 0;
    const std::size_t size = first >= 0xF0 ? 4 : first >= 0xE0 ? 3 : 2;
    if (first < 0xC2 || first > 0xF4 || text.size() < size) return 0;
    for (std::size_t i = 1; i < size; ++i)
        if (byte(i) >> 6 != 2) return 0;
    const bool control = first == 0xC2 && byte(1) < 0xA0;
    const bool too_long = (first == 0xE0 && byte(1) < 0xA0) || (first == 0xF0 && byte(1) < 0x90);
    const bool no_character = (first == 0xED && byte(1) >= 0xA0) || (first == 0xF4 && byte(1) >= 0x90);
    return control || too_long || no_character ? 0 : size;
}

std::string escaped(std::string_view text) {
    std::string result;
    while (!text.empty()) {
        const std::size_t size = printable_at(text);
        if (size == 0) result += fmt::format("\\x{:02x}", static_cast<unsigned char>(text.front()));
        else result += text.substr(0, size);
        text.remove_prefix(std::max<std::size_t>(size, 1));
    }
    return result;
}

/// The end of a message's first line. Further lines, its notes, are indented; any other newline belongs to a text in
/// it, such as the name of a file.
std::size_t end_of_line(std::string_view message) { return message.find("\n "); }

void print_lines(std::string_view first_kind, std::string_view message) {
    std::string text;
    std::string_view kind = first_kind;
    while (!message.empty()) {
        const std::size_t end = end_of_line(message);
        std::string_view line = message.substr(0, end);
        line.remove_prefix(std::min(line.find_first_not_of(' '), line.size()));
        if (!line.empty()) text += fmt::format("tessera: {}: {}\n", kind, escaped(line));
        kind = "note";
        message.remove_prefix(end == std::string_view::npos ? message.size() : end + 1);
    }
    const auto lock = terminal_without_progress();
    // A failure is ignored, because nothing is left to report it on.
    [[maybe_unused]] const bool written = write_all(STDERR_FILENO, text);
}

}  // namespace

/// Replaces control characters, because texts from files (a machine's title, a Record's device) must not control a
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

/// Formats JSON in ASCII, with \u... for all else: the escapes that print() adds would make it invalid.
static std::string json_text(const Json& document) {
    return document.dump(2, ' ', true, Json::error_handler_t::replace) + "\n";
}

void Session::print_json(const Json& document, const std::string& variant) const {
    print(json_text(with_schema(document, command, variant)));
}

void Session::print_csv(const Json& rows) const { print(csv_text(rows)); }

void print_error(std::string_view message) { print_lines("error", message.empty() ? "unknown" : message); }

void print_error_json(std::string_view message, int code) {
    Json notes = Json::array();
    std::string first;
    for (std::size_t begin = 0; begin <= message.size();) {
        const std::size_t end = std::min(end_of_line(message.substr(begin)), message.size() - begin) + begin;
        std::string_view line = message.substr(begin, end - begin);
        line.remove_prefix(std::min(line.find_first_not_of(' '), line.size()));
        if (begin == 0) first = line;
        else if (!line.empty()) notes.push_back(std::string(line));
        begin = end + 1;
    }
    Json document{{"schema", "tessera.error/1"}, {"error", first}, {"notes", notes}, {"exit_code", code}};
    [[maybe_unused]] const bool written = write_all(STDOUT_FILENO, json_text(document));  // stderr has the error too
}

void print_note(std::string_view message) { print_lines("note", message); }

}  // namespace tessera::cli
