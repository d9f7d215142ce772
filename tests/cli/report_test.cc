// SPDX-License-Identifier: Apache-2.0
//
// tessera report: files and messages. tests/report tests the page itself.
#include "process.hpp"

namespace tessera::report_test {
namespace {

class ReportTest : public CommandTest {};

const std::string kRecords = TESSERA_SOURCE_DIR "/bench/results/h200/forward.jsonl " TESSERA_SOURCE_DIR
                                                "/bench/results/cpu/torch_amx_xeon16.jsonl";

TEST_F(ReportTest, writes_page_and_tables_of_the_committed_records) {
    const auto json = run_ok("report " + kRecords + " -o r.html --markdown r.md --title 'My page' --json").json();
    ASSERT_EQ(json.at("devices").size(), 2U);
    for (const auto& device : json.at("devices")) EXPECT_GT(device.at("plots"), 10) << device.dump();
    EXPECT_EQ(names(), (std::set<std::string>{"r.html", "r.md"}));
    const std::string page = text_of(path("r.html"));
    EXPECT_EQ(page.rfind("<!doctype html>", 0), 0U);
    EXPECT_NE(page.find("<h1>My page</h1>"), std::string::npos);
    EXPECT_EQ(page.find("http"), std::string::npos);
    EXPECT_NE(text_of(path("r.md")).find("| tessera fa3 |"), std::string::npos);
}

TEST_F(ReportTest, draws_a_chart) {
    const auto json = run_ok("report " + kRecords +
                             " --svg r.svg --only forward --only causal --only '16 heads' "
                             "--line 'tessera fa3' --line cuDNN --json")
                          .json();
    EXPECT_EQ(json.at("svg"), "r.svg");
    EXPECT_EQ(names(), (std::set<std::string>{"r.svg"}));
    const std::string chart = text_of(path("r.svg"));
    EXPECT_EQ(chart.rfind("<svg", 0), 0U);
    EXPECT_NE(chart.find("NVIDIA H200"), std::string::npos);
    EXPECT_EQ(chart.find("FlashAttention-2"), std::string::npos);
    run_ok("report " + kRecords + " --svg r.svg");  // its own output is written again
}

TEST_F(ReportTest, takes_what_bench_writes) {
    run_ok("bench --len 16,32 --heads 2 --head-dim 8 --schedule all --repeat 1 --warm-up 0 -o r.jsonl");
    const Outcome outcome = run_ok("report r.jsonl -o r.html");
    EXPECT_NE(outcome.out.find("r.html"), std::string::npos);
}

TEST_F(ReportTest, says_what_is_wrong) {
    expect_error("report " + kRecords, 2, "--output: expected a file");
    expect_error("report", 2, "RECORDS");
    expect_error("report nosuch.jsonl -o r.html", 66, "nosuch.jsonl");
    std::ofstream(path("empty.jsonl")) << "";
    expect_error("report empty.jsonl -o r.html", 65, "expected measurements");
    std::ofstream(path("bad.jsonl")) << "{\"what\": 3}\n";
    expect_error("report bad.jsonl -o r.html", 65, "bad.jsonl:1");
    expect_error("report empty.jsonl -o empty.jsonl", 2, "--output: expected another file");
    expect_error("report " + kRecords + " -o a --markdown a", 2, "--markdown");
    expect_error("report " + kRecords + " --svg a --markdown a", 2, "--svg: expected another file");
    expect_error("report " + kRecords + " -o r.html --only causal", 2, "--only: has no effect without --svg");
    expect_error("report " + kRecords + " --svg r.svg --line nobody", 2, "--line: expected one of");
    expect_error("report " + kRecords + " --svg r.svg --only nothing", 2, "--only: expected parts");
    expect_error("report " + kRecords + " --svg r.svg --columns 0", 2, "--columns: expected");
    expect_error("report " + kRecords + " -o no/folder/r.html", 73, "no/folder/r.html");
    EXPECT_EQ(names(), (std::set<std::string>{"empty.jsonl", "bad.jsonl"}));
}

}  // namespace
}  // namespace tessera::report_test
