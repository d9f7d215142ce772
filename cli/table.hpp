// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::cli {

/// Returns the columns of the terminal behind `descriptor`, at most 100 for readability; 80 without a terminal.
int terminal_width(int descriptor);

/// Breaks `text` at spaces into lines of at most `width` bytes (a longer word stands alone).
std::vector<std::string> wrapped(std::string_view text, std::size_t width);

enum class Align : std::uint8_t { left, right };

struct Column {
    std::string title;
    Align align = Align::left;
    std::size_t width = 0;  ///< least width, for tables whose rows are not known beforehand
};

/// A table of text with columns as wide as their longest cell and two spaces between them. If lines exceed the width,
/// the last column is wrapped. If that column would become too narrow, the columns continue in a second block, which
/// repeats the first `keys`.
class Table {
 public:
    explicit Table(std::vector<Column> columns, std::size_t keys = 1) : columns_(std::move(columns)), keys_(keys) {}

    /// Adds a row with as many cells as there are columns.
    void add(std::vector<std::string> cells) { rows_.push_back(std::move(cells)); }

    /// Returns the titles and all rows.
    std::string text(int width) const;

    /// Returns the titles, or one row, at the columns' own widths, for rows that appear one by one.
    std::string titles() const;
    std::string row(const std::vector<std::string>& cells) const;

 private:
    using Block = std::vector<std::size_t>;  ///< its columns

    std::vector<std::size_t> widths() const;
    std::vector<Block> blocks(const std::vector<std::size_t>& widths, std::size_t available) const;
    std::string line(const Block& block, const std::vector<std::string>& cells,
                     const std::vector<std::size_t>& widths) const;
    Block all() const;

    std::vector<Column> columns_;
    std::size_t keys_ = 1;
    std::vector<std::vector<std::string>> rows_;
};

/// Formats bytes as "1.53 MiB".
std::string bytes_text(double bytes);

/// Formats milliseconds with four significant digits: "0.0123 ms", "12.34 ms", "1234 ms".
std::string milliseconds_text(double ms);

/// Formats 1234567 as "1,234,567".
std::string count_text(std::int64_t count);

/// Returns lines "name    value", with the names padded to one width and the values wrapped.
std::string facts_text(const std::vector<std::pair<std::string, std::string>>& facts, int width);

}  // namespace tessera::cli
