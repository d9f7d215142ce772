// SPDX-License-Identifier: Apache-2.0
#include "plot/text.hpp"

namespace tessera::plot {

std::string escaped(std::string_view text) {
    std::string result;
    for (const char c : text) {
        switch (c) {
            case '&': result += "&amp;"; break;
            case '<': result += "&lt;"; break;
            case '>': result += "&gt;"; break;
            case '"': result += "&quot;"; break;
            case '\'': result += "&#39;"; break;
            default:
                if (static_cast<unsigned char>(c) < 0x20 && c != '\n' && c != '\t') result += "\xEF\xBF\xBD";
                else result += c;
        }
    }
    return result;
}

double text_width(std::string_view text, double size) {
    double em = 0;
    for (const char c : text) {
        if ((static_cast<unsigned char>(c) & 0xC0U) == 0x80U) continue;  // a continuation byte
        if (std::string_view("iljtfI.,:;|!'()[]/ ").find(c) != std::string_view::npos) em += 0.36;
        else if (c == 'm' || c == 'w' || c == 'M' || c == 'W' || c == '%') em += 0.92;
        else if (c >= 'A' && c <= 'Z') em += 0.68;
        else em += 0.6;
    }
    return em * size;
}

std::vector<std::string> wrapped_to(std::string_view text, double size, double width) {
    std::vector<std::string> lines;
    std::string line;
    while (!text.empty()) {
        const std::size_t end = std::min(text.find(' '), text.size());
        const std::string word(text.substr(0, end));
        text.remove_prefix(std::min(end + 1, text.size()));
        if (word.empty()) continue;
        const std::string longer = line.empty() ? word : line + " " + word;
        if (!line.empty() && text_width(longer, size) > width) {
            lines.push_back(line);
            line = word;
        } else {
            line = longer;
        }
    }
    if (!line.empty()) lines.push_back(line);
    return lines;
}

}  // namespace tessera::plot
