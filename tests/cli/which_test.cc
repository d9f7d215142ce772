// SPDX-License-Identifier: Apache-2.0
//
// tessera which: its output and exit codes. tests/diagnose tests what it reads and finds.
#include <algorithm>

#include "process.hpp"

namespace tessera::which_test {
namespace {

const std::string kTraces = TESSERA_SOURCE_DIR "/examples/traces/";

class WhichTest : public CommandTest {
 protected:
    void write(const std::string& name, const std::string& text) const { std::ofstream(path(name)) << text; }
};

TEST_F(WhichTest, says_what_ran_and_what_kept_the_faster_one_out) {
    const auto json = run_ok("which " + kTraces + "padding.json --torch 2.11 --json").json();
    const auto& file = json.at("files").at(0);
    EXPECT_EQ(file.at("gpus").at(0).at("capability"), 90);
    const auto& kind = file.at("attention").at(0);
    EXPECT_EQ(kind.at("family"), "mem-efficient");
    EXPECT_EQ(kind.at("calls"), 4);
    EXPECT_EQ(kind.at("confidence"), "certain");
    const auto& why = kind.at("why_not_faster");
    EXPECT_EQ(why.at("ran"), "memory-efficient");
    bool mask = false;
    for (const auto& backend : why.at("backends")) {
        for (const auto& rule : backend.at("refusals")) mask = mask || rule.at("rule") == "flash-mask";
    }
    EXPECT_TRUE(mask) << why.dump(1);
    EXPECT_EQ(why.at("now").at("source"), "measured");
    const auto& way = why.at("ways").at(0);
    EXPECT_EQ(way.at("backend"), "cuDNN");
    EXPECT_EQ(way.at("changes").at(0).at("name"), "leave-context") << "it was pinned, since the rules say cuDNN";
    EXPECT_TRUE(way.at("faster"));
    EXPECT_GT(way.at("kernel_ms"), 0.1);
    EXPECT_LT(way.at("kernel_ms"), 1.9);
    EXPECT_GT(way.at("step_factor"), 1);
}

/// Kernel names contain no call, so options that describe a call would change nothing.
TEST_F(WhichTest, options_of_a_call_are_refused_beside_names) {
    write("names.txt", "flash_fwd_splitkv_kernel\n");
    run_ok("which names.txt --expect fa2");
    for (const char* option :
         {"--torch 2.11", "--gpu h200", "--grad", "--off flash", "--deterministic", "--cudnn 9.1.0", "--cuda 13.0"}) {
        const std::string name = std::string(option).substr(0, std::string(option).find(' '));
        expect_error(std::string("which names.txt ") + option, 2, name + ": has no effect with names of kernels");
    }
    run_ok("which names.txt " + kTraces + "padding.json --torch 2.11");  // there it has one
}

TEST_F(WhichTest, what_a_trace_tells_itself_is_refused_beside_it) {
    const std::string trace = "which " + kTraces + "padding.json";
    for (const char* option : {"--shape 1,2,3,4", "--dtype bf16", "--mask causal", "--dropout 0.1", "--gqa"}) {
        const std::string name = std::string(option).substr(0, std::string(option).find(' '));
        expect_error(trace + " --torch 2.11 " + option, 2, name + ": expected no file beside it");
    }
    run_ok(trace + " --torch 2.11 --grad --off cudnn");
    expect_note(run_ok(trace + " --torch 99.0"), "--torch: expected 2.4 to 2.15, whose checks are known, got 99.0");
    EXPECT_EQ(run_ok(trace + " --torch 2.11").err, "");
    expect_error(trace + " --expect flash,flash", 2, "--expect: expected each value once");
}

std::string in_one_line(std::string text) {
    std::replace(text.begin(), text.end(), '\n', ' ');
    return text;
}

/// A manager's questions: is that FlashAttention, was it training, and what ran besides?
TEST_F(WhichTest, says_it_to_somebody_who_never_heard_of_it) {
    const std::string both =
        std::string(TESSERA_SOURCE_DIR) + "/tests/diagnose/traces/block_flash_then_hand_train.json.gz";
    const std::string two = in_one_line(run_ok("which " + both).out);
    EXPECT_NE(two.find(" of them in the backward pass of training)"), std::string::npos) << two;
    EXPECT_NE(two.find(" The rest ran "), std::string::npos) << two;
    const std::string slow = in_one_line(run_ok("which " + kTraces + "by_hand.json").out);
    EXPECT_NE(slow.find("the slow way, which FlashAttention was made to replace"), std::string::npos) << slow;
    const std::string other = in_one_line(run_ok("which " + kTraces + "padding.json").out);
    EXPECT_NE(other.find("a fast way, of FlashAttention's kind"), std::string::npos) << other;
    write("cpu.json",
          R"({"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": )"
          R"("aten::_scaled_dot_product_flash_attention_for_cpu", "ts": 1, "dur": 2, "pid": 1, "tid": 1}]})");
    const std::string cpu = in_one_line(run_ok("which " + path("cpu.json")).out);
    EXPECT_NE(cpu.find("_flash_attention_for_cpu, once. There PyTorch took the fast way"), std::string::npos) << cpu;
}

/// Sixty kernels, one of them attention, with a GPU that mostly waits: no kernel of attention helps.
TEST_F(WhichTest, says_when_attention_is_not_the_problem) {
    std::string events;
    for (int i = 0; i < 60; ++i) {
        const char* name = i == 30 ? "void pytorch_flash::flash_fwd_kernel<...>" : "nvjet_tst_192x192_64x4";
        events += std::string(i == 0 ? "" : ",") + R"({"ph": "X", "cat": "kernel", "name": ")" + name +
                  R"(", "pid": 0, "tid": 7, "dur": 10, "args": {"stream": 7}, "ts": )" + std::to_string(1000 * i) + "}";
    }
    write("idle.json", R"({"deviceProperties": [{"name": "NVIDIA H100 NVL", "computeMajor": 9, "computeMinor": 0,
        "numSms": 132}], "traceEvents": [)" +
                           events + "]}");
    const std::string text = in_one_line(run_ok("which idle.json").out);
    EXPECT_NE(text.find("The step waits for the host"), std::string::npos) << text;
    EXPECT_NE(text.find("Attention is not where this trace's time goes"), std::string::npos) << text;
    const auto file = run_ok("which idle.json --json").json().at("files").at(0);
    EXPECT_EQ(file.at("clock").at("host_bound"), true);
    EXPECT_EQ(file.at("clock").at("busy_us"), 600);
    EXPECT_EQ(file.at("gpus").at(0).at("multiprocessors"), 132);
    EXPECT_NE(file.at("gpus").at(0).at("note").get<std::string>().find("H100 NVL"), std::string::npos);
}

/// A real trace: transformers repeats K and V when it passes a padding mask, though cuDNN takes both.
TEST_F(WhichTest, finds_repeated_keys_and_asks_the_rules_what_takes_them_grouped) {
    const std::string trace = TESSERA_SOURCE_DIR "/tests/diagnose/traces/llama_sdpa_padded.json.gz";
    const std::string text = in_one_line(run_ok("which " + trace + " --torch 2.11").out);
    EXPECT_NE(text.find("K and V were written 4 times over"), std::string::npos) << text;
    EXPECT_NE(text.find("with enable_gqa=True, by cuDNN"), std::string::npos) << text;
    const std::string without = in_one_line(run_ok("which " + trace + " --torch 2.4").out);
    EXPECT_EQ(without.find("with enable_gqa=True, by"), std::string::npos) << "2.4 has no enable_gqa";
}

TEST_F(WhichTest, reads_names_from_a_pipe) {
    write("names",
          "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128\nreshape_and_cache_flash_kernel\n");
    const Outcome outcome = run("which -", "", "< " + path("names"));
    EXPECT_EQ(outcome.code, 0) << outcome.err;
    EXPECT_NE(in_one_line(outcome.out).find("FlashAttention-2 (PyTorch's own copy)"), std::string::npos) << outcome.out;
    EXPECT_NE(outcome.out.find("computes no attention"), std::string::npos) << outcome.out;
}

TEST_F(WhichTest, is_a_guard_with_expect) {
    EXPECT_EQ(run("which " + kTraces + "causal.json --expect flash").code, 0);
    EXPECT_EQ(run("which " + kTraces + "causal.json --expect cudnn,fa2").code, 0);
    const Outcome other = run("which " + kTraces + "causal.json --expect fa3 --json");
    EXPECT_EQ(other.code, 1);
    EXPECT_EQ(other.json().at("as_expected"), false);
    EXPECT_NE(other.err.find("expected fa3, but fa2 ran"), std::string::npos) << other.err;
    write("none", "nvjet_tst_192x192\n");
    EXPECT_EQ(run("which none --expect fa2").code, 1);
    write("unsure", "_fwd_kernel\n");
    EXPECT_EQ(run("which unsure --expect triton").code, 1);
    expect_error("which none --expect fa9", 2, "--expect: expected some of flash, fa1, fa2");
}

TEST_F(WhichTest, says_what_is_wrong) {
    expect_error("which", 2, "FILE");
    expect_error("which nosuch.json", 66, "nosuch.json");
    expect_error("which .", 66, "regular file, got a directory");
    write("utf16.csv", std::string("\xFF\xFEN\0a\0", 6));
    expect_error("which utf16.csv", 65, "UTF-16");
    write("empty", "");
    expect_error("which empty", 65, "empty");
    write("report.nsys-rep", "x");
    expect_error("which report.nsys-rep", 65, "nsys export --type sqlite");
    write("json", "{\"a\": 1}");
    expect_error("which json", 65, "without any");
    expect_error("which json --family", 2, "--family");
    expect_error("which json --shape 1,1,1,1", 2, "--shape");
}

TEST_F(WhichTest, tells_a_stranger_what_he_gave_it) {
    expect_error("which " TESSERA_SOURCE_DIR "/README.md", 65, "got a text");
    expect_error("which " TESSERA_SOURCE_DIR "/docs/numerics.md", 65, "got a text");
    write("prose.txt", "Dear Sir,\nwhich kernel ran?\n");
    EXPECT_NE(run_ok("which prose.txt").out.find("None of these lines"), std::string::npos);
    write("some.txt", "Dear Sir,\nflash_fwd_kernel\n");
    EXPECT_EQ(run_ok("which some.txt").out.find("None of these lines"), std::string::npos);
    write("cut.json",
          "{\"traceEvents\": [{\"ph\": \"X\", \"cat\": \"kernel\", \"name\": \"flash_fwd_kernel\", \"ts\": 1, "
          "\"dur\": 2, \"args\": {}}, {\"ph\": ");
    EXPECT_NE(run_ok("which cut.json").out.find("The file is cut off"), std::string::npos);
}

/// A condition of the result stands beside the gain, and a statement about a family holds for all of its kernels.
TEST_F(WhichTest, says_on_what_a_statement_depends) {
    const std::string masked =
        run_ok("which " TESSERA_SOURCE_DIR "/tests/diagnose/traces/block_fp32_bias_train.json.gz").out;
    const std::string paragraph = masked.substr(0, masked.find("\nkernel"));
    EXPECT_NE(paragraph.find("right only"), std::string::npos) << paragraph;
    write("names.txt",
          "sm90_fwd_flash_attn_fp8\nfmha_v2_flash_attention_e4m3_64_64_S_128_sm89_kernel\n"
          "fmha_v2_flash_attention_bf16_64_64_S_128_sm80_kernel\nqk_int_sv_f8_attn_kernel\n");
    const std::string mixed = run_ok("which names.txt").out;
    EXPECT_NE(mixed.find("a kernel of TensorRT-LLM"), std::string::npos) << mixed;
    EXPECT_NE(mixed.find("SageAttention"), std::string::npos) << mixed;
    EXPECT_NE(mixed.find("are not exact"), std::string::npos) << mixed;
}

TEST_F(WhichTest, knows_amds_gpus) {
    const auto json =
        run_ok("which --torch 2.10 --gpu gfx942:sramecc+ --shape 2,8,512,64 --dtype bf16 --mask bool --json").json();
    EXPECT_EQ(json.at("taken"), "memory-efficient") << json.dump(1);
    write("amd.json", R"({"deviceProperties": [{"name": "AMD Instinct MI300X", "computeMajor": 9, "computeMinor": 4}],
        "traceEvents": [
        {"ph": "X", "cat": "cpu_op", "name": "aten::scaled_dot_product_attention", "pid": 1, "tid": 1, "ts": 1,
         "dur": 90, "args": {"External id": 1, "Input type": ["c10::Half", "c10::Half", "c10::Half", "bool"],
         "Input Dims": [[1, 8, 512, 64], [1, 8, 512, 64], [1, 8, 512, 64], [512, 512]]}},
        {"ph": "X", "cat": "cpu_op", "name": "aten::_scaled_dot_product_attention_math", "pid": 1, "tid": 1, "ts": 2,
         "dur": 80, "args": {"External id": 2}},
        {"ph": "X", "cat": "cuda_runtime", "name": "hipLaunchKernel", "pid": 1, "tid": 1, "ts": 5, "dur": 2,
         "args": {"External id": 2, "correlation": 7}},
        {"ph": "X", "cat": "kernel", "name": "Cijk_Alik_Bljk_BBS_BH_MT64x64", "pid": 0, "tid": 0, "ts": 10, "dur": 20,
         "args": {"External id": 2, "correlation": 7, "stream": 0}}]})");
    const auto kind = run_ok("which amd.json --torch 2.10 --json").json().at("files").at(0).at("attention").at(0);
    EXPECT_EQ(kind.at("family"), "math");
    EXPECT_EQ(kind.at("why_not_faster").at("taken"), "memory-efficient") << kind.dump(1);
}

TEST_F(WhichTest, answers_without_a_trace) {
    const auto json =
        run_ok("which --torch 2.11 --gpu h200 --shape 2,32,4096,128 --dtype bf16 --mask bool --json").json();
    EXPECT_TRUE(json.contains("taken")) << json.dump(1);
    EXPECT_NE(run_ok("which --family").out.find("flash"), std::string::npos);
}

/// Every name of a kernel in the family tree can be pasted to tessera which.
TEST_F(WhichTest, knows_the_kernels_of_its_family_tree) {
    const auto tree = run_ok("which --family --json").json().at("relatives");
    std::size_t known = 0;
    for (const auto& relative : tree) {
        const std::string kernel = relative.at("kernel");
        if (kernel.empty()) continue;
        write("name", kernel + "\n");
        const auto file = run_ok("which name --json").json().at("files").at(0);
        const bool softmax = relative.at("family") == "eager";
        const auto& rows = file.at(softmax ? "softmax" : "attention");
        ASSERT_EQ(rows.size(), 1U) << kernel;
        if (!softmax) {
            EXPECT_EQ(rows.at(0).at("family"), relative.at("family")) << kernel;
        }
        ++known;
    }
    EXPECT_GE(known, 19U);
}

/// Each block of docs/which.md that begins with a command is what that command prints.
TEST_F(WhichTest, prints_what_the_page_shows) {
    for (const char* name : {"examples", "tests"})
        std::filesystem::create_directory_symlink(TESSERA_SOURCE_DIR "/" + std::string(name), path(name));
    std::ifstream page(TESSERA_SOURCE_DIR "/docs/which.md");
    const std::string prompt = "    $ tessera ";
    int commands = 0;
    std::string line;
    bool more = static_cast<bool>(std::getline(page, line));
    while (more) {
        if (line.rfind(prompt, 0) != 0) {
            more = static_cast<bool>(std::getline(page, line));
            continue;
        }
        const std::string command = line.substr(prompt.size());
        std::string expected;
        while ((more = static_cast<bool>(std::getline(page, line))) && (line.rfind("    ", 0) == 0 || line.empty())) {
            if (line.rfind(prompt, 0) == 0) break;
            expected += line.empty() ? "\n" : line.substr(4) + "\n";
        }
        while (expected.size() > 1 && expected[expected.size() - 2] == '\n') expected.pop_back();
        const Outcome outcome = run(command);
        EXPECT_EQ(outcome.out, expected) << command << "\n" << outcome.err;
        ++commands;
    }
    EXPECT_GE(commands, 5);
}

/// The fields of a document do not depend on the kind of file; what a file does not say is null.
TEST_F(WhichTest, json_has_the_same_fields_for_every_kind_of_file) {
    write("names.txt", "flash_fwd_splitkv_kernel\n");
    write("table.md", "| kernel | time | runs |\n| --- | --- | --- |\n| flash_fwd_splitkv_kernel | 774.9 us | 2 |\n");
    const auto keys = [](const nlohmann::json& object) {
        std::string text;
        for (const auto& [key, value] : object.items()) text += key + " ";
        return text;
    };
    const auto read = [&](const std::string& file) {
        return run_ok("which " + file + " --json").json().at("files").at(0);
    };
    const auto trace = read(kTraces + "padding.json");
    EXPECT_TRUE(trace.at("steps").is_null());
    for (const char* name : {"names.txt", "table.md"}) {
        const auto other = read(name);
        EXPECT_EQ(keys(other), keys(trace)) << name;
        EXPECT_EQ(keys(other.at("attention").at(0)), keys(trace.at("attention").at(0))) << name;
        EXPECT_TRUE(other.at("clock").is_null()) << name;
    }
    EXPECT_TRUE(read("names.txt").at("attention").at(0).at("us").is_null());
    EXPECT_NEAR(read("table.md").at("attention").at(0).at("us").get<double>(), 774.9, 0.01);
}

}  // namespace
}  // namespace tessera::which_test
