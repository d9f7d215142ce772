// SPDX-License-Identifier: Apache-2.0
#include "report/report.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "plot/svg.hpp"
#include "plot/xml_check.hpp"
#include "report/chart.hpp"
#include "report/figures.hpp"
#include "tessera/error.hpp"

namespace tessera::report::report_test {
namespace {

using measure::Record;

Record measured(const std::string& by, const std::string& schedule, std::int64_t len, double ms) {
    Record r{.by = by, .schedule = schedule, .pass = "forward", .dtype = "bf16", .batch = 16384 / len, .len_q = len};
    r.len_kv = len;
    r.heads_q = r.heads_kv = 16;
    r.head_dim = r.head_dim_v = 128;
    r.mask = "causal";
    r.device = "NVIDIA H200";
    r.date = "2026-11-20";
    r.ms = ms;
    r.tflops = 2.0 * static_cast<double>(r.batch * 16 * len * (len + 1) * 128) / (ms * 1e9);
    return r;
}

std::vector<Record> some_records() {
    std::vector<Record> records;
    for (std::int64_t len = 512; len <= 16384; len *= 2) {
        const double ms = 0.2 * static_cast<double>(len) / 512 + 0.1;
        records.push_back(measured("tessera", "fa3", len, ms));
        records.push_back(measured("tessera", "standard", len, ms * 4));
        records.push_back(measured("cudnn", "", len, ms * 1.1));
    }
    return records;
}

TEST(Sorted, groups_what_differs_in_length_and_in_who) {
    std::vector<Record> records = some_records();
    records.push_back(measured("tessera", "fa3", 512, 9));  // again, older
    records.back().date = "2026-11-19";
    records.push_back(measured("tessera", "fa3", 1024, 9));  // again, newer, and under the mask's full name
    records.back().date = "2026-11-21";
    records.back().mask = "causal bottom-right";
    records.push_back(measured("tessera", "fa3", 512, 1));
    records.back().what = "predicted";
    records.push_back(measured("tessera", "fa3", 512, 1));
    records.back().pass = "micro";
    const Sorted all = sorted(records);
    ASSERT_EQ(all.devices.size(), 1U);
    const DeviceRows& device = all.devices[0];
    ASSERT_EQ(device.groups.size(), 1U);
    EXPECT_EQ(device.count(), 18U);
    EXPECT_EQ(device.who, (std::vector<std::string>{"tessera fa3", "tessera standard", "cuDNN"}));
    const auto rows = device.groups[0].of("tessera fa3");
    EXPECT_NEAR(rows[0]->record.ms, 0.3, 1e-9);  // the newer one
    EXPECT_EQ(rows[1]->record.ms, 9);
    EXPECT_EQ(device.replaced, 2);
    EXPECT_NE(provenance(device).when.find("the newest of each case (2 older ones are left out)"), std::string::npos);
    EXPECT_EQ(provenance(sorted(some_records()).devices[0]).when.find("newest"), std::string::npos);
    EXPECT_EQ(all.left_out.size(), 1U);
    EXPECT_TRUE(rows[0]->prediction.has_value());
}

/// A backward with the residual of O is no other problem: it stands beside its peers.
TEST(Sorted, the_residual_of_o_is_no_feature) {
    std::vector<Record> records = some_records();
    for (Record& record : records) {
        record.pass = "backward";
        if (record.by == "tessera") record.features = "residual of O";
    }
    EXPECT_EQ(sorted(records).devices[0].groups.size(), 1U);
    for (Record& record : records) {
        if (record.by == "tessera") record.features = "alibi, residual of O";
    }
    const Sorted two = sorted(records);
    ASSERT_EQ(two.devices[0].groups.size(), 2U);
    EXPECT_EQ(two.devices[0].groups[1].others, "alibi");
}

/// The call by which a peer's backward ran is a part of its name, not a feature.
TEST(Sorted, autograd_is_a_name_and_no_feature) {
    std::vector<Record> records = some_records();
    for (Record& record : records) {
        record.pass = "backward";
        record.features = record.by == "tessera" ? "residual of O" : "autograd";
        record.deterministic = false;
    }
    const Sorted all = sorted(records);
    ASSERT_EQ(all.devices[0].groups.size(), 1U);
    EXPECT_EQ(all.devices[0].who.back(), "cuDNN by autograd");
    const auto verdict = verdicts(all.devices[0]);
    ASSERT_EQ(verdict.size(), 1U);
    EXPECT_NE(verdict[0].find("tessera fa3 is the fastest in 6 of 6 cases"), std::string::npos) << verdict[0];
}

TEST(Verdict, of_one_kernel_is_no_victory) {
    std::vector<Record> records = some_records();
    std::erase_if(records, [](const Record& r) { return r.by != "tessera" || r.schedule != "fa3"; });
    EXPECT_EQ(verdicts(sorted(records).devices[0]).at(0), "forward: only tessera fa3 was measured, 6 cases.");
}

TEST(Sorted, a_length_with_two_batches_makes_two_groups) {
    std::vector<Record> records = some_records();
    for (Record r : some_records()) {
        r.batch = 64;
        records.push_back(r);
    }
    const Sorted all = sorted(records);
    for (const Group& group : all.devices[0].groups) {
        for (const Row& row : group.rows) {
            const auto twins = std::count_if(group.rows.begin(), group.rows.end(), [&](const Row& other) {
                return other.who == row.who && other.record.len_q == row.record.len_q;
            });
            EXPECT_EQ(twins, 1);
        }
    }
    EXPECT_EQ(all.devices[0].count(), 36U);
}

TEST(Sorted, predictions_of_unknown_devices_are_those_of_the_records) {
    std::vector<Record> records = some_records();
    for (Record& record : records) record.device = "an abacus";
    records.push_back(records[0]);
    records.back().what = "predicted";
    records.back().ms = 0.25;
    records.back().bytes = {{"dram", 1e6}};
    const Sorted all = sorted(records);
    EXPECT_EQ(all.devices[0].count(), 18U);
    const auto rows = predicted_rows(all.devices[0], "forward");
    ASSERT_EQ(rows.size(), 1U);
    EXPECT_EQ(rows[0]->prediction->ms, 0.25);
    // A machine for them makes the model answer for all.
    const Sorted known = sorted(records, model::find_machine("h200"));
    EXPECT_EQ(predicted_rows(known.devices[0], "forward").size(), 18U);
    EXPECT_FALSE(roofline_figures(known.devices[0]).empty());
}

TEST(Figures, hold_every_measurement_and_the_right_ratios) {
    const Sorted all = sorted(some_records());
    const DeviceRows& device = all.devices[0];
    const auto speed = speed_figures(device);
    ASSERT_EQ(speed.size(), 1U);
    std::size_t points = 0;
    for (const auto& series : speed[0].series) points += series.points.size();
    EXPECT_EQ(points, 18U);
    const auto ups = speed_up_figures(device);
    ASSERT_EQ(ups.size(), 2U);  // over standard, over the peer
    for (const auto& series : ups[0].series) {
        for (const auto& point : series.points) EXPECT_NEAR(point.y, series.name == "cuDNN" ? 4 / 1.1 : 4, 1e-9);
    }
    EXPECT_NE(ups[1].title.find("cuDNN"), std::string::npos);
    const auto roofs = roofline_figures(device);
    ASSERT_EQ(roofs.size(), 1U);
    for (const auto& series : roofs[0].series) {
        for (const auto& point : series.points) EXPECT_LT(point.y, 989.5);  // under the products' roof
    }
    EXPECT_EQ(prediction_figures(device).size(), 2U);
}

TEST(Figures, unknown_devices_have_no_roofline) {
    std::vector<Record> records = some_records();
    for (Record& record : records) record.device = "an abacus";
    const Sorted all = sorted(records);
    EXPECT_TRUE(roofline_figures(all.devices[0]).empty());
    EXPECT_TRUE(prediction_figures(all.devices[0]).empty());
    EXPECT_EQ(speed_figures(all.devices[0]).size(), 1U);
}

/// Numbers of a needle in a text.
std::size_t count(const std::string& text, const std::string& needle) {
    std::size_t n = 0;
    for (std::size_t at = text.find(needle); at != std::string::npos; at = text.find(needle, at + 1)) ++n;
    return n;
}

TEST(Page, is_self_contained_and_well_formed) {
    std::vector<Record> records = some_records();
    records[0].device = "<script>alert(1)</script> & \"co\"";
    const Sorted all = sorted(records);
    const std::string page = html_page(all, "A <title> & more");
    EXPECT_EQ(plot::XmlCheck(page, {"meta"}).run(), "");
    for (const char* outside :
         {"http:", "https:", "//cdn", "url(", "@import", "src=", "<script", "<link", "javascript:"})
        EXPECT_EQ(page.find(outside), std::string::npos) << outside;
    EXPECT_EQ(count(page, "<svg class=\"plot\""), plots_of(all.devices[0]) + plots_of(all.devices[1]));
    EXPECT_NE(page.find("width=device-width"), std::string::npos);
    EXPECT_NE(page.find("prefers-color-scheme:dark"), std::string::npos);
    EXPECT_NE(page.find("<title>A &lt;title&gt; &amp; more</title>"), std::string::npos);
    // Every link goes to something on the page, and ids are unique.
    for (std::size_t at = page.find("href=\"#"); at != std::string::npos; at = page.find("href=\"#", at + 1)) {
        const std::string id = page.substr(at + 7, page.find('"', at + 7) - at - 7);
        EXPECT_EQ(count(page, " id=\"" + id + "\""), 1U) << id;
    }
    EXPECT_EQ(count(page, "<tr>"), 18U + 2);
}

TEST(Markdown, has_a_line_for_each_measurement) {
    const Sorted all = sorted(some_records());
    const std::string text = markdown(all, "Title");
    EXPECT_EQ(count(text, "\n| tessera fa3 |"), 6U);
    EXPECT_EQ(count(text, "\n| cuDNN |"), 6U);
    EXPECT_NE(text.find("predicted ms"), std::string::npos);
    std::size_t columns = 0;
    for (std::size_t begin = text.find("\n|") + 1; text[begin] == '|'; begin = text.find('\n', begin) + 1) {
        const std::string line = text.substr(begin, text.find('\n', begin) - begin);
        const std::size_t bars = count(line, "|");
        if (columns == 0) columns = bars;
        EXPECT_EQ(bars, columns) << line;
    }
}

/// Titles and names of devices are text, whatever is in them.
TEST(Markdown, names_are_no_markup) {
    std::vector<Record> records = some_records();
    for (Record& record : records) record.device = "a *b* <i>|`c` &amp;";
    const std::string text = markdown(sorted(records), "# one\n<script>");
    EXPECT_NE(text.find("\n# \\# one \\<script\\>\n"), std::string::npos) << text.substr(0, 200);
    EXPECT_NE(text.find("\n## a \\*b\\* \\<i\\>\\|\\`c\\` \\&amp;\n"), std::string::npos) << text.substr(0, 200);
}

TEST(Accuracy, is_said_in_words) {
    const Sorted all = sorted(some_records());
    EXPECT_NE(accuracy_text(predicted_rows(all.devices[0], "forward")).find("18 predictions, off by"),
              std::string::npos)
        << accuracy_text(predicted_rows(all.devices[0], "forward"));
    EXPECT_EQ(accuracy_text({}), "");
}

std::string error_of(const Sorted& all, const ChartOptions& options) {
    try {
        chart(all, options);
    } catch (const Error& e) {
        return e.what();
    }
    return "no error";
}

/// Calls of two head_dims and of two heads, each in several lengths.
std::vector<Record> records_of_four_panels() {
    std::vector<Record> records;
    for (const std::int64_t head_dim : {64, 128}) {
        for (const char* mask : {"none", "causal"}) {
            for (Record record : some_records()) {
                record.head_dim = record.head_dim_v = head_dim;
                record.heads_q = record.heads_kv = 2048 / head_dim;
                record.mask = mask;
                record.commit = "a1b2c3d";
                records.push_back(record);
            }
        }
    }
    return records;
}

TEST(Chart, has_a_panel_for_each_kind_of_call_and_says_once_what_they_share) {
    const plot::Panels panels = chart(sorted(records_of_four_panels()), {.title = "Speed"});
    ASSERT_EQ(panels.panels.size(), 4U);
    std::vector<std::string> titles;
    for (const plot::Figure& panel : panels.panels) {
        titles.push_back(panel.title);
        EXPECT_EQ(panel.series.size(), 3U) << panel.title;
        EXPECT_EQ(panel.series.back().name, "tessera fa3") << "the first of the legend lies on top";
        EXPECT_EQ(panel.y.most, panels.panels[0].y.most) << "one scale for all";
    }
    EXPECT_EQ(titles, (std::vector<std::string>{"head_dim 64, full mask", "head_dim 64, causal",
                                                "head_dim 128, full mask", "head_dim 128, causal"}));
    for (const char* part : {"NVIDIA H200", "forward", "bf16", "32 or 16 heads", "16,384 tokens in all", "TFLOP/s"})
        EXPECT_NE(panels.subtitle.find(part), std::string::npos) << panels.subtitle;
    EXPECT_EQ(panels.footer[0], "tessera fa3: commit a1b2c3d; 2026-11-20");
    EXPECT_TRUE(panels.legend[0].strong);
    EXPECT_EQ(plot::first_xml_error(plot::svg(panels)), "");
}

TEST(Chart, draws_the_chosen_panels_and_lines) {
    const Sorted all = sorted(records_of_four_panels());
    const plot::Panels panels = chart(all, {.title = "",
                                            .note = "A note.",
                                            .only = {{"causal"}, {"head_dim 64", "head_dim 128"}},
                                            .without = {"32 heads"},
                                            .lines = {"cuDNN", "tessera fa3"}});
    ASSERT_EQ(panels.panels.size(), 1U);
    ASSERT_EQ(panels.legend.size(), 2U);
    EXPECT_EQ(panels.legend[0].name, "cuDNN");
    EXPECT_EQ(panels.footer[0], "A note.");
    EXPECT_EQ(panels.columns, 1U) << "no empty columns";
    EXPECT_NE(panels.subtitle.find("head_dim 128"), std::string::npos) << panels.subtitle;
    EXPECT_NE(error_of(all, {.only = {{"backward"}}}).find("--only"), std::string::npos);
    EXPECT_NE(error_of(all, {.lines = {"nobody"}}).find("expected one of \"tessera fa3\""), std::string::npos);
}

}  // namespace
}  // namespace tessera::report::report_test
