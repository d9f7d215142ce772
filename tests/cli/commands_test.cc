// SPDX-License-Identifier: Apache-2.0
//
// list, why, bench, gen, --help: what they print.
#include <algorithm>
#include <sstream>

#include "measure/record.hpp"
#include "process.hpp"

namespace tessera::commands_test {
namespace {

class CommandsTest : public CommandTest {
 protected:
    static void expect_fits(const Outcome& outcome) {
        std::istringstream lines(outcome.out);
        for (std::string line; std::getline(lines, line);) {
            EXPECT_LE(line.size(), 100U) << line;
            EXPECT_TRUE(line.empty() || line.back() != ' ') << "trailing space: " << line;
        }
    }
};

TEST_F(CommandsTest, help_teaches_by_example_and_fits) {
    const Outcome all = run_ok("--help");
    expect_fits(all);
    // The error about an unknown command lists all of them.
    std::string known = run("frobnicate").err;
    known = known.substr(0, known.find(", got"));
    known = known.substr(known.rfind(" of ") + 4);
    std::replace(known.begin(), known.end(), ',', ' ');
    std::istringstream commands(known);
    int count = 0;
    for (std::string command; commands >> command; ++count) {
        EXPECT_NE(all.out.find(command), std::string::npos) << command;
        const Outcome help = run_ok(command + " --help");
        EXPECT_NE(help.out.find("Examples:"), std::string::npos) << command;
        expect_fits(help);
    }
    EXPECT_GE(count, 12) << known;
    EXPECT_EQ(run_ok("--version").out.rfind("tessera ", 0), 0U);
}

TEST_F(CommandsTest, every_one_gives_one_json_document) {
    run_ok("gen --len 8 --heads 2 --head-dim 8 --grad -o a.safetensors");
    run_ok("bench --len 8 --repeat 1 --warm-up 0 -o r.jsonl");
    std::ofstream(path("names.txt")) << "flash_fwd_kernel\n";
    std::string known = run("frobnicate").err;
    known = known.substr(0, known.find(", got"));
    for (const char* arguments :
         {"run a.safetensors --backward --check",
          "check --kernel cpu.fa1.forward --case causal_square",
          "bench --len 8 --repeat 1 --warm-up 0",
          "bench --list-suites",
          "report r.jsonl -o r.html",
          "walk a.safetensors",
          "walk --by-hand",
          "which names.txt",
          "which --family",
          "plan",
          "roofline --len 64",
          "roofline --timeline --len 64",
          "roofline --accuracy --records r.jsonl",
          "machine",
          "machine h200",
          "calibrate --device h200 --micro " TESSERA_SOURCE_DIR "/bench/results/h200/micro.jsonl",
          "list",
          "gen --len 8 -o b.safetensors",
          "completion bash",
          "man",
          "learn",
          "learn 6"}) {
        const Outcome outcome = run(std::string(arguments) + " --json", "export XDG_STATE_HOME=$PWD;", "</dev/null");
        EXPECT_EQ(outcome.code, 0) << arguments << "\n" << outcome.err;
        EXPECT_TRUE(nlohmann::json::accept(outcome.out)) << arguments << "\n" << outcome.out;
        const std::string name = std::string(arguments).substr(0, std::string(arguments).find(' '));
        if (const std::size_t at = known.find(" " + name); at != std::string::npos) known.erase(at, name.size() + 1);
    }
    EXPECT_EQ(known.substr(known.rfind("of") + 2).find_first_not_of(", "), std::string::npos) << "left: " << known;
}

TEST_F(CommandsTest, list_fits_and_parses) {
    expect_fits(run_ok("list"));
    const auto kernels = run_ok("list --json").json().at("kernels");
    ASSERT_FALSE(kernels.empty());
    EXPECT_EQ(kernels.back().at("backend"), "reference");
    EXPECT_EQ(run_ok("--json list").json().at("kernels"), kernels);
}

TEST_F(CommandsTest, why_tells_of_every_kernel) {
    const auto all = run_ok("list --json").json().at("kernels");
    for (const char* options :
         {"", " --backward", " --backend reference", " --dtype fp64", " --ragged 3,1x5 --bias --alibi"}) {
        const auto json = run_ok(fmt::format("why --json{}", options)).json();
        EXPECT_EQ(json.at("refused").size() + 1, all.size()) << options;
        for (const auto& refusal : json.at("refused")) EXPECT_NE(refusal.at("reason"), "") << refusal.dump();
        expect_fits(run_ok(fmt::format("why{}", options)));
    }
    const auto json = run_ok(
                          "why --json --len-q 1 --len-kv 70 --heads 6/2 --head-dim 40/80 --causal bottom-right "
                          "--window 5,inf --softcap 3")
                          .json();
    EXPECT_EQ(json.at("problem").at("heads_kv"), 2);
    EXPECT_EQ(json.at("problem").at("head_dim_v"), 80);
    EXPECT_EQ(json.at("problem").at("mask"), "causal bottom-right, window 5,unbounded");
}

TEST_F(CommandsTest, bench_measures_each_combination) {
    const auto records =
        run_ok("bench --len 16,32 --heads 2 --head-dim 8 --dtype fp32,bf16 --pass forward,backward --repeat 2 --json")
            .json();
    int measured = 0;
    for (const auto& json : records) {
        const measure::Record record = measure::record_from_json(json);
        if (record.what == "predicted") continue;  // on a machine that the model knows
        ++measured;
        EXPECT_EQ(record.what, "measured");
        EXPECT_GT(record.ms, 0);
        EXPECT_GT(record.tflops, 0);
        EXPECT_GE(record.ms_spread, 0);
        EXPECT_FALSE(record.device.empty());
        EXPECT_FALSE(record.commit.empty());
        EXPECT_EQ(record.date.size(), 20U);
    }
    EXPECT_EQ(measured, 8);
    expect_fits(run_ok("bench --len 16,32 --heads 2 --head-dim 8 --schedule all --pass forward,backward --repeat 2"));
}

TEST_F(CommandsTest, backward_and_pass_are_spellings_of_one_option) {
    for (const std::string command : {"plan --len 64", "walk --by-hand", "walk --len 64", "roofline --len 64",
                                      "roofline --timeline --len 64", "check --schedule fa1 --case causal_square"}) {
        const std::string backward = run_ok(command + " --json --backward").out;
        EXPECT_EQ(run_ok(command + " --json --pass backward").out, backward) << command;
        EXPECT_NE(run_ok(command + " --json --pass forward").out, backward) << command;
        expect_error(command + " --backward --pass forward", 2,
                     "--backward: stands for --pass backward: expected without --pass forward");
    }
    const auto passes = [&](const std::string& options) {
        std::string list;
        for (const auto& record : run_ok("bench --json --repeat 1 --len 16 --heads 1 --head-dim 8" + options).json())
            list += record.at("pass").get<std::string>() + " ";
        return list;
    };
    EXPECT_EQ(passes(""), "forward ");
    EXPECT_EQ(passes(" --backward"), "backward ");
    EXPECT_EQ(passes(" --pass both"), "forward backward ");
    EXPECT_EQ(passes(" --pass backward,forward"), "backward forward ");
    run_ok("gen --len 8 --heads 2 --head-dim 8 --grad -o in.safetensors");
    for (const char* pass : {"backward", "both"})
        run_ok(fmt::format("run in.safetensors --pass {0} -o {0}.safetensors", pass));
    run_ok("run in.safetensors --backward -o flag.safetensors");
    EXPECT_EQ(text_of(path("backward.safetensors")), text_of(path("flag.safetensors")));
    EXPECT_EQ(text_of(path("both.safetensors")), text_of(path("flag.safetensors")));
    for (const char* command : {"plan", "walk --len 64"})
        expect_error(fmt::format("{} --pass both", command), 2, "--pass: expected one of forward, backward, got");
}

TEST_F(CommandsTest, check_takes_the_kernels_of_a_schedule_and_a_pass) {
    const auto checked = [&](const std::string& options) {
        std::string list;
        const auto json = run_ok("check --json --case causal_square --backend cpu" + options).json();
        for (const auto& row : json.at("kernels")) list += row.at("kernel").get<std::string>() + " ";
        return list;
    };
    EXPECT_EQ(checked(" --schedule fa1"), "cpu.fa1.forward cpu.fa1.backward ");
    EXPECT_EQ(checked(" --schedule fa2 --pass forward"), "cpu.fa2.forward ");
    EXPECT_EQ(checked(" --backward --schedule standard"), "cpu.standard.backward ");
    EXPECT_EQ(checked(" --pass both"), checked(""));
    expect_error("check --schedule fa9", 2, "--schedule: expected one of all, standard");
    expect_error("check --schedule fa1 --kernel cpu.fa2.forward", 2,
                 "--kernel: expected one of cpu.fa1.forward, cpu.fa1.backward");
    expect_error("check --backend cpu --schedule fa3", 69, "--schedule: this build has no cpu kernel of schedule fa3");
}

TEST_F(CommandsTest, bench_counts_visible_pairs_only) {
    const auto tflop = [&](const std::string& options) {
        const auto record = run_ok("bench --json --repeat 1 --heads 2 --head-dim 8 " + options).json().at(0);
        return record.at("tflops").get<double>() * record.at("ms").get<double>() * 1e9;  // operations
    };
    EXPECT_NEAR(tflop("--len 32"), 2.0 * 32 * 32 * 2 * 16, 1);
    EXPECT_NEAR(tflop("--len 32 --causal top-left"), 2.0 * (32 * 33 / 2) * 2 * 16, 1);
    EXPECT_NEAR(tflop("--len 32 --pass backward"), 2.0 * 32 * 32 * 2 * 40, 1);
    EXPECT_NEAR(tflop("--ragged 32,4x16"), 2.0 * (32 * 32 + 4 * 16) * 2 * 16, 1);
}

TEST_F(CommandsTest, bench_appends_records) {
    const std::string bench = "bench --len 16 --heads 2 --head-dim 8 --repeat 1 -o r.jsonl";
    run_ok(bench);
    run_ok(bench + " --alibi --bias --dropout 0.1");
    const auto records = measured_records("r.jsonl");
    ASSERT_EQ(records.size(), 2U);
    EXPECT_EQ(records[1].features, "alibi, bias, dropout 0.1");
}

TEST_F(CommandsTest, gen_is_reproducible) {
    for (const char* kind : {"normal", "outliers", "large-logits", "index-coded"}) {
        const std::string gen = fmt::format("gen --kind {} --len 16 --heads 4/2 --head-dim 8 --seed 3 --grad", kind);
        const auto json = run_ok(gen + " -o a.safetensors --json").json();
        EXPECT_EQ(json.at("tensors").at("k").at("shape"), (std::vector<int>{1, 16, 2, 8}));
        run_ok(gen + " -o b.safetensors");
        EXPECT_EQ(text_of(path("a.safetensors")), text_of(path("b.safetensors")));
        run_ok("run a.safetensors --backward --check");
    }
    run_ok("gen --len 16 --seed 4 -o b.safetensors");
    EXPECT_NE(text_of(path("a.safetensors")), text_of(path("b.safetensors")));
}

}  // namespace
}  // namespace tessera::commands_test
