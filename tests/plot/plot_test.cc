// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "plot/frame.hpp"
#include "plot/png.hpp"
#include "plot/style.hpp"
#include "plot/svg.hpp"
#include "plot/text.hpp"
#include "plot/ticks.hpp"
#include "plot/xml_check.hpp"
#include "tessera/error.hpp"

namespace tessera::plot::plot_test {
namespace {

Figure speed_by_length() {
    Figure figure{.title = "Speed by length <forward> & causal",
                  .subtitle = "bf16, 16 heads of 128",
                  .x = {.label = "length (tokens)", .scale = Scale::log2},
                  .y = {.label = "TFLOP/s", .from_zero = true},
                  .series = {{.name = "fa3"}, {.name = "fa2"}, {.name = "standard"}}};
    double speed = 100;
    for (double length = 512; length <= 16384; length *= 2, speed += 90) {
        figure.series[0].points.push_back({length, speed, "fa3 at 512"});
        figure.series[1].points.push_back({length, speed * 0.6});
        figure.series[2].points.push_back({length, 50});
    }
    return figure;
}

std::vector<std::string> texts(const std::vector<Tick>& ticks) {
    std::vector<std::string> result;
    for (const Tick& tick : ticks) result.push_back(tick.text);
    return result;
}

using Texts = std::vector<std::string>;

TEST(Ticks, linear_ticks_are_round_numbers) {
    EXPECT_EQ(texts(ticks({0, 700}, Scale::linear, 7)), (Texts{"0", "100", "200", "300", "400", "500", "600", "700"}));
    EXPECT_EQ(texts(ticks({0, 1}, Scale::linear, 5)), (Texts{"0", "0.2", "0.4", "0.6", "0.8", "1"}));
    EXPECT_EQ(texts(ticks({-0.3, 0.3}, Scale::linear, 3)), (Texts{"-0.2", "0", "0.2"}));
}

TEST(Ticks, lengths_are_powers_of_two) {
    EXPECT_EQ(texts(ticks({500, 9000}, Scale::log2, 8)), (Texts{"512", "1k", "2k", "4k", "8k"}));
    EXPECT_EQ(texts(ticks({500, 9000}, Scale::log2, 3)), (Texts{"512", "", "2k", "", "8k"}));
    EXPECT_EQ(texts(ticks({2100, 3900}, Scale::log2, 8)), (Texts{"2500", "3000", "3500"}));  // between powers of two
}

TEST(Ticks, decades_have_numbers_and_their_parts_lines) {
    EXPECT_EQ(texts(ticks({1, 100}, Scale::log10, 8)), (Texts{"1", "2", "5", "10", "20", "50", "100"}));
    EXPECT_EQ(texts(ticks({1, 100}, Scale::log10, 4)), (Texts{"1", "", "", "10", "", "", "100"}));
    EXPECT_EQ(texts(ticks({1e-3, 1e3}, Scale::log10, 7)), (Texts{"0.001", "0.01", "0.1", "1", "10", "100", "1k"}));
}

TEST(Ticks, numbers_are_short) {
    EXPECT_EQ(number_text(0), "0");
    EXPECT_EQ(number_text(1500), "1.5k");
    EXPECT_EQ(number_text(1500, true), "1500");
    EXPECT_EQ(number_text(131072, true), "128k");
    EXPECT_EQ(number_text(0.30000000000000004), "0.3");
    EXPECT_EQ(number_text(989e12), "989T");
}

TEST(Limits, refuse_what_does_not_fit_the_scale) {
    const Axis log{.label = "x", .scale = Scale::log10};
    for (const double bad : {0.0, -1.0, std::nan(""), std::numeric_limits<double>::infinity()}) {
        try {
            limits_of(log, "x axis", {1, bad});
            ADD_FAILURE() << bad;
        } catch (const Error& error) {
            EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
            EXPECT_NE(std::string(error.what()).find("x axis"), std::string::npos) << error.what();
        }
    }
    EXPECT_THROW(limits_of({.label = "y", .least = 5, .most = 5}, "y axis", {}), Error);
}

TEST(Limits, hold_all_values) {
    for (const Scale scale : {Scale::linear, Scale::log2, Scale::log10}) {
        const Limits limits = limits_of({.label = "x", .scale = scale}, "x axis", {3, 700, 42});
        EXPECT_LT(limits.least, 3.0001);
        EXPECT_GT(limits.most, 700);
        EXPECT_NEAR(along(limits.least, limits, scale), 0, 1e-12);
        EXPECT_NEAR(along(limits.most, limits, scale), 1, 1e-12);
    }
}

TEST(Frame, names_at_lines_do_not_overlap_and_stay_inside) {
    Figure figure = speed_by_length();
    for (auto& series : figure.series) {
        for (auto& point : series.points) point.y = 100;  // all lines end at the same place
    }
    const Frame frame(figure);
    ASSERT_EQ(frame.end_labels.size(), 3U);
    for (std::size_t i = 0; i + 1 < 3; ++i) {
        EXPECT_GE(frame.end_labels[i + 1].y - frame.end_labels[i].y, 14);
    }
    EXPECT_GE(frame.end_labels.front().y, frame.top);
    EXPECT_LE(frame.end_labels.back().y, frame.bottom);
}

TEST(Frame, a_long_legend_wraps_within_the_width) {
    Figure figure = speed_by_length();
    figure.names = Names::legend;
    for (int i = 0; i < 6; ++i) figure.series.push_back({.name = "a peer with a long name " + std::to_string(i)});
    const Frame frame(figure);
    ASSERT_EQ(frame.legend.size(), 9U);
    for (const LegendEntry& entry : frame.legend) {
        const double end = entry.x + 28 + text_width(figure.series[entry.series].name, kTextSize);
        EXPECT_LE(end, figure.width);
        EXPECT_LT(entry.y, frame.top);
    }
}

TEST(Svg, is_well_formed_and_refers_to_nothing_outside) {
    for (const Home home : {Home::file, Home::page}) {
        Figure figure = speed_by_length();
        figure.guides = {{{512, 500}, {16384, 500}, "the roof"}};
        figure.notes = {{{1024, 200}, "here & there"}};
        const std::string text = svg(figure, home);
        EXPECT_EQ(first_xml_error(text), "");
        EXPECT_EQ(text.find("href"), std::string::npos);
        EXPECT_EQ(text.find("url("), std::string::npos);
        EXPECT_EQ(text.find(" id="), std::string::npos);
        EXPECT_NE(text.find("&lt;forward&gt; &amp; causal"), std::string::npos);
        EXPECT_EQ(text.find("<style>") != std::string::npos, home == Home::file);
    }
}

TEST(Svg, a_note_stands_over_its_place_or_under_it) {
    const auto baseline = [](bool below) {
        Figure figure = speed_by_length();
        figure.notes = {{{1024, 200}, "here", below}};
        const std::string text = svg(figure);
        const std::size_t end = text.find(">here<"), y = text.rfind(" y=\"", end);
        return std::stod(text.substr(y + 4));
    };
    const double place = Frame(speed_by_length()).py(200);
    EXPECT_LT(baseline(false), place - 4);
    EXPECT_GT(baseline(true), place + kTextSize);
}

/// Lengths at the ends of curves that meet.
TEST(Svg, notes_stand_on_no_other_and_within_the_area) {
    Figure figure = speed_by_length();
    for (int i = 0; i < 12; ++i)
        figure.notes.push_back({{1024.0 + 40 * i, 200.0 + 5 * (i % 5)}, std::to_string(512 + i), i % 2 == 0});
    figure.notes.push_back({{16384, 500}, "at the edge"});
    const Frame frame(figure);
    ASSERT_GE(frame.notes.size(), 3U);
    for (std::size_t i = 0; i < frame.notes.size(); ++i) {
        const NoteLabel& a = frame.notes[i];
        const double end = a.x + text_width(a.text, kTextSize);
        EXPECT_GE(a.x, frame.left - 1);
        EXPECT_LE(end, frame.right + 1);
        for (std::size_t j = 0; j < i; ++j) {
            const NoteLabel& b = frame.notes[j];
            const bool apart =
                end <= b.x || b.x + text_width(b.text, kTextSize) <= a.x || std::abs(a.y - b.y) >= kTextSize;
            EXPECT_TRUE(apart) << a.text << " stands on " << b.text;
        }
    }
    // Notes beside each other with equal texts become one.
    figure.notes = {{{1024, 200}, "512"}, {{1030, 202}, "512"}, {{16384, 200}, "512"}};
    EXPECT_EQ(Frame(figure).notes.size(), 2U);
    // Not if they belong to different series: their colours tell whose they are.
    figure.notes = {{{1024, 200}, "512", false, 0}, {{1030, 202}, "512", false, 1}};
    EXPECT_EQ(Frame(figure).notes.size(), 2U);
    EXPECT_NE(svg(figure).find("fill=\"currentColor\" stroke=\"#ffffff\" stroke-width=\"4\""), std::string::npos);
}

/// The label of a roof gives way to points above its line.
TEST(Svg, the_label_of_a_roof_hides_no_point_if_it_need_not) {
    Figure figure{
        .title = "t", .x = {.label = "x", .least = 0, .most = 100}, .y = {.label = "y", .least = 0, .most = 100}};
    figure.guides = {{{0, 50}, {100, 50}, "a roof", 0.5}};
    const auto place = [&] {
        const std::string text = svg(figure);
        const std::size_t end = text.find(">a roof");
        const std::string element = text.substr(text.rfind("<text", end), end - text.rfind("<text", end));
        const std::size_t at = element.find("translate(");
        return std::pair(std::stod(element.substr(at + 10)), element.find("y=\"14\"") != std::string::npos);
    };
    const auto [middle, below] = place();
    EXPECT_FALSE(below);
    figure.series = {{.name = "s", .points = {{50, 54}}}};
    EXPECT_NE(place(), std::pair(middle, false)) << "a point stands there";
    figure.series = {{.name = "s", .points = {{0, 54}, {100, 54}}}};
    EXPECT_TRUE(place().second) << "a line runs above all of the roof";
}

/// Bars of errors end with the plotting area.
TEST(Svg, bars_end_at_the_edge_of_the_area) {
    Figure figure{.title = "t", .x = {.label = "x"}, .y = {.label = "y", .least = 10, .most = 100}};
    figure.series = {{.name = "s", .points = {{1, 50, "", 1, 60}, {2, 50, "", 40, 60}}}};
    const Frame frame(figure);
    const std::string text = svg(figure);
    EXPECT_NE(text.find(fmt::format("V{:.1f}M", frame.bottom)), std::string::npos);
    EXPECT_EQ(text.find(fmt::format("V{:.1f}M", frame.py(1))), std::string::npos);
}

/// A slope that is shorter than its label has it beside it, not over the numbers of the axis.
TEST(Svg, the_label_of_a_short_slope_stays_inside) {
    Figure figure = speed_by_length();
    figure.guides = {{{512, 100}, {700, 300}, "DRAM 352 GB/s and more"}};
    const std::string text = svg(figure);
    const std::size_t end = text.find(">DRAM 352");
    ASSERT_NE(end, std::string::npos);
    EXPECT_EQ(text.substr(text.rfind("<text", end), end - text.rfind("<text", end)).find("rotate"), std::string::npos);
    EXPECT_GT(std::stod(text.substr(text.rfind(" x=\"", end) + 4)), Frame(figure).left);
    figure.guides = {{{512, 100}, {16384, 900}, "DRAM"}};
    const std::string steep = svg(figure);
    EXPECT_NE(steep.find("rotate"), std::string::npos);
}

TEST(Xml, errors_are_found) {
    EXPECT_EQ(first_xml_error("<a><b x=\"1\"/>text</a>"), "");
    EXPECT_NE(first_xml_error("<a><b></a>"), "");
    EXPECT_NE(first_xml_error("<a x=1></a>"), "");
    EXPECT_NE(first_xml_error("<a>&nosuch;</a>"), "");
    EXPECT_NE(first_xml_error("<a>"), "");
    EXPECT_NE(first_xml_error("<a></a><a></a>"), "");
}

TEST(Png, is_a_picture_of_the_asked_size_or_a_clear_refusal) {
    const Figure figure = speed_by_length();
    if (!can_draw_png()) {
        EXPECT_THROW(png(svg(figure)), Error);
        return;
    }
    const std::string bytes = png(svg(figure), 2);
    ASSERT_GT(bytes.size(), 24U);
    EXPECT_EQ(bytes.substr(0, 8), "\x89PNG\r\n\x1a\n");
    const auto at = [&](std::size_t i) { return static_cast<unsigned char>(bytes[i]); };
    EXPECT_EQ(at(18) * 256 + at(19), static_cast<int>(2 * figure.width));
    EXPECT_EQ(at(22) * 256 + at(23), static_cast<int>(2 * Frame(figure).height));
    EXPECT_THROW(png("no svg"), Error);
    EXPECT_THROW(png(svg(figure), 1e6), Error);
}

TEST(Panels, stand_in_one_drawing_with_one_legend) {
    Panels panels{.title = "Two", .legend = speed_by_length().series, .footer = {"where from"}};
    panels.panels = {speed_by_length(), speed_by_length()};
    panels.panels[1].title = "another";
    panels.columns = 2;
    const std::string text = svg(panels);
    EXPECT_EQ(first_xml_error(text), "");
    const auto count = [&](const std::string& part) {
        int found = 0;
        for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++found;
        return found;
    };
    EXPECT_EQ(count(">fa3<"), 1) << "the legend stands once";
    EXPECT_EQ(count(">another<"), 1);
    EXPECT_EQ(count(">where from<"), 1);
    panels.columns = 0;
    EXPECT_THROW(svg(panels), Error);
    panels.columns = 1;
    panels.panels.clear();
    EXPECT_THROW(svg(panels), Error);
}

}  // namespace
}  // namespace tessera::plot::plot_test
