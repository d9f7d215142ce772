// SPDX-License-Identifier: Apache-2.0
//
// roofline, plan, calibrate: what they print and write.
#include <fstream>
#include <sstream>

#include "plot/png.hpp"
#include "process.hpp"

namespace tessera::model_test {
namespace {

class ModelCommandsTest : public CommandTest {
 protected:
    /// No terminal: 80 columns.
    static void expect_fits(const Outcome& outcome, std::size_t width = 80) {
        std::istringstream lines(outcome.out);
        for (std::string line; std::getline(lines, line);) {
            EXPECT_LE(line.size(), width) << line;
            EXPECT_TRUE(line.empty() || line.back() != ' ') << "trailing space: " << line;
        }
    }
};

TEST_F(ModelCommandsTest, help_fits) {
    for (const char* command : {"roofline", "plan", "calibrate"}) {
        const Outcome help = run_ok(std::string(command) + " --help");
        expect_says(help, "Examples:");
        expect_fits(help, 100);  // commands to be copied stand in one line
    }
}

TEST_F(ModelCommandsTest, roofline_over_lengths) {
    const std::string command = "roofline --device h200 --len 512:4096 --heads 16 --head-dim 128 --causal bottom-right";
    const Outcome text = run_ok(command);
    expect_fits(text);
    for (const char* word : {"standard", "fa1", "fa2", "fa3", "win", "4,096", "faster than standard", "keys fit"})
        expect_says(text, word);
    expect_says(text,
                "\n  len    win  bound of the best\n");  // columns without space continue below, with the lengths again
    expect_says(run_ok("roofline --tokens 16384 --len 512:2048"), "\n  len  batch    win  bound of the best\n");
    const auto rows = run_ok(command + " --json").json().at("rows");
    ASSERT_EQ(rows.size(), 4U);
    double before = 0;
    for (const auto& row : rows) {
        for (const auto& schedule : row.at("schedules")) {
            const auto& pass = schedule.at("passes").at(0);
            EXPECT_GT(pass.at("ms").get<double>(), 0);
            for (const auto& [name, roof] : pass.at("roofs").items())
                EXPECT_LE(roof.at("ms").get<double>(), pass.at("ms").get<double>() * (1 + 1e-9)) << name;
        }
        const double ms = row.at("schedules").at(3).at("ms").get<double>();
        EXPECT_GT(ms, before);
        before = ms;
    }
    EXPECT_EQ(rows.at(0).at("problem").at("dtype"), "bf16");  // the GPU's own, unless asked otherwise
}

TEST_F(ModelCommandsTest, roofline_of_one_problem) {
    expect_fits(run_ok("roofline --len 4096 --amdahl 0.4"));
    expect_says(run_ok("roofline --len 4096 --pass both"), "forward + backward");
    expect_says(run_ok("roofline --len 4096"), "over SDPA's memory-efficient kernels of PyTorch: ");
    expect_says(run_ok("roofline --len 4096 --schedule standard"), "held-out rows of such calls (");
    expect_error("roofline --device v100 --len 1024", 69, "needs compute capability 8.0, v100 has 7.0");
    expect_says(run_ok("roofline --device a100 --len 1024"), "fa3 needs wgmma");
    expect_says(run_ok("roofline --device xeon-16 --len 1024"), "fp32");
    expect_fits(run_ok("roofline --ragged 100,30x500,1x8192 --window 64,0 --heads 8/2"));
    expect_fits(run_ok("roofline --len-q 1 --len-kv 1024:65536 --heads 32/8 --by flash-attention"));
    expect_says(run_ok("roofline --device l4 --len 65536,262144 --heads 16"), "needs 256.0 GiB");
    expect_says(run_ok("roofline --device h200 --batch 64 --heads 32/8 --head-dim 128"), "keys fit");
    expect_error("roofline --len-q 4294967296 --len-kv 1", 69, "does not fit: it takes");
    const auto json = run_ok("roofline --tokens 16384 --len 512:2048 --json").json();
    EXPECT_EQ(json.at("rows").at(0).at("problem").at("batch"), 32);
    EXPECT_EQ(json.at("rows").at(2).at("problem").at("batch"), 8);
}

/// The numbers of the worksheet's last lines are those of the prediction.
TEST_F(ModelCommandsTest, worksheet_ends_in_the_prediction) {
    for (const char* how : {"--schedule fa3", "--schedule fa2 --pass backward", "--schedule standard", "--schedule fa1",
                            "--schedule fa2 --device xeon-16"}) {
        const std::string command = fmt::format("roofline --len 2048 --heads 16 --worksheet {}", how);
        expect_fits(run_ok(command));
        const auto pass = run_ok(command + " --json").json().at("rows").at(0).at("schedules").at(0).at("passes").at(0);
        const auto& lines = pass.at("worksheet");
        ASSERT_GE(lines.size(), 6U);
        const std::string time = lines.at(lines.size() - 2).at("calculation");
        EXPECT_NE(time.find(fmt::format("= {:.4g} ms", pass.at("ms").get<double>())), std::string::npos) << time;
        // The terms of the sum, as printed, add up to it.
        double sum = 0;
        std::istringstream words(time.substr(0, time.rfind('=')));
        for (std::string word; words >> word;) {
            if (std::isdigit(static_cast<unsigned char>(word.front())) != 0 && word.find('-') == std::string::npos)
                sum += std::stod(word);
        }
        EXPECT_NEAR(sum / pass.at("ms").get<double>(), 1, 2e-3) << time;
    }
}

TEST_F(ModelCommandsTest, roofline_draws) {
    run_ok("roofline --len 512:4096 --svg r.svg");
    const std::string svg = text_of(path("r.svg"));
    EXPECT_NE(svg.find("<svg"), std::string::npos);
    for (const char* name : {"standard", "fa3", "DRAM", "GEMMs"}) EXPECT_NE(svg.find(name), std::string::npos) << name;
    const auto shows = [&](const std::string& options, const std::string& text) {
        run_ok("roofline --svg r.svg " + options);
        std::string drawn = text_of(path("r.svg"));
        for (std::size_t at = 0; (at = drawn.find('<', at)) != std::string::npos;)  // lines are texts of their own
            drawn.replace(at, drawn.find('>', at) - at + 1, " ");
        std::erase(drawn, '\n'), std::erase(drawn, ' ');
        std::string wanted = text;
        std::erase(wanted, ' ');
        EXPECT_NE(drawn.find(wanted), std::string::npos) << text << "\n" << drawn;
    };
    shows("--tokens 16384 --len 512:16384", "batch 32 to 1");
    shows("--len-q 1 --len-kv 1024:4096", "1 query, 1k to 4k keys");
    shows("--len 300", "length 300");
    shows("--device h200 --len 512:4096 --schedule fa2", "mma.sync 660 TFLOP/s");
    shows("--device b200 --len 512:4096 --schedule fa2", "GEMMs 2250 TFLOP/s");
    if (plot::can_draw_png()) {
        run_ok("roofline --len 512:4096 --png r.png");
        EXPECT_EQ(text_of(path("r.png")).substr(1, 3), "PNG");
    }
    EXPECT_EQ(run("roofline --len 512 --svg none/r.svg").code, 73);
}

TEST_F(ModelCommandsTest, roofline_names_the_peak_of_tensor) {
    const auto says = [&](const std::string& options, const std::string& peaks) {
        expect_says(run_ok("roofline --len 1024 " + options), "column tensor:  " + peaks + "\n");
    };
    says("--device a100 --schedule standard,fa2", "% of 312 TFLOP/s");
    says("--device h200 --schedule fa3", "% of 989 TFLOP/s");
    says("--device h200 --schedule fa2,fa3", "% of 660 TFLOP/s (mma.sync) in fa2; % of 989 TFLOP/s in fa3");
}

TEST_F(ModelCommandsTest, roofline_tells_its_accuracy) {
    const Outcome text = run_ok("roofline --accuracy");
    expect_fits(text);
    expect_says(text, "NVIDIA H200");
    EXPECT_LT(text.out.find("Held out"), text.out.find("Fitted:")) << "what was not fitted comes first";
    const auto json = run_ok("roofline --accuracy --json").json();
    EXPECT_GE(json.at("fitted").size(), 10U);
    EXPECT_GE(json.at("held_out").size(), 4U);
    for (const auto& row : json.at("rows")) EXPECT_TRUE(row.at("held_out") || row.at("device") != "NVIDIA H100") << row;
    EXPECT_EQ(run("roofline --accuracy --records none.jsonl").code, 66);
}

TEST_F(ModelCommandsTest, calibrate_writes_a_machine_that_commands_take) {
    const Outcome calibrated = run_ok("calibrate --threads 1 --name mine -o m.json");
    expect_fits(calibrated);
    for (const char* word : {"bf16 forward", "standard backward", "gemm_share"}) expect_says(calibrated, word);
    expect_says(run_ok("roofline --device m.json --len 512,1024"), "mine");
    expect_fits(run_ok("plan --device m.json --len 512"));
    const auto plan = run_ok("plan --device ./m.json --len 512 --threads 1 --json").json();
    EXPECT_EQ(plan.at("device"), "mine");
    EXPECT_GT(plan.at("chosen").at("predicted").at("ms").get<double>(), 0);
    run_ok("calibrate --device h200 --micro " TESSERA_SOURCE_DIR "/bench/results/h200/micro.jsonl -o g.json");
    expect_says(run_ok("roofline --device g.json --len 4096"), "h200-calibrated");
}

TEST_F(ModelCommandsTest, plan_shows_the_others_too) {
    const Outcome text = run_ok("plan --len 2048 --device xeon-16 --threads 16 --causal bottom-right");
    expect_fits(text);
    for (const char* word : {"cpu.fa2.forward", "cpu.standard.forward", "xeon-16", "not chosen", "16 threads"})
        expect_says(text, word);
    const auto json = run_ok("plan --len 2048 --device xeon-16 --json --backward").json();
    EXPECT_EQ(json.at("chosen").at("predicted").at("pass"), "backward");
    expect_fits(run_ok("plan --len 64"));
}

TEST_F(ModelCommandsTest, plan_answers_for_a_gpu_that_is_not_here) {
    const auto plan = [&](const std::string& arguments) { return run_ok("plan --json " + arguments).json(); };
    const std::string usual = "--len 4096 --heads 16 --head-dim 128 --dtype bf16 --device ";
    EXPECT_EQ(plan(usual + "h200").at("chosen").at("kernel"), "cuda.fa3.forward");
    EXPECT_GT(plan(usual + "h200").at("chosen").at("predicted").at("ms").get<double>(), 0);
    EXPECT_EQ(plan(usual + "a100").at("chosen").at("kernel"), "cuda.fa2.forward");
    // fa3 takes a bias up to head_dim 128, and fa2 any.
    const auto with_bias = plan("--len 4096 --heads 16 --head-dim 192 --dtype bf16 --device h200 --bias --dropout 0.1");
    EXPECT_EQ(with_bias.at("chosen").at("kernel"), "cuda.fa2.forward");
    EXPECT_EQ(with_bias.at("chosen").at("predicted").at("not_modelled"), "bias except its bytes, dropout");
    EXPECT_EQ(with_bias.at("refused").at(0).at("reason"), "takes no bias or dropout");  // of the decode kernel
    EXPECT_EQ(with_bias.at("refused").at(1).at("reason"),
              "takes softcap, ALiBi, biases, dropout and scales of 0 and less up to head_dim 128, got 192");
    EXPECT_EQ(plan(usual + "h200 --bias").at("chosen").at("kernel"), "cuda.fa3.forward");
    expect_error("plan --len 64 --dtype fp16 --device t4", 69, "needs compute capability 8.0, t4 has 7.5");
    expect_error("plan --device h200 --dtype bf16 --schedule standard --len 100000 --heads 16", 69,
                 "GiB for the scores of all pairs, h200 has 140.0 GiB");
    expect_error("plan --device xeon-16 --schedule standard --len 1000000", 69, "GiB too much");
    expect_error("plan --device h200 --backend cpu", 2, "--backend: expected auto or cuda: h200 is a GPU");
    expect_error("plan --device h200 --threads 2", 2, "--threads: expected a CPU");
    expect_fits(run_ok("plan --device h200 --dtype bf16 --backward --len 2048"));
}

/// All kernels say what memory they want, chosen or not.
TEST_F(ModelCommandsTest, plan_answers_for_sizes_of_0) {
    const std::string usual = "plan --json --device h200 --head-dim 64 ";
    for (const char* sizes : {"--batch 0", "--len-q 0", "--len-kv 0", "--len 0", "--heads 0/2", "--heads 0/0"}) {
        for (const char* dtype : {" --dtype bf16", " --dtype fp16", " --dtype fp32"}) {
            for (const char* mask : {"", " --causal bottom-right"}) {
                for (const char* pass : {"", " --backward"}) run_ok(usual + sizes + dtype + mask + pass);
            }
        }
    }
}

TEST_F(ModelCommandsTest, kernels_that_do_not_exist_are_not_predicted) {
    expect_error("roofline --device t4 --len 1024", 69, "needs compute capability 8.0, t4 has 7.5");
    expect_error("roofline --device h200 --dtype fp32 --len 1024 --schedule fa2", 69, "flash-attention takes 16-bit");
    expect_error("roofline --device h200 --len 1024 --schedule fa3 --bias", 69, "no bias");
    expect_error("roofline --by tessera --device h200 --len 1024 --head-dim 256 --schedule fa3 --bias", 69,
                 "up to head_dim 128, got 256");
    const Outcome text = run_ok("roofline --device h200 --len 1024 --schedule fa2 --softcap 30 --dropout 0.5");
    expect_says(text, "not modelled");
    expect_says(text, "softcap, dropout");
    // The bytes of a bias are counted.
    const auto ms = [&](const std::string& more) {
        return run_ok("roofline --by tessera --device h200 --len 8192 --heads 16 --schedule fa2 --json" + more)
            .json()
            .at("rows")
            .at(0)
            .at("schedules")
            .at(0);
    };
    EXPECT_NE(ms("").dump(), ms(" --bias").dump());
    expect_error("roofline --device l4 --len 100000 --schedule standard", 69,
                 "298.1 GiB for the scores of all pairs, l4 has 24.0 GiB");
}

TEST_F(ModelCommandsTest, a_table_says_of_all_its_rows_how_far_off_they_may_be) {
    // Each kind of problem has its own error bar. A table of one kind shows one bar.
    const Outcome rows = run_ok("roofline --device h200 --len 64:65536 --schedule fa2");
    expect_says(rows, "64 to 1,024: +-30 %");
    expect_says(rows, "2,048: +-30 %");  // short
    expect_says(rows, "4,096 to 65,536: +-14 %");
    EXPECT_EQ(run_ok("roofline --device h200 --len 64,128 --schedule fa2").out.find("64 to"), std::string::npos);
    const Outcome sheets = run_ok("roofline --device h200 --len 64,128 --schedule fa2 --worksheet");
    expect_says(sheets, "on h200, 64 long\n");
    expect_says(sheets, "\n\nWorksheet: fa2 forward of flash-attention on h200, 128 long\n");
    // Each kernel lists the features that its time does not contain: a CPU's time contains dropout.
    const Outcome cpu = run_ok("roofline --device xeon-16 --len 512 --schedule fa2 --softcap 30 --dropout 0.5");
    expect_says(cpu, "not modelled  softcap:");
}

TEST_F(ModelCommandsTest, texts_of_files_do_not_steer_a_terminal) {
    run_ok("calibrate --device h200 --micro " TESSERA_SOURCE_DIR "/bench/results/h200/micro.jsonl -o m.json");
    auto machine = nlohmann::json::parse(text_of(path("m.json")));
    machine["title"] = "a \x1b[31mred card";
    std::ofstream(path("m.json")) << machine.dump();
    const Outcome outcome = run("roofline --device m.json --len 64 --amdahl 0.5");
    EXPECT_EQ(outcome.err.find('\x1b'), std::string::npos);
    EXPECT_NE(outcome.err.find("title: expected a text of one line"), std::string::npos) << outcome.err;
    // Control characters beyond ASCII, and bytes that are no character, are escaped too. Other characters stay.
    std::ofstream(path("names.txt")) << "flash_fwd_kernel\xC2\x9B"
                                     << "31m \xFF\x9B \xC3\xA9\x7F\n";
    const Outcome names = run_ok("which names.txt");
    expect_says(names, "flash_fwd_kernel\\xc2\\x9b31m \\xff\\x9b \xC3\xA9\\x7f");
    const auto kernels = run_ok("which --json names.txt").json();  // valid, whatever stands in it
    EXPECT_NE(kernels.dump(-1, ' ', true).find("\\u009b31m"), std::string::npos);
    const auto row = run_ok("roofline --len 4096 --amdahl 0.5 --json").json().at("rows").at(0).at("schedules").back();
    EXPECT_NEAR(row.at("model_win").get<double>(), 1 / (0.5 + 0.5 / row.at("win").get<double>()), 1e-9);
}

TEST_F(ModelCommandsTest, a_tile_stands_beside_the_memories) {
    const auto json = run_ok("roofline --device h200 --len 4096 --head-dim 128 --tile 128,176 --json").json();
    const auto& near = json.at("memories").at(1);
    EXPECT_EQ(near.at("memory"), "shared memory");
    EXPECT_EQ(near.at("bytes_of_a_core"), 227 * 1024);
    EXPECT_EQ(near.at("held"), (128 + 2 * 176) * 128 * 2);
    EXPECT_EQ(near.at("fits"), true);
    EXPECT_EQ(json.at("most_keys"), 195 * 1024 / 512);
    EXPECT_EQ(json.at("most_keys_twice"), 195);
    const auto larger = run_ok("roofline --device a100 --len 4096 --head-dim 128 --tile 128,512 --json").json();
    EXPECT_EQ(larger.at("memories").at(1).at("fits"), false);
    const Outcome text = run_ok("roofline --device a100 --len 4096 --head-dim 128 --tile 128,512");
    EXPECT_NE(text.out.find("too much"), std::string::npos) << text.out;
    EXPECT_NE(run_ok("roofline --device xeon-16 --tile 64,64").out.find("second-level cache"), std::string::npos);
    expect_error("roofline --tile 128", 2, "--tile: expected Q,KV");
    expect_error("roofline --tile 0,4", 2, "--tile: expected 1..4096, got \"0\"");
    expect_error("roofline --tile 64,64 --schedule fa2", 2, "--schedule: has no effect with --tile");
    expect_error("roofline --tile 64,64 --len 64,128", 2, "--len: expected one problem");
}

TEST_F(ModelCommandsTest, a_timeline_shows_who_waits) {
    const std::string how = "roofline --device h200 --len 512 --head-dim 128 --tile 128,128 --timeline";
    const auto of = [&](const std::string& more) { return run_ok(how + " --json" + more).json(); };
    const auto fa3 = of(""), fa2 = of(" --schedule fa2");
    EXPECT_EQ(fa3.at("schedule"), "fa3");
    EXPECT_LT(fa3.at("end_us"), fa2.at("end_us"));
    EXPECT_NEAR(fa3.at("busy_us").at("GEMMs").get<double>(), fa2.at("busy_us").at("GEMMs").get<double>(), 1e-9);
    double gemms = 0;
    for (const auto& step : fa3.at("steps")) {
        if (step.at("unit") == "GEMMs") gemms += step.at("end_us").get<double>() - step.at("begin_us").get<double>();
    }
    EXPECT_NEAR(gemms, fa3.at("busy_us").at("GEMMs").get<double>(), 1e-9);
    const Outcome text = run_ok(how);
    for (const char* lane : {"\nmemory ", "\nGEMMs ", "\nexps "})
        EXPECT_NE(text.out.find(lane), std::string::npos) << text.out;
    EXPECT_NE(run_ok("roofline --device xeon-16 --len 256 --timeline").out.find("fa2 forward"), std::string::npos);
    expect_error("roofline --timeline --len 1048576", 2, "at most 1,024 tiles");
    expect_error("roofline --timeline --pass both", 2, "--pass");
    expect_error("roofline --timeline --schedule fa2,fa3", 2, "--schedule: expected one schedule");
    expect_error("roofline --timeline --worksheet", 2, "--worksheet: has no effect with --timeline");
    expect_error("roofline --timeline --device xeon-16 --schedule fa3", 69, "fa3");
}

TEST_F(ModelCommandsTest, errors_name_the_option) {
    expect_error("bench --len 16 --device h200 --backend cpu", 2, "--device: expected a CPU for cpu.fa2.forward");
    expect_error("roofline --device h300 --len 64", 2, "--device");
    expect_error("roofline --ragged 100x", 2, "--ragged: expected N or NxN, got \"100x\"");
    expect_error("roofline --timeline --len 100000000", 2, "--len: expected at most 1,024 tiles with --timeline");
    expect_error("roofline --timeline --schedule fa3 --device a100", 69, "fa3: needs compute capability 9.0");
    expect_error("roofline --device none.json --len 64", 66, "none.json");
    expect_error("roofline --len 512:64", 2, "--len");
    expect_error("roofline --len 0:64", 2, "--len");
    expect_error("roofline --len 1073741824 --heads 1 --head-dim 128", 2, "len_kv");
    expect_error("roofline --schedule fa4", 2, "--schedule");
    expect_error("roofline --pass sideways", 2, "--pass");
    expect_error("roofline --by nobody", 2, "--by");
    expect_error("roofline --amdahl 1.5", 2, "--amdahl");
    expect_error("roofline --tokens 64 --batch 2", 2, "--tokens");
    expect_error("roofline --records x.jsonl", 2, "--records");
    expect_error("roofline --worksheet --amdahl 0.4", 2, "--amdahl: has no effect with --worksheet");
    expect_error("roofline --tokens 0 --len 64", 2, "--tokens: expected 1 token or more");
    expect_error("roofline --tokens 4096 --len 8192", 2, "--tokens: expected a multiple of each length, 8192");
    expect_error("roofline --tokens 4096 --len 512,1000", 2, "--tokens: expected a multiple of each length, 1000");
    expect_error("plan --device xeon-16 --tile 0,0", 2, "--tile: expected 1..4096, got 0");
    expect_error("plan --device h200 --tile 64,5000", 2, "--tile: expected 1..4096, got 5000");
    expect_error("roofline --device t4 --len 64", 69, "standard, fa1: needs compute capability 8.0");
    expect_error("plan --device h200 --dtype fp32 --bias --len 200000", 69, "1054 GiB too much");
    run_ok("plan --device h200 --bias --len 20000");
    expect_error("roofline --seed 3 --len 64", 2, "--seed: has no effect without --dropout");
    expect_error("plan --seed 3", 2, "--seed: has no effect without --dropout\n");
    run_ok("plan --seed 3 --dropout 0.5");
    expect_error("roofline --device a100 --schedule fa3", 69, "wgmma");
    expect_error("calibrate --threads 0", 2, "--threads");
    expect_error("calibrate --threads 1025", 2, "--threads: expected 1..");
    expect_error("calibrate --name 'a\nb' --threads 1", 2, "--name: expected text on one line");
    const std::string micro = " --micro " TESSERA_SOURCE_DIR "/bench/results/h200/micro.jsonl";
    expect_error("calibrate --device xeon-16" + micro, 2,
                 "--device: expected the GPU that the Records were measured on");
    expect_error("calibrate --device a100" + micro, 65, "device: expected Records of NVIDIA A100");
    std::ofstream(path("none.jsonl")).flush();
    expect_error("roofline --accuracy --records none.jsonl", 65, "--records: expected Records");
    expect_error("plan --len 64 --tile 2000,64 --device xeon-16", 69, "takes tiles up to 1024 x 1024");
    expect_error("calibrate --device h200", 2, "--device");
    expect_error("calibrate --micro x.jsonl", 2, "--device");
    expect_error("plan --device nowhere", 2, "--device");
}

}  // namespace
}  // namespace tessera::model_test
