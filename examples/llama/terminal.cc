// SPDX-License-Identifier: Apache-2.0
#include "llama/terminal.hpp"

#include <fmt/format.h>

#include <cstdio>

namespace llama {

std::string text_of(std::int32_t token, bool bytes) {
    return bytes ? std::string(1, static_cast<char>(token)) : fmt::format(" {}", token);
}

Terminal::Terminal(std::vector<std::string> prompts, bool bytes, bool escape)
    : waiting_(std::move(prompts)), ended_(waiting_.size()), bytes_(bytes), escape_(escape) {
    begin(0);
}

void Terminal::show(const Token& token) {
    const auto request = static_cast<std::size_t>(token.request);
    ended_[request] = token.last;
    if (request != current_) {
        waiting_[request] += text_of(token.token, bytes_);
        return;
    }
    print(text_of(token.token, bytes_));
    while (current_ < ended_.size() && ended_[current_]) {
        std::fputc('\n', stdout);
        begin(++current_);
    }
}

void Terminal::begin(std::size_t request) {
    if (request >= waiting_.size()) return;
    if (waiting_.size() > 1) fmt::print("[{}] ", request + 1);
    print(waiting_[request]);
}

void Terminal::print(const std::string& text) {
    for (const char c : text) {
        const auto byte = static_cast<unsigned char>(c);
        const bool control = (byte < 0x20 && c != '\n' && c != '\t') || byte == 0x7F || (byte >= 0x80 && byte < 0xA0);
        if (escape_ && control) {
            fmt::print("\\x{:02X}", byte);
        } else {
            std::fputc(c, stdout);
        }
    }
    std::fflush(stdout);
}

}  // namespace llama
