// SPDX-License-Identifier: Apache-2.0
#include "table.hpp"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <numeric>

namespace tessera::cli {
namespace {

constexpr int kDefaultWidth = 80;
constexpr int kMinWidth = 40;
constexpr int kMaxWidth = 100;
constexpr std::size_t kGap = 2;
constexpr std::size_t kLeastWrapped = 20;  // the least width at which the last column is wrapped

void drop_trailing_spaces(std::string& text) { text.erase(text.find_last_not_of(' ') + 1); }

}  // namespace

int terminal_width(int descriptor) {
    winsize size{};
    if (::isatty(descriptor) != 1 || ::ioctl(descriptor, TIOCGWINSZ, &size) != 0 || size.ws_col == 0)
        return kDefaultWidth;
    return std::clamp(static_cast<int>(size.ws_col), kMinWidth, kMaxWidth);
}

std::vector<std::string> wrapped(std::string_view text, std::size_t width) {
    std::vector<std::string> lines;
    while (text.size() > width) {
        std::size_t space = text.rfind(' ', width);
        if (space == std::string_view::npos || space == 0) space = text.find(' ', 1);
        if (space == std::string_view::npos) break;
        lines.emplace_back(text.substr(0, space));
        text.remove_prefix(std::min(text.find_first_not_of(' ', space), text.size()));
    }
    lines.emplace_back(text);
    return lines;
}

std::vector<std::size_t> Table::widths() const {
    std::vector<std::size_t> result;
    for (std::size_t c = 0; c < columns_.size(); ++c) {
        std::size_t widest = std::max(columns_[c].title.size(), columns_[c].width);
        for (const auto& cells : rows_) widest = std::max(widest, cells[c].size());
        result.push_back(widest);
    }
    return result;
}

std::string Table::line(const Block& block, const std::vector<std::string>& cells,
                        const std::vector<std::size_t>& widths) const {
    std::string text;
    for (const std::size_t c : block) {
        if (c != block.front()) text.append(kGap, ' ');
        text += columns_[c].align == Align::left ? fmt::format("{:<{}}", cells[c], widths[c])
                                                 : fmt::format("{:>{}}", cells[c], widths[c]);
    }
    drop_trailing_spaces(text);
    return text + "\n";
}

Table::Block Table::all() const {
    Block block(columns_.size());
    std::iota(block.begin(), block.end(), std::size_t{0});
    return block;
}

std::string Table::titles() const {
    std::vector<std::string> cells;
    for (const Column& column : columns_) cells.push_back(column.title);
    return line(all(), cells, widths());
}

std::string Table::row(const std::vector<std::string>& cells) const { return line(all(), cells, widths()); }

/// Splits the columns into blocks with as many as fit; the last column of a block needs space to wrap.
std::vector<Table::Block> Table::blocks(const std::vector<std::size_t>& widths, std::size_t available) const {
    std::vector<Block> result;
    Block keys = all();
    keys.resize(std::min(keys_, keys.size()));
    std::size_t of_keys = 0;
    for (const std::size_t c : keys) of_keys += widths[c] + kGap;
    Block block = keys;
    std::size_t used = of_keys;
    for (std::size_t c = keys.size(); c < widths.size(); ++c) {
        const std::size_t least = c + 1 == widths.size() ? std::min(widths[c], kLeastWrapped) : widths[c];
        if (used + least > available && block.size() > keys.size())
            result.push_back(block), block = keys, used = of_keys;
        block.push_back(c);
        used += widths[c] + kGap;
    }
    result.push_back(block);
    return result;
}

std::string Table::text(int width) const {
    std::vector<std::size_t> columns = widths();
    std::vector<std::string> titles;
    for (const Column& column : columns_) titles.push_back(column.title);
    const auto available = static_cast<std::size_t>(std::max(width, 0));
    std::string text;
    for (const Block& block : blocks(columns, available)) {
        std::size_t before_last = 0;
        for (std::size_t i = 0; i + 1 < block.size(); ++i) before_last += columns[block[i]] + kGap;
        const std::size_t last = block.back();
        if (last + 1 == columns.size())
            columns[last] =
                std::min(columns[last], std::max(available > before_last ? available - before_last : 0, kLeastWrapped));
        text += (text.empty() ? "" : "\n") + line(block, titles, columns);
        for (const auto& cells : rows_) {
            std::vector<std::string> part = cells;
            for (const std::string& piece : wrapped(cells[last], columns[last])) {
                part[last] = piece;
                text += line(block, part, columns);
                std::fill(part.begin(), part.end(), "");
            }
        }
    }
    return text;
}

std::string bytes_text(double bytes) {
    const char* units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
    std::size_t unit = 0;
    while (bytes >= 1024 && unit + 1 < std::size(units)) bytes /= 1024, ++unit;
    return unit == 0 ? fmt::format("{:.0f} B", bytes) : fmt::format("{:.1f} {}", bytes, units[unit]);
}

std::string milliseconds_text(double ms) {
    const int digits = ms > 0 ? std::clamp(3 - static_cast<int>(std::floor(std::log10(ms))), 0, 6) : 1;
    return fmt::format("{:.{}f} ms", ms, digits);
}

std::string count_text(std::int64_t count) {
    std::string text = std::to_string(count);
    const std::size_t first = count < 0 ? 1 : 0;
    for (std::size_t at = text.size(); at > first + 3; text.insert(at, 1, ',')) at -= 3;
    return text;
}

std::string facts_text(const std::vector<std::pair<std::string, std::string>>& facts, int width) {
    std::size_t widest = 0;
    for (const auto& [name, value] : facts) widest = std::max(widest, name.size());
    const auto available = static_cast<std::size_t>(std::max(width - static_cast<int>(widest + kGap), kMinWidth / 2));
    std::string text;
    for (const auto& [name, value] : facts) {
        std::string label = name;
        for (const std::string& piece : wrapped(value, available)) {
            text += fmt::format("{:<{}}{}\n", label, widest + kGap, piece);
            label.clear();
        }
    }
    return text;
}

}  // namespace tessera::cli
