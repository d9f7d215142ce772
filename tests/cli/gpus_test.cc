// SPDX-License-Identifier: Apache-2.0
//
// roofline --gpus: what it prints, draws and refuses.
#include <fstream>
#include <sstream>

#include "process.hpp"

namespace tessera::gpus_test {
namespace {

class GpusTest : public CommandTest {
 protected:
    const std::string sizes_ = " --heads 32/8 --head-dim 128 --causal bottom-right";

    static void expect_fits(const Outcome& outcome) {
        std::istringstream lines(outcome.out);
        for (std::string line; std::getline(lines, line);) EXPECT_LE(line.size(), 80U) << line;
    }
};

TEST_F(GpusTest, a_table_with_a_line_for_each_number_of_gpus) {
    const Outcome text = run_ok("roofline --gpus 1,2,4,8,64,1024 --len 128k,1M --pass both" + sizes_);
    expect_fits(text);
    for (const char* word : {"1,048,576  1,024", "a ring", "share 0.9 from", "all times are predictions",
                             "measured on up to 4 GPUs", "between hosts", "backward on 1024"})
        expect_says(text, word);
    expect_says(run_ok("roofline --gpus 2 --len 8k --link pcie" + sizes_), "not measured by");
}

TEST_F(GpusTest, json_has_what_the_time_is_made_of) {
    const auto json = run_ok("roofline --gpus 1,4 --rows 8192 --pass both --json" + sizes_).json();
    EXPECT_EQ(json.at("schema"), "tessera.roofline.gpus/1");
    ASSERT_EQ(json.at("rows").size(), 2U);
    const auto& row = json.at("rows").at(1);
    EXPECT_EQ(row.at("gpus"), 4);
    EXPECT_EQ(row.at("problem").at("len_q"), 4 * 8192);
    EXPECT_EQ(row.at("link_measured"), true);
    EXPECT_LT(row.at("share"), 1);
    double sum = 0;
    for (const auto& pass : row.at("passes"))
        for (const auto& [name, ms] : pass.at("parts_ms").items()) sum += ms.get<double>();
    EXPECT_NEAR(sum, row.at("ms").get<double>(), 1e-9 * sum);
    EXPECT_EQ(json.at("limits").size(), 1U);
    const Outcome csv = run_ok("roofline --gpus 2,4 --len 8k,16k --csv" + sizes_);
    expect_says(csv, "device,link,gpus,");
    EXPECT_EQ(std::count(csv.out.begin(), csv.out.end(), '\n'), 5);
}

TEST_F(GpusTest, documents_cross_gpus) {
    const std::string command =
        "roofline --gpus 1,4 --ragged exp:4096:64k --pass both --causal bottom-right --device h200";
    const auto rows = run_ok(command + " --heads 32/8 --head-dim 128 --json").json().at("rows");
    EXPECT_EQ(rows.size(), 2U);
    EXPECT_GT(rows.at(1).at("bytes_received"), 0);
    EXPECT_LT(rows.at(1).at("share"), 1);
    EXPECT_GT(rows.at(1).at("ring_ms"), 0);
    expect_says(run_ok(command + " --heads 32/8 --head-dim 128"), "no ring was");
    expect_error(command + " --rows 8k", 2, "has no effect beside --ragged");
    expect_error("roofline --gpus 3 --ragged 100,102", 2, "a multiple of 3 rows");
}

/// The product copies between the GPUs of a host too, unless NCCL is asked for.
TEST_F(GpusTest, copies_are_the_default) {
    const std::string command = "roofline --gpus 2 --rows 16k --json" + sizes_;
    const auto ms = [&](const std::string& more) {
        return run_ok(command + more).json().at("rows").at(0).at("ms").get<double>();
    };
    EXPECT_LT(ms(""), ms(" --nccl"));
    expect_error("roofline --nccl", 2, "expected --gpus with it");
}

TEST_F(GpusTest, any_number_of_gpus) {
    const auto json = run_ok("roofline --gpus 3,5,6,7,12,100 --rows 512 --json" + sizes_).json();
    ASSERT_EQ(json.at("limits").size(), 6U);
    for (const auto& limits : json.at("limits")) {
        const std::int64_t gpus = limits.at("gpus"), shortest = limits.at("shortest");
        EXPECT_EQ(shortest % (2 * gpus), 0) << gpus;
        EXPECT_GT(limits.at("longest"), 1'000'000) << gpus;
    }
}

TEST_F(GpusTest, sequences_whose_flop_pass_an_int64) {
    const auto json = run_ok("roofline --gpus 1024 --rows 2k,8k,32k --json" + sizes_).json();
    const auto& rows = json.at("rows");
    ASSERT_EQ(rows.size(), 3U);
    for (std::size_t i = 1; i < 3; ++i) {
        const double longer = rows[i].at("one_gpu_ms").get<double>() / rows[i - 1].at("one_gpu_ms").get<double>();
        EXPECT_NEAR(longer, 16, 0.2) << "four times the rows of a causal mask";
        EXPECT_GT(rows[i].at("share"), rows[i - 1].at("share"));
        EXPECT_LT(rows[i].at("share"), 1);
    }
    expect_says(run_ok("roofline --gpus 1024 --rows 8k --pass both" + sizes_), "GiB of one GPU's");
}

TEST_F(GpusTest, a_link_in_numbers) {
    const std::string command = "roofline --gpus 2 --len 32k --json" + sizes_;
    const auto ms = [&](const std::string& link) {
        return run_ok(command + " --link " + link).json().at("rows").at(0).at("ms").get<double>();
    };
    EXPECT_LT(ms("400"), ms("400,500"));
    EXPECT_LT(ms("400,500"), ms("4,500"));
    const std::string bad = "roofline --gpus 2 --len 32k" + sizes_;
    expect_error(bad + " --link carrier-pigeon", 2, "expected nvlink, pcie, ib, or GB/s[,us]");
    expect_error(bad + " --link 0", 2, "GB/s over 0");
    expect_error(bad + " --link 1,2,3", 2, "--link");
}

TEST_F(GpusTest, refused_with_a_reason) {
    expect_error("roofline --link nvlink", 2, "expected --gpus with it");
    expect_error("roofline --rows 8k", 2, "expected --gpus with it");
    expect_error("roofline --gpus 0", 2, "--gpus: expected 1..65536");
    expect_error("roofline --gpus 2,2", 2, "each value once");
    expect_error("roofline --gpus 2 --rows 8k --len 8k", 2, "got both");
    expect_error("roofline --gpus 2 --len 8k --ragged 100,200", 2, "--ragged");
    expect_error("roofline --gpus 2 --len 4097" + sizes_, 2, "a multiple of 4 rows, 2 for each GPU");
    expect_error("roofline --gpus 2 --len 4k --device xeon-16", 69, "xeon-16 is a CPU");
}

TEST_F(GpusTest, a_picture) {
    run_ok("roofline --gpus 2,8 --len 8k:64k --svg " + path("gpus.svg") + sizes_);
    std::ifstream file(path("gpus.svg"));
    std::stringstream svg;
    svg << file.rdbuf();
    for (const char* word : {"share of one GPU", "2 GPUs", "8 GPUs", "predicted"})
        EXPECT_NE(svg.str().find(word), std::string::npos) << word;
    // One length: points above each other could not be read, so the line goes over the GPUs.
    run_ok("roofline --gpus 1,2,4,64 --len 128k --svg " + path("one.svg") + sizes_);
    std::ifstream one(path("one.svg"));
    std::stringstream text;
    text << one.rdbuf();
    EXPECT_NE(text.str().find(">GPUs<"), std::string::npos);
    EXPECT_EQ(text.str().find("e+05"), std::string::npos);
}

}  // namespace
}  // namespace tessera::gpus_test
