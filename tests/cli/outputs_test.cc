// SPDX-License-Identifier: Apache-2.0
//
// Nothing is lost or ignored: files in the way of an output, options without effect, and failures reported in JSON.
#include <limits>

#include "io/safetensors.hpp"
#include "measure/record.hpp"
#include "plot/png.hpp"
#include "process.hpp"
#include "tessera/tensor.hpp"

namespace tessera::outputs_test {
namespace {

const std::string kRecordsOfH200 = TESSERA_SOURCE_DIR "/bench/results/h200/forward.jsonl";

class OutputsTest : public CommandTest {
 protected:
    void write(const std::string& name, const std::string& text) const { std::ofstream(path(name)) << text; }

    /// The command must refuse to write over `name`, which holds other things, and leave it as it is.
    void expect_kept(const std::string& arguments, const std::string& name) const {
        const std::string text = "mine, and worth more than a drawing\n";
        write(name, text);
        expect_error(arguments, 73, name + ": expected a new file or ");
        EXPECT_EQ(text_of(path(name)), text) << arguments;
    }
};

TEST_F(OutputsTest, what_is_no_output_of_theirs_is_kept) {
    write("r.jsonl", "");
    run_ok("bench --len 16 --repeat 1 --warm-up 0 -o r.jsonl");
    expect_kept("bench --len 16 --repeat 1 --warm-up 0 -o notes.txt", "notes.txt");
    expect_kept("roofline --len 64 --svg notes.svg", "notes.svg");
    if (plot::can_draw_png()) expect_kept("roofline --len 64 --png notes.png", "notes.png");
    expect_kept("report r.jsonl -o notes.html", "notes.html");
    expect_kept("report r.jsonl --markdown notes.md", "notes.md");
    expect_kept("calibrate -o notes.json", "notes.json");
    run_ok("gen --len 8 -o in.safetensors");
    expect_kept("gen --len 8 -o notes.safetensors", "notes.safetensors");
    expect_kept("run in.safetensors -o notes.safetensors", "notes.safetensors");
    // A tensor file is the result of hours.
    std::filesystem::copy_file(kSample, path("x.safetensors"));
    expect_error("bench --len 16 -o x.safetensors", 73, "expected a new file or records");
    EXPECT_EQ(text_of(path("x.safetensors")), text_of(kSample));
}

TEST_F(OutputsTest, a_name_of_another_format_is_refused) {
    write("r.jsonl", "");
    expect_error("report r.jsonl -o r.pdf", 2, "--output: expected a name that ends in .html or .htm");
    expect_error("report r.jsonl --markdown r.html", 2, "--markdown: expected a name that ends in .md");
    expect_error("roofline --len 64 --svg a.png", 2, "--svg: expected a name that ends in .svg");
    expect_error("roofline --len 64 --png a.svg", 2, "--png: expected a name that ends in .png");
    for (const char* name : {"r.pdf", "r.html", "a.png", "a.svg"}) EXPECT_FALSE(std::filesystem::exists(path(name)));
}

TEST_F(OutputsTest, their_own_outputs_are_written_again) {
    for (int i = 0; i < 2; ++i) {
        run_ok("bench --len 16 --repeat 1 --warm-up 0 -o r.jsonl");
        run_ok("report r.jsonl -o page.html --markdown page.md");
        run_ok("roofline --len 64 --svg a.svg");
        if (plot::can_draw_png()) run_ok("roofline --len 64 --png a.png");
        run_ok("gen --len 8 -o in.safetensors");
        run_ok("run in.safetensors -o out.safetensors");
    }
    EXPECT_EQ(measured_records("r.jsonl").size(), 2U);
}

/// Tensors of the file that change the result only if an option names them.
TEST_F(OutputsTest, tensors_that_are_not_used_are_told) {
    run_ok("gen --ragged 3,4,5x6 -o ragged.safetensors");
    expect_note(run_ok("run ragged.safetensors"), "cu_seqlens_q, which is not used; --cu-seqlens-q cu_seqlens_q");
    const Outcome used = run_ok("run ragged.safetensors --cu-seqlens-q cu_seqlens_q --cu-seqlens-kv cu_seqlens_kv");
    EXPECT_EQ(used.err.find("not used"), std::string::npos) << used.err;
    run_ok("gen --len 8 --bias --alibi -o biased.safetensors");
    for (const char* name : {"bias", "alibi_slopes"})
        expect_note(run_ok("run biased.safetensors"), std::string(name) + ", which is not used");
}

TEST_F(OutputsTest, a_machine_of_another_kind_judges_nothing) {
    run_on(kUnknownHost, "bench --backend cpu --len 16 --repeat 1 --warm-up 0 -o r.jsonl");
    expect_error("report r.jsonl --device h200 -o page.html", 2, "--device: expected a CPU");
    run_ok("report r.jsonl --device xeon-16 -o page.html");
    const Outcome none = run_ok("roofline --accuracy --records r.jsonl --device h200");
    expect_says(none, "measured on another kind of machine than h200");
    EXPECT_EQ(none.out.find("worst row"), std::string::npos) << none.out;
    expect_error("bench --suite .", 66, "expected a file, got a folder");
    expect_error("bench --suite /dev/zero", 66, "expected a file");
}

TEST_F(OutputsTest, two_drawings_want_two_files) {
    expect_error("roofline --len 64 --svg x --png x", 2, "--png: expected another file than --svg");
    EXPECT_TRUE(names().empty());
}

TEST_F(OutputsTest, an_empty_name_is_not_no_name) {
    expect_error("bench --len 16 -o ''", 2, "--output: expected a value, got an empty text");
    expect_error("run " + kSampleOptions + " -o ''", 2, "--output: expected a value");
    expect_error("roofline --len 64 --svg ''", 2, "--svg: expected a value");
    expect_error("calibrate -o ''", 2, "--output: expected a value");
}

TEST_F(OutputsTest, options_without_effect_are_refused) {
    expect_error("walk --by-hand --head-dim 32", 2, "--head-dim: has no effect with --by-hand");
    expect_error("walk --by-hand --window 1,0", 2, "--window: has no effect with --by-hand");
    expect_error("walk --by-hand --schedule fa3", 2, "--schedule: expected standard, fa1 or fa2");
    expect_error("bench --suite quick --len 5", 2, "--len: has no effect with --suite");
    expect_error("bench --list-suites --dtype bf16", 2, "--dtype: has no effect with --list-suites");
    expect_error("roofline --accuracy --svg a.svg", 2, "--svg: has no effect with --accuracy");
    expect_error("roofline --accuracy --device h200", 2, "--device: expected --records with it");
    expect_error("roofline --len 64 --threads 2", 2, "--threads: expected a CPU as --device, h200 is a GPU");
    expect_error("roofline --device xeon-16 --threads 17", 2, "--threads: expected 1..16, the cores of xeon-16");
    for (const char* by : {"published", "flash-attention", "cudnn"})
        expect_error(fmt::format("roofline --device xeon-16 --by {}", by), 2,
                     "--by: expected tessera: xeon-16 is a CPU");
    run_ok("roofline --device xeon-16 --by tessera --len 64");
    expect_error("roofline --len 64 --baseline fa1", 2, "--baseline: expected");
    expect_error("roofline --device xeon-16 --len 64 --baseline eager --accuracy", 2, "--accuracy");
    for (const char* command : {"roofline", "plan", "bench", "walk", "gen -o x.safetensors"})
        expect_error(fmt::format("{} --len 8 --len-q 4 --len-kv 2", command), 2, "--len: has no effect beside --len-q");
    expect_error("walk --len 16 --do do", 2, "--do: expected a file with it");
    expect_error("walk --len 16 --cu-seqlens-q c", 2, "--cu-seqlens-q: expected a file with it");
    expect_error("walk --len 16 --layout bshd", 2, "--layout: expected a file with it");
    const std::string own = "walk --by-hand --numbers 'q 1 0; k 1 0; v 1 0; do 1 0'";
    expect_error(own, 2, "--numbers: do has no effect without --backward");
    run_ok(own + " --backward");
    expect_error("check --case causal_square --cases 3", 2, "--cases: has no effect with --case");
    expect_error("check --case causal_square --shapes", 2, "--shapes: has no effect with --case");
    expect_error("check --cases 0 --seed 3", 2, "--seed: has no effect with --cases 0");
    expect_error("calibrate --micro m.jsonl --device h200 --threads 2", 2, "--threads: has no effect with --micro");
    expect_error("learn 6a --show --answer 1", 2, "--show: has no effect with --answer");
    expect_error("learn 6a --picture a.svg --answer 1", 2, "--answer: has no effect with --picture");
    expect_error("learn 6 --picture a.svg --show", 2, "--show: has no effect with --picture");
    expect_error("which --family --expect fa9", 2, "--expect: expected some of flash");
    run_ok("which --family --expect flash,fa3");
    expect_error("which --family --torch 2.11", 2, "--torch: has no effect with --family");
    const std::string call = "which --torch 2.11 --shape 2,32,64,128 --dtype bf16 --gpu ";
    expect_error(call + "h200 --expect fa3", 2, "--expect: expected a trace with it");
    expect_error(call + "gfx942 --cudnn 9.1.0", 2, "--cudnn: has no effect with AMD's gfx942");
    expect_error(call + "gfx942 --cuda 12.4", 2, "--cuda: has no effect with AMD's gfx942");
    expect_error("report " + kRecordsOfH200 + " -o p.html --device xeon-16", 2,
                 "--device: has no effect: the model knows NVIDIA H200");
}

TEST_F(OutputsTest, a_value_that_is_asked_for_twice_is_refused) {
    for (const char* twice : {"--len 64,64", "--len 64,128,64", "--len-q 4,4", "--heads 8,8/8", "--head-dim 64,64/64",
                              "--dtype bf16,bf16", "--causal none,none", "--schedule fa2,fa2"}) {
        const std::string option = std::string(twice).substr(0, std::string(twice).find(' '));
        expect_error(fmt::format("roofline {}", twice), 2, option + ": expected each value once, got");
        expect_error(fmt::format("bench {}", twice), 2, option + ": expected each value once, got");
    }
    expect_error("bench --len 16 --pass forward,forward", 2, "--pass: expected each value once");
    expect_error("which --torch 2.11 --shape 2,8,64,64 --dtype bf16 --off flash,flash", 2,
                 "--off: expected each value");
    run_ok("roofline --ragged 64,64");
}

TEST_F(OutputsTest, the_reference_is_not_predicted) {
    write("r.jsonl", "");
    run_ok("bench --backend reference --len 16 --repeat 1 --warm-up 0 --device xeon-16 -o r.jsonl");
    EXPECT_EQ(measure::read_records(path("r.jsonl")).size(), 1U);
}

TEST_F(OutputsTest, a_link_to_itself_is_told) {
    std::filesystem::create_symlink("loop", path("loop"));
    expect_error("bench --len 16 -o loop --resume", 73, "loop");
}

TEST_F(OutputsTest, failures_are_documents_for_programs) {
    const auto expect_document = [&](const std::string& arguments, int code, const std::string& message) {
        const Outcome outcome = run(arguments);
        EXPECT_EQ(outcome.code, code) << arguments;
        const auto json = outcome.json();
        EXPECT_EQ(json.at("exit_code"), code) << arguments;
        EXPECT_NE(json.at("error").get<std::string>().find(message), std::string::npos) << json;
        EXPECT_NE(outcome.err.find("tessera: error: "), std::string::npos) << "people are told, too";
    };
    expect_document("plan --json --len abc", 2, "--len: expected a whole number");
    expect_document("plan --bogus --json", 2, "--bogus");
    expect_document("--json run none.safetensors", 66, "none.safetensors");
    const Outcome many = run("roofline --json --device l4 --len 100000 --schedule standard");
    EXPECT_EQ(many.code, 69);
    EXPECT_NE(many.json().at("notes").at(0).get<std::string>().find("l4 has 24.0 GiB"), std::string::npos) << many.out;
    EXPECT_FALSE(run_ok("--json --version").json().at("version").get<std::string>().empty());
}

TEST_F(OutputsTest, results_that_are_nan_say_so) {
    std::vector<float> nan(8, std::numeric_limits<float>::quiet_NaN());
    const TensorView view = dense_view(nan.data(), DType::fp32, {1, 2, 1, 4});
    const std::vector<std::pair<std::string, TensorView>> named = {{"q", view}, {"k", view}, {"v", view}};
    io::write_safetensors(path("s.safetensors"), named);
    const Outcome quiet = run_ok("run " + kSampleOptions);
    EXPECT_EQ(quiet.out.find("NaN"), std::string::npos) << quiet.out;
    const Outcome told = run("run s.safetensors --check");
    EXPECT_NE(told.out.find("all 8 elements of o, all 2 elements of lse"), std::string::npos) << told.out;
    EXPECT_EQ(run_ok("run s.safetensors --json").json().at("nan").at("o"), 8);
}

TEST_F(OutputsTest, one_call_has_no_spread) {
    const auto records = [&](const std::string& repeat) {
        return run_ok("bench --len 16 --warm-up 0 --repeat " + repeat).out;
    };
    EXPECT_NE(records("1").find("   -  "), std::string::npos) << records("1");
    EXPECT_NE(records("9").find(" %"), std::string::npos) << records("9");
}

TEST_F(OutputsTest, kernels_tell_what_they_need) {
    const Outcome outcome = run_ok("list");
    EXPECT_NE(outcome.out.find("needs: "), std::string::npos);
    EXPECT_EQ(outcome.out.find("refuses: "), std::string::npos);
}

}  // namespace
}  // namespace tessera::outputs_test
