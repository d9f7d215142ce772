// SPDX-License-Identifier: Apache-2.0
//
// Pictures of lessons 5 to 10.
#include <fmt/format.h>

#include <cmath>
#include <string_view>

#include "cuda/fa2/host/config.h"
#include "learn/canvas.hpp"
#include "learn/mask_tiles.hpp"
#include "learn/pictures.hpp"
#include "learn/setting.hpp"
#include "plot/svg.hpp"

namespace tessera::learn {

using schedule::Operation;

std::string tile_size_picture() {
    cuda::fa2::Config config = cuda::fa2::HeadDim128::kConfig;
    config.rows_in_shared = false;
    Canvas canvas("Contents of the scratchpad",
                  "head_dim 128, 2 bytes an element, a tile of 128 queries, K and V twice. Lines: an A100's and an "
                  "H200's scratchpad.",
                  620, 330);
    const double left = 140, scale = 1.6, top = canvas.top() + 22;
    double y = top;
    for (config.block_kv = 32; config.block_kv <= 256; config.block_kv += 32) {
        const double q = config.q_bytes() / kKiB * scale, kv = config.stages * config.kv_bytes() / kKiB * scale;
        canvas.words(left - 8, y + 16, fmt::format("{} keys: {} KiB", config.block_kv, config.shared_bytes() / 1024),
                     Anchor::end, Canvas::kQuiet);
        canvas.box(left, y, q, 22, 0, 0.7);
        canvas.box(left + q, y, kv, 22, 1, 0.6);
        canvas.box(left + q + kv, y, kv, 22, 3, 0.6);
        if (config.block_kv == 256) {
            canvas.words(left + q / 2, y + 16, "Q", Anchor::middle, Canvas::kInk, 13, true);
            canvas.words(left + q + kv / 2, y + 16, "K, twice", Anchor::middle, Canvas::kInk, 13, true);
            const double from = model::find_machine("a100")->shared_kib * scale;  // between the lines
            const double to = model::find_machine("h200")->shared_kib * scale;
            canvas.words(left + (from + to) / 2, y + 16, "V, twice", Anchor::middle, Canvas::kInk, 13, true);
        }
        y += 28;
    }
    for (const char* name : {"a100", "h200"}) {
        const model::Machine& m = *model::find_machine(name);
        const double x = left + m.shared_kib * scale;
        canvas.line(x, top - 6, x, y, Canvas::kInk);
        const bool left_of_it = std::string_view(name) == "a100";
        canvas.words(left_of_it ? x + 6 : x - 6, top - 10, fmt::format("{}: {:g} KiB", name, m.shared_kib.value),
                     left_of_it ? Anchor::end : Anchor::start, Canvas::kInk, 12, true);
    }
    return canvas.svg();
}

std::string running_maximum_picture() {
    const std::vector<std::int64_t> scores = {1, 3, 2, 5, 4, 0, 6, 3};
    const walk::Hand hand = stream_scores(scores, 1);
    plot::Figure figure{.title = "One row of scores streams by",
                        .subtitle = "m never falls; m + log2 l ends at the log of the whole sum, base 2",
                        .x = {.label = "keys seen", .least = 0.5, .most = 8.5},
                        .y = {.label = "score", .least = -1, .most = 8},
                        .series = {},
                        .names = plot::Names::legend,
                        .width = 520,
                        .height = 360};
    plot::Series points{.name = "score of this key", .points = {}, .mark = plot::Mark::points, .color = 6};
    plot::Series maximum{.name = "m, the largest so far", .points = {}, .mark = plot::Mark::line, .color = 1};
    plot::Series sum{.name = "m + log2 l", .points = {}, .color = 0};
    for (std::size_t i = 0; i < scores.size(); ++i) {
        const double x = static_cast<double>(i + 1), m = static_cast<double>(*hand.steps[i].m);
        points.points.push_back({x, static_cast<double>(scores[i])});
        maximum.points.push_back({x - 0.5, m});
        maximum.points.push_back({x + 0.5, m});
        sum.points.push_back({x, m + std::log2(hand.steps[i].l.value())});
    }
    figure.series = {points, maximum, sum};
    return plot::svg(figure);
}

namespace {

std::string vector_text(const walk::HandVector& v) { return fmt::format("({}, {})", v[0].text(), v[1].text()); }

/// Draws a cell of squared paper with its number.
void cell(Canvas& canvas, double x, double y, const std::string& text, int color) {
    canvas.box(x, y, 40, 30, color, 0.18);
    canvas.words(x + 20, y + 20, text, Anchor::middle);
}

}  // namespace

std::string one_tile_picture() {
    const walk::Hand hand = pencil_example();
    Canvas canvas("Queries 0 and 1 with all keys, two at a time",
                  "m, l and O stay in fast memory from left to right; s and p last for one tile.", 640, 300);
    const double top = canvas.top();
    for (int tile = 0; tile < 2; ++tile) {
        const double left = 20 + tile * 230;
        canvas.words(left, top + 14, fmt::format("keys {} and {}", 2 * tile, 2 * tile + 1), Anchor::start, tile, 14,
                     true);
        for (int row = 0; row < 2; ++row) {
            const walk::HandStep& step = hand.steps[static_cast<std::size_t>(tile * 2 + row)];
            const double y = top + 30 + row * 110;
            canvas.words(left, y + 20, "s");
            canvas.words(left, y + 54, "p");
            for (std::size_t j = 0; j < 2; ++j) {
                cell(canvas, left + 18 + static_cast<double>(j) * 42, y, std::to_string(*step.s[j]), tile);
                cell(canvas, left + 18 + static_cast<double>(j) * 42, y + 34, step.p[j].text(), tile);
            }
            canvas.words(left + 112, y + 12, fmt::format("m = {}", *step.m));
            canvas.words(left + 112, y + 30, fmt::format("l = {}", step.l.text()));
            canvas.words(left + 112, y + 48, fmt::format("O = {}", vector_text(step.o)));
            if (tile > 0)
                canvas.words(left + 112, y + 66, fmt::format("rescale {}", step.rescale.text()), Anchor::start, 1);
            else canvas.words(left, y + 84, fmt::format("query {}", row), Anchor::start, Canvas::kQuiet);
        }
    }
    canvas.words(492, top + 14, "finish: O / l", Anchor::start, 2, 14, true);
    for (std::size_t row = 0; row < 2; ++row)
        canvas.words(492, top + 60 + static_cast<double>(row) * 110, vector_text(hand.rows[row].o), Anchor::start,
                     Canvas::kInk, 14, true);
    return canvas.svg();
}

std::string recompute_picture() {
    const walk::Hand hand = pencil_example();
    Canvas canvas(
        "One number a row brings the weights back",
        "Row 0 of the example, to base 2. The forward keeps the LSE and drops s and p; the backward makes both "
        "again.",
        640, 250);
    const double top = canvas.top() + 8;
    const walk::HandRow& row = hand.rows[0];
    const double lse = static_cast<double>(*row.m) + std::log2(row.l.value());
    const auto table = [&](double left, const char* title, bool weights) {
        canvas.words(left, top + 14, title, Anchor::start, Canvas::kInk, 14, true);
        canvas.words(left, top + 50, "s");
        canvas.words(left, top + 84, weights ? "P" : "p");
        for (std::size_t key = 0; key < 4; ++key) {
            const walk::HandStep& step = hand.steps[key < 2 ? 0 : 2];
            const double x = left + 18 + static_cast<double>(key) * 42;
            cell(canvas, x, top + 30, std::to_string(*step.s[key % 2]), weights ? 0 : 1);
            cell(canvas, x, top + 64, weights ? row.p[key].text() : step.p[key % 2].text(), weights ? 0 : 1);
        }
    };
    table(16, "forward, tile by tile", false);
    canvas.cross(30, top + 28, 176, 68, Canvas::kQuiet);
    table(430, "backward, from the LSE", true);
    canvas.words(16, top + 124, fmt::format("at the end m = {}, l = {}", *row.m, row.l.text()));
    canvas.box(236, top + 44, 152, 36, 2, 0.3);
    canvas.words(312, top + 67, fmt::format("LSE = m + log2 l = {:g}", lse), Anchor::middle, Canvas::kInk, 12, true);
    canvas.line(212, top + 62, 232, top + 62, 2, true);
    canvas.line(392, top + 62, 422, top + 62, 2, true);
    canvas.words(312, top + 100, "kept for each row", Anchor::middle, Canvas::kQuiet, 12);
    canvas.words(430, top + 124, "P = 2^(s - LSE), final");
    canvas.words(16, top + 162, "s and p of a tile last for that tile. Later tiles would rescale p.", Anchor::start,
                 Canvas::kQuiet, 12);
    return canvas.svg();
}

std::string gradients_picture() {
    constexpr int kTiles = 4, kSize = 52;
    constexpr std::int64_t kBlock = 16;
    Canvas canvas(
        "The backward goes down the columns",
        "The numbers give the order in which tiles are recomputed. dK and dV of a column stay in fast memory; "
        "every column adds to dQ of all rows.",
        620, 330);
    const double left = 78, top = canvas.top() + 28;
    const auto workload =
        workload_of(problem_of(kTiles * kBlock, 1, 16), Schedule::fa2, {kBlock, kBlock}, Pass::backward);
    int number = 0;
    schedule::for_each_step(workload, [&](const schedule::Step& step) {
        if (step.operation != Operation::weights_again) return;
        const auto column = static_cast<double>(step.keys.begin / kBlock);
        const auto row = static_cast<double>(step.queries.begin / kBlock);
        ++number;
        canvas.box(left + column * kSize, top + row * kSize, kSize - 5, kSize - 5, static_cast<int>(column) % 2 * 2,
                   0.25);
        canvas.words(left + column * kSize + 23, top + row * kSize + 29, std::to_string(number), Anchor::middle,
                     Canvas::kInk, 14, true);
    });
    for (int i = 0; i < kTiles; ++i) {
        const double at = i * kSize + 23.0;
        canvas.words(left + at, top - 20, fmt::format("keys {}", i), Anchor::middle, Canvas::kQuiet, 12);
        canvas.line(left + at, top - 16, left + at, top - 3, 2, true);
        canvas.words(left + at, top + kTiles * kSize + 12, "dK, dV", Anchor::middle, 2, 12, true);
        canvas.line(left + kTiles * kSize, top + at, left + kTiles * kSize + 26, top + at, 1, true);
        canvas.words(left + kTiles * kSize + 32, top + at + 4, fmt::format("dQ {}", i), Anchor::start, 1, 13, true);
        canvas.words(left - 8, top + at + 4, fmt::format("queries {}", i), Anchor::end, Canvas::kQuiet, 12);
    }
    const double x = 400;
    canvas.words(x, top + 14, "in each tile", Anchor::start, Canvas::kInk, 13, true);
    const char* lines[] = {"S = scale Q K^T", "P = exp(S - LSE)",   "dV += P^T dO",    "dP = dO V^T",
                           "dS = P (dP - D)", "dK += scale dS^T Q", "dQ += scale dS K"};
    for (std::size_t i = 0; i < std::size(lines); ++i)
        canvas.words(x, top + 40 + static_cast<double>(i) * 22, lines[i], Anchor::start,
                     i == 6             ? 1
                     : i == 2 || i == 5 ? 2
                                        : Canvas::kInk);
    return canvas.svg();
}

std::string tiles_of_mask(Canvas& canvas, const Mask& mask, const MaskTexts& texts) {
    constexpr int kTiles = 8, kSize = 30;
    constexpr std::int64_t kBlock = 128;
    const Band band = mask.bind(kTiles * kBlock, kTiles * kBlock);
    const double left = 16, top = canvas.top();
    int counts[3] = {0, 0, 0};
    for (int i = 0; i < kTiles; ++i) {
        for (int j = 0; j < kTiles; ++j) {
            const Coverage coverage = band.coverage(i * kBlock, (i + 1) * kBlock, j * kBlock, (j + 1) * kBlock);
            const double x = left + j * kSize, y = top + i * kSize;
            ++counts[static_cast<int>(coverage)];
            if (coverage == Coverage::empty) canvas.box(x, y, kSize - 3, kSize - 3, Canvas::kQuiet, 0);
            else canvas.box(x, y, kSize - 3, kSize - 3, coverage == Coverage::full ? 0 : 1, 0.6);
            if (coverage == Coverage::partial) canvas.line(x, y, x + kSize - 3, y + kSize - 3, Canvas::kInk);
        }
    }
    const double x = left + kTiles * kSize + 24;
    const auto row = [&](int number, int color, double strength, Coverage coverage, const char* name,
                         const char* what) {
        const double y = top + texts.first_row + number * texts.row_step;
        canvas.box(x, y, 22, 22, color, strength);
        canvas.words(x + 32, y + 10, fmt::format("{} {}", counts[static_cast<int>(coverage)], name), Anchor::start,
                     Canvas::kInk, 14, true);
        canvas.words(x + 32, y + 27, what, Anchor::start, Canvas::kQuiet, 12);
    };
    row(0, 0, 0.6, Coverage::full, "full", "no mask code runs");
    row(1, 1, 0.6, Coverage::partial, "partial", texts.partial);
    row(2, Canvas::kQuiet, 0, Coverage::empty, "skipped", texts.skipped);
    return canvas.svg();
}

std::string causal_picture() {
    Canvas canvas("Causal: 1024 x 1024 in tiles of 128 x 128", "Rows are tiles of queries, columns are tiles of keys.",
                  600, 310);
    return tiles_of_mask(canvas, {.causal = Causal::bottom_right},
                         {.first_row = 20,
                          .row_step = 60,
                          .partial = "each score is compared with the diagonal",
                          .skipped = "neither loaded nor computed"});
}

}  // namespace tessera::learn
