// SPDX-License-Identifier: Apache-2.0
//
// Pictures of lessons 11 to 16.
#include <fmt/format.h>

#include <map>
#include <string_view>

#include "diagnose/family_tree.hpp"
#include "learn/canvas.hpp"
#include "learn/pictures.hpp"
#include "learn/setting.hpp"
#include "measure/sweep.hpp"
#include "plot/svg.hpp"
#include "plot/text.hpp"

namespace tessera::learn {

using schedule::Operation;

std::string loops_picture() {
    struct Piece {
        const char* name;
        int color;
        std::initializer_list<Operation> operations;
    };
    const Piece pieces[] = {
        {"Q", 0, {Operation::load_q}},
        {"K, V", 2, {Operation::load_k, Operation::load_v}},
        {"O, m, l between tiles of keys", 1, {Operation::init_state, Operation::load_state, Operation::store_state}},
        {"O and LSE at the end", 6, {Operation::store_o}}};
    Canvas canvas(
        "Bytes moved by each order of the loops",
        "Forward, one head, N = 1024, head_dim 64, 2 bytes an element, O between tiles in 4; tiles of 64 x 64.", 620,
        250);
    const double left = 60, scale = 42;
    double y = canvas.top() + 4;
    for (const Schedule schedule : {Schedule::fa1, Schedule::fa2}) {
        const auto workload = workload_of(problem_of(1024, 1, 64), schedule, {64, 64});
        canvas.words(left - 10, y + 28, name_of(schedule), Anchor::end, Canvas::kInk, 14, true);
        double x = left, all = 0;
        for (const Piece& piece : pieces) {
            const double mib = bytes_of(workload, piece.operations) / kMiB;
            if (mib == 0) continue;
            canvas.box(x, y, mib * scale, 44, piece.color, 0.6);
            if (mib * scale > 40)
                canvas.words(x + mib * scale / 2, y + 27, fmt::format("{:.2f}", mib), Anchor::middle, Canvas::kInk, 13,
                             true);
            x += mib * scale, all += mib;
        }
        canvas.words(x + 8, y + 27, fmt::format("{:.2f} MiB", all), Anchor::start, Canvas::kInk, 13, true);
        y += 58;
    }
    double x = left;
    for (const Piece& piece : pieces) {
        canvas.box(x, y + 6, 14, 14, piece.color, 0.6);
        canvas.words(x + 20, y + 18, piece.name, Anchor::start, Canvas::kQuiet);
        x += 36 + plot::text_width(piece.name, 13);
    }
    return canvas.svg();
}

namespace {

/// Draws an interval of one unit's time.
void draw_interval(Canvas& canvas, double x, double y, double width, int color, const char* name) {
    canvas.box(x, y, width, 28, color, 0.45);
    canvas.words(x + width / 2, y + 19, name, Anchor::middle, Canvas::kInk, 12, true);
}

}  // namespace

std::string overlap_picture() {
    const OverlapClocks clocks = overlap_clocks(128);
    Canvas canvas(
        "One after the other, and side by side",
        fmt::format("A tile of 128 queries x 176 keys, head_dim 128, on an H200: {:g} clocks of multiplications, {:g} "
                    "of exponentials. A and B are its halves, 64 queries each, of two groups of warps.",
                    clocks.gemms, clocks.exponentials),
        640, 330);
    const double left = 112, scale = 0.112;
    const double half = clocks.gemms / 4 * scale, exps = clocks.exponentials / 2 * scale;
    double y = canvas.top() + 18;
    const auto lanes = [&](const std::string& title, double end) {
        canvas.words(8, y - 6, title, Anchor::start, Canvas::kInk, 13, true);
        canvas.words(left - 8, y + 19, "multiplications", Anchor::end, Canvas::kQuiet);
        canvas.words(left - 8, y + 53, "exponentials", Anchor::end, Canvas::kQuiet);
        canvas.line(left + end, y - 4, left + end, y + 70, Canvas::kInk);
        canvas.words(left + end, y + 84, fmt::format("{:.0f} clk", end / scale), Anchor::middle, Canvas::kInk, 12,
                     true);
    };
    lanes("One after the other: one unit always waits", 2 * (2 * half + exps));
    double x = left;
    for (const int tile : {0, 1}) {
        const int color = tile == 0 ? 0 : 1;
        draw_interval(canvas, x, y, half, color, tile == 0 ? "S A" : "S B");
        draw_interval(canvas, x + half, y + 34, exps, color, tile == 0 ? "exp A" : "exp B");
        draw_interval(canvas, x + half + exps, y, half, color, tile == 0 ? "P V A" : "P V B");
        x += 2 * half + exps;
    }
    y += 126;
    lanes("Side by side: exponentials of A beside multiplications of B", 4 * half);
    draw_interval(canvas, left, y, half, 0, "S A");
    draw_interval(canvas, left + half, y + 34, exps, 0, "exp A");
    draw_interval(canvas, left + half, y, half, 1, "S B");
    draw_interval(canvas, left + 2 * half, y + 34, exps, 1, "exp B");
    draw_interval(canvas, left + 2 * half, y, half, 0, "P V A");
    draw_interval(canvas, left + 3 * half, y, half, 1, "P V B");
    return canvas.svg();
}

std::string kernel_name_picture() {
    struct Piece {
        std::string text, meaning;
    };
    const diagnose::NameReading reading = diagnose::read_name(
        "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4, false, false, "
        "cutlass::bfloat16_t>>");
    const Piece pieces[] = {{"pytorch_flash::", reading.library},
                            {"flash_fwd_kernel", fmt::format("{}, {}", reading.algorithm, name_of(reading.pass))},
                            {"Flash_fwd_kernel_traits<128,", fmt::format("head_dim {}", reading.head_dim)},
                            {"128, 64,", fmt::format("tiles of {} queries x {} keys", reading.tile_q, reading.tile_kv)},
                            {"4, false, false,", "warps; how Q is kept"},
                            {"cutlass::bfloat16_t>", reading.dtype}};
    Canvas canvas("How to read a kernel's name", "One kernel of a PyTorch profile, piece by piece.", 560, 270);
    double y = canvas.top();
    int color = 0;
    for (const Piece& piece : pieces) {
        canvas.box(10, y, 250, 28, color, 0.18);
        canvas.words(20, y + 19, piece.text, Anchor::start, Canvas::kInk, 13, true);
        canvas.line(264, y + 14, 290, y + 14, color, true);
        canvas.words(300, y + 19, piece.meaning);
        y += 35;
        color = (color + 1) % 4;
    }
    return canvas.svg();
}

std::string family_picture() {
    const auto relatives = diagnose::relatives();
    Canvas canvas("The family tree of attention kernels",
                  "Each kernel stands below the one it is derived from, with its date.", 560,
                  70 + 25 * static_cast<double>(relatives.size()));
    std::map<std::string_view, std::pair<double, double>> positions;
    // Children are drawn below their parents, depth first.
    double y = canvas.top();
    const auto add = [&](const auto& self, const diagnose::Relative& one, int depth) -> void {
        const double x = 16 + depth * 34.0;
        positions[one.name] = {x, y};
        const auto parent = positions.find(one.parent);
        if (parent != positions.end()) {
            canvas.line(parent->second.first + 5, parent->second.second + 14, parent->second.first + 5, y + 9,
                        Canvas::kQuiet);
            canvas.line(parent->second.first + 5, y + 9, x, y + 9, Canvas::kQuiet);
        }
        const bool version = std::string_view(one.name).starts_with("fa") && std::string_view(one.name).size() == 3;
        canvas.box(x, y + 4, 10, 10, version ? 1 : 0, version ? 0.9 : 0.4);
        canvas.words(x + 18, y + 14, fmt::format("{}, {}", one.title, one.since), Anchor::start, Canvas::kInk, 13,
                     version);
        y += 25;
        for (const diagnose::Relative& child : relatives) {
            if (std::string_view(child.parent) == one.name) self(self, child, depth + 1);
        }
    };
    add(add, relatives.front(), 0);
    return canvas.svg();
}

std::string prediction_picture() {
    const measure::SweepQuestion question{
        h200(), {Schedule::standard, Schedule::fa2, Schedule::fa3}, {Pass::forward}, {.by = "published"}};
    std::vector<measure::SweepRow> rows;
    for (std::int64_t len = 512; len <= 16384; len *= 2)
        rows.push_back(measure::sweep_one(problem_of(len, 16, 128), question));
    plot::Figure figure = measure::roofline_figure(question.machine, rows);
    figure.width = 600;
    figure.height = 400;
    return plot::svg(figure);
}

std::string worksheet_picture() {
    const measure::SweepRow row = predicted(h200(), problem_of(4096, 16, 128), {Schedule::fa3});
    const model::Prediction& prediction = row.of(Schedule::fa3)->longest();
    Canvas canvas(
        "Where the predicted time goes",
        fmt::format("fa3 on an H200, 16 heads of 128, N = 4096: {:.3f} ms. A bar for each part of the worksheet.",
                    prediction.ms),
        620, 86 + 34 * static_cast<double>(prediction.parts.size()));
    const double left = 190, scale = 320 / prediction.ms;
    double y = canvas.top(), x = left;
    int color = 0;
    for (const model::Part& part : prediction.parts) {
        canvas.words(left - 10, y + 18, part.name, Anchor::end, Canvas::kQuiet);
        canvas.box(x, y, part.ms * scale, 26, color, 0.6);
        canvas.words(x + part.ms * scale + 8, y + 18, fmt::format("{:.4f} ms", part.ms), Anchor::start, Canvas::kInk,
                     13, true);
        x += part.ms * scale;
        y += 34;
        color = (color + 1) % 5;
    }
    return canvas.svg();
}

}  // namespace tessera::learn
