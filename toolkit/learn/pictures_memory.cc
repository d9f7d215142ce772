// SPDX-License-Identifier: Apache-2.0
//
// Pictures of lessons 0 to 4.
#include <fmt/format.h>

#include "learn/canvas.hpp"
#include "learn/pictures.hpp"
#include "learn/setting.hpp"
#include "plot/svg.hpp"
#include "plot/text.hpp"

namespace tessera::learn {

using schedule::Operation;

std::string definition_picture() {
    const walk::Hand hand = pencil_example();
    Canvas canvas(
        "One query through the ten lines",
        "Query 0 = (1, 0) of the example. Left: what each step makes of this row. Right: the arrays of all rows.", 620,
        270);
    struct Line {
        const char* name;
        std::vector<std::string> numbers;
        const char* array;
        int color;
    };
    std::vector<std::string> scores, powers, weights;
    for (std::size_t key = 0; key < 4; ++key) {
        const std::int64_t s = hand.steps[key < 2 ? 0 : 2].s[key % 2].value_or(0);  // row 0: its first and second tile
        scores.push_back(std::to_string(s));
        powers.push_back(walk::power_of_two(s).text());
        weights.push_back(hand.rows[0].p[key].text());
    }
    const Line lines[] = {{"s = q . k", scores, "S: N x N", 1},
                          {"2^s", powers, "E: N x N", 1},
                          {"2^s / sum", weights, "P: N x N", 3},
                          {"sum of p v", {hand.rows[0].o[0].text(), hand.rows[0].o[1].text()}, "O: N x d", 0}};
    double y = canvas.top();
    for (const Line& line : lines) {
        canvas.words(104, y + 22, line.name, Anchor::end, Canvas::kQuiet);
        double x = 116;
        for (const std::string& number : line.numbers) {
            canvas.box(x, y, 60, 34, line.color, 0.18);
            canvas.words(x + 30, y + 22, number, Anchor::middle, Canvas::kInk, 14, true);
            x += 64;
        }
        canvas.box(420, y, line.color == 0 ? 34 : 68, 34, line.color, 0.5);
        canvas.words(502, y + 22, line.array);
        y += 48;
    }
    return canvas.svg();
}

std::string traffic_picture() {
    const auto mib = [](std::initializer_list<Operation> operations) {
        return dram_of(problem_of(1024, 1, 64), Schedule::standard, {64, 64}, operations) / kMiB;
    };
    struct Bar {
        const char* name;
        double mib;
        int color;
    };
    const Bar bars[] = {{"Q, K and V read", mib({Operation::load_q, Operation::load_k, Operation::load_v}), 0},
                        {"S written", mib({Operation::store_scores}), 1},
                        {"S read", mib({Operation::load_scores}), 1},
                        {"P written", mib({Operation::store_weights}), 3},
                        {"P read", mib({Operation::load_weights}), 3},
                        {"O and LSE written", mib({Operation::store_o}), 0}};
    Canvas canvas("Memory traffic of standard attention",
                  "One head, N = 1024, head_dim 64, 2 bytes an element, S in 4. Blue: bytes that every schedule moves.",
                  620, 270);
    double y = canvas.top();
    for (const Bar& bar : bars) {
        canvas.words(142, y + 18, bar.name, Anchor::end, Canvas::kQuiet);
        canvas.box(150, y, bar.mib * 84, 26, bar.color, 0.75);
        canvas.words(158 + bar.mib * 84, y + 18, fmt::format("{:.2f} MiB", bar.mib), Anchor::start, Canvas::kInk, 13,
                     true);
        y += 33;
    }
    return canvas.svg();
}

std::string scratchpad_picture() {
    const model::Machine& m = h200();
    struct Level {
        std::string name, size;
        double tbs;
        int color;
    };
    const double per_byte = m.cores * m.rated_clock_ghz / 1000;
    const Level levels[] = {
        {"scratchpad (shared memory)",
         fmt::format("{:g} KiB beside each of {:g} multiprocessors: {:.1f} MiB", m.shared_kib.value, m.cores.value,
                     m.shared_kib * m.cores / 1024),
         per_byte * m.shared_bytes, 2},
        {"L2, shared by all", fmt::format("{:g} MiB", m.l2_mib.value), per_byte * m.l2_bytes, 0},
        {"device memory (DRAM)", fmt::format("{:g} GiB", m.memory_gib.value), m.dram_gbs / 1000, 1}};
    Canvas canvas("Closer memory is faster and smaller",
                  "An H200 at 1.83 GHz. Bars: terabytes a second of all multiprocessors together.", 620, 240);
    double y = canvas.top();
    for (const Level& level : levels) {
        canvas.words(10, y + 13, fmt::format("{}: {}", level.name, level.size), Anchor::start, Canvas::kInk);
        canvas.box(10, y + 20, level.tbs * 16.5, 24, level.color, 0.75);
        canvas.words(18 + level.tbs * 16.5, y + 37, fmt::format("{:.1f} TB/s", level.tbs), Anchor::start, Canvas::kInk,
                     13, true);
        y += 60;
    }
    return canvas.svg();
}

std::string matrix_picture() {
    plot::Figure figure{.title = "Memory that a call needs",
                        .subtitle = "Forward, 16 heads of 128, batch 1, 2 bytes an element; tensors and workspace",
                        .x = {.label = "N, queries and keys", .scale = plot::Scale::log2},
                        .y = {.label = "GiB", .scale = plot::Scale::log10},
                        .series = {},
                        .width = 520,
                        .height = 360};
    for (const Schedule schedule : {Schedule::standard, Schedule::fa2}) {
        plot::Series series{.name = name_of(schedule), .points = {}};
        for (std::int64_t len = 1024; len <= 131072; len *= 2) {
            const auto footprint = schedule::footprint(workload_of(problem_of(len, 16, 128), schedule, {128, 64}));
            series.points.push_back({static_cast<double>(len), static_cast<double>(footprint.total()) / kGiB});
        }
        series.color = schedule == Schedule::standard ? 1 : 0;
        figure.series.push_back(series);
    }
    const double all = h200().memory_gib;
    figure.guides.push_back({{1024, all}, {131072, all}, fmt::format("an H200 has {:g} GiB", all), 0.2});
    return plot::svg(figure);
}

namespace {

/// Draws a square of tiles, numbered in the order in which `schedule` computes their scores.
void order_square(Canvas& canvas, double left, double top, Schedule schedule, const char* text, int color) {
    constexpr int kTiles = 4, kSize = 38;
    constexpr std::int64_t kBlock = 16;
    const auto workload = workload_of(problem_of(kTiles * kBlock, 1, 16), schedule, {kBlock, kBlock});
    int number = 0;
    canvas.words(left, top, name_of(schedule), Anchor::start, Canvas::kInk, 14, true);
    schedule::for_each_step(workload, [&](const schedule::Step& step) {
        if (step.operation != Operation::scores) return;
        const double x = left + static_cast<double>(step.keys.begin / kBlock) * kSize;
        const double y = top + 12 + static_cast<double>(step.queries.begin / kBlock) * kSize;
        ++number;
        canvas.box(x, y, kSize - 4, kSize - 4, color, 0.08 + 0.5 * number / (kTiles * kTiles));
        canvas.words(x + (kSize - 4) / 2, y + 22, std::to_string(number), Anchor::middle, Canvas::kInk, 13, true);
    });
    double y = top + 12 + kTiles * kSize + 14;
    for (const std::string& line : plot::wrapped_to(text, 12, 168)) {
        canvas.words(left, y, line, Anchor::start, Canvas::kQuiet, 12);
        y += 15;
    }
}

}  // namespace

std::string order_picture() {
    Canvas canvas(
        "Sixteen tiles in three orders",
        "Rows are tiles of queries, columns are tiles of keys. The number says when the tile of S is computed.", 620,
        310);
    const double top = canvas.top() + 12;
    order_square(canvas, 16, top, Schedule::standard,
                 "All of S goes to memory; the softmax and P V are two more passes over it.", 1);
    order_square(canvas, 222, top, Schedule::fa1,
                 "Column by column: K, V stay in fast memory; O, m, l of every query are loaded and stored.", 3);
    order_square(canvas, 428, top, Schedule::fa2,
                 "Row by row: Q, O, m, l stay in fast memory until the row is done; K, V are loaded.", 0);
    return canvas.svg();
}

}  // namespace tessera::learn
