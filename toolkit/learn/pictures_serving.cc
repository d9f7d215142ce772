// SPDX-License-Identifier: Apache-2.0
//
// Pictures of lessons 17 to 22.
#include <fmt/format.h>

#include <cmath>
#include <iterator>
#include <string>
#include <vector>

#include "learn/canvas.hpp"
#include "learn/mask_tiles.hpp"
#include "learn/pictures.hpp"
#include "learn/serving.hpp"
#include "learn/setting.hpp"

namespace tessera::learn {

namespace {

std::string pair_text(const walk::HandVector& v) { return fmt::format("({}, {})", v[0].text(), v[1].text()); }

/// The sum of 2^s over the keys of the row.
walk::Fraction sum_of_exponentials(const walk::HandRow& row) {
    return row.l * walk::Fraction(std::int64_t{1} << *row.m);
}

/// Row 0 of the example by hand over the keys begin to end - 1.
walk::HandRow row_of_keys(std::size_t begin, std::size_t end) {
    const walk::HandExample all = pencil_example().example;
    walk::HandExample part{.q = {all.q[0]}, .k = {}, .v = {}, .d_o = {{1, 0}}, .tile = {1, 2}};
    for (std::size_t j = begin; j < end; ++j) part.k.push_back(all.k[j]), part.v.push_back(all.v[j]);
    return walk::work_by_hand(part, Schedule::fa2, {}).rows[0];
}

}  // namespace

std::string merge_picture() {
    const walk::HandRow parts[] = {row_of_keys(0, 2), row_of_keys(2, 4)}, whole = row_of_keys(0, 4);
    const walk::Fraction all = sum_of_exponentials(parts[0]) + sum_of_exponentials(parts[1]);
    const walk::HandMatrix v = pencil_example().example.v;
    Canvas canvas(
        "One query, two workers",
        "Query 0 of lesson 7, base 2. Each worker takes two keys and returns its O and its LSE. A share is the "
        "worker's sum of 2^s over the sum of both.",
        640, 330);
    const double top = canvas.top();
    for (std::size_t part = 0; part < 2; ++part) {
        const double left = 20 + static_cast<double>(part) * 310;
        const int color = part == 0 ? 0 : 1;
        const walk::HandRow& row = parts[part];
        canvas.box(left, top + 4, 280, 44, color, 0.25);
        for (std::size_t j = 0; j < 2; ++j) {
            const auto key = static_cast<std::int64_t>(2 * part + j);
            canvas.words(left + 14 + static_cast<double>(j) * 140, top + 31,
                         fmt::format("key {}, v = ({}, {})", key, v[2 * part + j][0], v[2 * part + j][1]));
        }
        canvas.words(left, top + 74, fmt::format("worker {}: O = {}", part, pair_text(row.o)), Anchor::start,
                     Canvas::kInk, 14, true);
        canvas.words(
            left, top + 96,
            fmt::format("LSE = log2 of 2^{} * {} = log2 of {}", *row.m, row.l.text(), sum_of_exponentials(row).text()));
        canvas.words(left, top + 118, fmt::format("share {}", (sum_of_exponentials(row) / all).text()), Anchor::start,
                     color, 14, true);
        canvas.line(left + 140, top + 128, 320, top + 166, color, true);
    }
    canvas.box(120, top + 168, 400, 54, 2, 0.2);
    canvas.words(320, top + 190,
                 fmt::format("{} {} + {} {}", (sum_of_exponentials(parts[0]) / all).text(), pair_text(parts[0].o),
                             (sum_of_exponentials(parts[1]) / all).text(), pair_text(parts[1].o)),
                 Anchor::middle);
    canvas.words(320, top + 211, fmt::format("O = {}, LSE = log2 of {}", pair_text(whole.o), all.text()),
                 Anchor::middle, Canvas::kInk, 14, true);
    return canvas.svg();
}

std::string pages_picture() {
    struct Conversation {
        const char* name;
        int tokens;
        int color;
        std::vector<int> table;  ///< the page of each block of tokens
    };
    constexpr int kPage = 4, kPages = 8;
    const Conversation both[] = {{"conversation A, 10 tokens", 10, 0, {3, 0, 5}},
                                 {"conversation B, 7 tokens", 7, 1, {3, 2}}};
    Canvas canvas("Two conversations in one pool of pages",
                  "Pages of 4 tokens. Both began with the same 4 tokens, so both tables begin with page 3.", 640, 330);
    const double left = 16, top = canvas.top() + 8, cell = 17;
    double y = top;
    std::vector<int> held(kPages, -1), filled(kPages, 0);
    for (const Conversation& one : both) {
        canvas.words(left, y + 14, one.name, Anchor::start, Canvas::kInk, 14, true);
        canvas.words(left, y + 40, "its table:", Anchor::start, Canvas::kQuiet);
        for (std::size_t i = 0; i < one.table.size(); ++i) {
            const auto page = static_cast<std::size_t>(one.table[i]);
            canvas.box(left + 80 + static_cast<double>(i) * 34, y + 24, 28, 24, one.color, 0.3);
            canvas.words(left + 94 + static_cast<double>(i) * 34, y + 41, std::to_string(page), Anchor::middle,
                         Canvas::kInk, 13, true);
            held[page] = held[page] < 0 ? one.color : 2;
            filled[page] = std::min(kPage, one.tokens - kPage * static_cast<int>(i));
        }
        y += 78;
    }
    const double pool = 300;
    canvas.words(pool, top + 14, "the pool", Anchor::start, Canvas::kInk, 14, true);
    for (std::size_t page = 0; page < kPages; ++page) {
        const double x = pool + static_cast<double>(page % 4) * 82, row = top + 44 + static_cast<double>(page / 4) * 78;
        canvas.words(x, row - 6, fmt::format("page {}", page), Anchor::start, Canvas::kQuiet, 12);
        for (int slot = 0; slot < kPage; ++slot) {
            const bool used = held[page] >= 0 && slot < filled[page];
            canvas.box(x + slot * cell, row, cell - 2, 30, used ? held[page] : Canvas::kQuiet, used ? 0.6 : 0);
        }
    }
    y = top + 176;
    const auto row = [&](double x, int color, double strength, const char* text) {
        canvas.box(x, y, 16, 16, color, strength);
        canvas.words(x + 24, y + 13, text, Anchor::start, Canvas::kQuiet);
    };
    row(left, 0, 0.6, "A's"), row(left + 90, 1, 0.6, "B's"), row(left + 180, 2, 0.6, "shared by both");
    row(left + 330, Canvas::kQuiet, 0, "free");
    canvas.words(left, y + 46, "Token 9 of A: 9 = 2 * 4 + 1, so entry 2 of the table, page 5, place 1.");
    return canvas.svg();
}

std::string fp8_picture() {
    Canvas canvas("All numbers of e4m3 from 1 to 16",
                  "Three bits after the point: eight numbers in each octave. Twice as large is twice as far apart.",
                  640, 200);
    const double left = 24, scale = 37, y = canvas.top() + 46;
    canvas.line(left + scale, y + 22, left + 16 * scale, y + 22, Canvas::kQuiet);
    int color = 0;
    for (double octave = 1; octave < 16; octave *= 2) {
        const double spacing = nearest_e4m3(octave * 1.1) - octave;
        for (int i = 0; i < 8; ++i) {
            const double x = left + (octave + i * spacing) * scale;
            canvas.line(x, y, x, y + 22, color);
        }
        canvas.words(left + octave * scale, y + 40, fmt::format("{:g}", octave), Anchor::middle, Canvas::kInk, 13,
                     true);
        if (octave > 1)
            canvas.words(left + octave * 1.5 * scale, y - 10, fmt::format("{:g} apart", spacing), Anchor::middle, color,
                         12, true);
        else
            canvas.words(left + octave * scale, y - 10, fmt::format("1/{:g}", 1 / spacing), Anchor::start, color, 12,
                         true);
        ++color;
    }
    canvas.line(left + 16 * scale, y, left + 16 * scale, y + 22, color);
    canvas.words(left + 16 * scale, y + 40, "16", Anchor::middle, Canvas::kInk, 13, true);
    canvas.words(left, y + 72,
                 fmt::format("1.1 becomes {:g}, and {:g} becomes {:g}: both within 1/16 of the number.",
                             nearest_e4m3(1.1), 13.2, nearest_e4m3(13.2)));
    return canvas.svg();
}

std::string blackwell_picture() {
    constexpr const char* kMachines[] = {"a100", "h200", "b200"};
    Canvas canvas("One tile on three generations",
                  "Forward, 128 queries x 128 keys, head_dim 128, clocks of one multiprocessor at its peak rates.", 640,
                  290);
    const double left = 150, scale = 0.105;
    double y = canvas.top() + 4;
    for (const char* name : kMachines) {
        const TileClocks clocks = tile_clocks(name, 128);
        canvas.words(16, y + 32, name, Anchor::start, Canvas::kInk, 14, true);
        const auto bar = [&](double at, int color, const char* what, double length) {
            canvas.words(left - 8, at + 16, what, Anchor::end, Canvas::kQuiet, 12);
            canvas.box(left, at, length * scale, 22, color, 0.6);
            canvas.words(left + length * scale + 8, at + 16, fmt::format("{:g}", length), Anchor::start, Canvas::kInk,
                         13, true);
        };
        bar(y, 0, "products", clocks.gemms);
        bar(y + 26, 1, "exponentials", clocks.exponentials);
        y += 68;
    }
    return canvas.svg();
}

std::string window_picture() {
    Canvas canvas("Causal, with a window of 256 keys",
                  "1024 x 1024 in tiles of 128 x 128. Rows are tiles of queries, columns are tiles of keys.", 620, 320);
    return tiles_of_mask(canvas, {.causal = Causal::bottom_right, .window_left = 255},
                         {.first_row = 4,
                          .row_step = 56,
                          .partial = "the diagonal cuts it, or the window's far end",
                          .skipped = "neither loaded nor computed, on both sides"});
}

std::string block_picture() {
    const MeasuredBlock block;
    struct Piece {
        double begin, end;
        const char* name;  ///< empty: too short for words; null: the thread block waits for others
    };
    const Piece pieces[] = {{0, block.qkv_written, "norm; Q, K, V"},
                            {block.qkv_written, block.q_ready, nullptr},
                            {block.q_ready, block.splits_written, "splits"},
                            {block.splits_written, block.splits_ready, nullptr},
                            {block.splits_ready, block.o_written, ""},
                            {block.o_written, block.o_ready, nullptr},
                            {block.o_ready, block.end, "output"}};
    Canvas canvas("An attention block: five kernels, one kernel, its bytes",
                  "Measured on an H200: a 1B model, one sequence of 1,024 tokens, bf16, microseconds.", 640, 330);
    const double left = 110, scale = 17, height = 34;
    double y = canvas.top() + 14;
    const auto bar = [&](const char* name, double length, int color) {
        canvas.words(left - 10, y + 22, name, Anchor::end, Canvas::kInk, 13, true);
        canvas.box(left, y, length * scale, height, color, 0.45);
        canvas.words(left + length * scale + 8, y + 22, fmt::format("{:.1f}", length), Anchor::start, Canvas::kInk, 13,
                     true);
    };
    bar("five kernels", block.chain, 0);
    y += height + 18;
    bar("one kernel", block.launch, 1);
    y += height + 18;
    bar("its bytes", block.floor, 2);
    y += height + 30;
    canvas.words(left - 10, y + 22, "in the kernel", Anchor::end, Canvas::kInk, 13, true);
    for (const Piece& piece : pieces) {
        const double x = left + piece.begin * scale, width = (piece.end - piece.begin) * scale;
        if (piece.name == nullptr) {
            canvas.cross(x, y, width, height, Canvas::kQuiet);
            continue;
        }
        canvas.box(x, y, width, height, 1, 0.45);
        canvas.words(x + width / 2, y + height + 16, piece.name, Anchor::middle, Canvas::kInk, 12);
    }
    y += height + 42;
    canvas.words(left, y,
                 fmt::format("Crossed out: the median thread block waits for others, {:.1f} of {:g} microseconds.",
                             block.waiting(), block.end),
                 Anchor::start, Canvas::kQuiet);
    return canvas.svg();
}

}  // namespace tessera::learn
