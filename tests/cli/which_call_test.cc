// SPDX-License-Identifier: Apache-2.0
//
// tessera which without a trace: its options, and how it words a verdict. Which backend is taken is tested in
// tests/diagnose.
#include <sstream>

#include "process.hpp"

namespace tessera::which_call_test {
namespace {

using WhichCallTest = CommandTest;

/// A call that every backend takes; an option is left out, or put there with another value.
std::string command(const std::string& option = "", const std::string& value = "") {
    const std::pair<std::string, std::string> options[] = {
        {"--torch", "2.11"}, {"--gpu", "h200"}, {"--shape", "1,8,512,64"}, {"--dtype", "bf16"}};
    std::string text = "which";
    for (const auto& [name, usual] : options) {
        if (name != option) text += " " + name + " " + usual;
    }
    return value.empty() ? text : text + " " + option + " " + value;
}

struct Refused {
    const char* option;
    const char* value;
    const char* message;
};

/// The sizes and the machine may be named as in the other commands.
TEST_F(WhichCallTest, has_the_options_of_the_other_commands) {
    const auto said = [&](const std::string& options) {
        return run_ok("which --torch 2.11 --dtype bf16 --gqa --json " + options).json();
    };
    const auto expected = said("--gpu h200 --shape 2,32,4096,128/2,8,4096,128/2,8,4096,64");
    EXPECT_EQ(said("--device h200 --batch 2 --heads 32/8 --len 4k --head-dim 128/64"), expected);
    EXPECT_EQ(said("--gpu h200 --shape 1,8,1,64/1,8,512,64"), said("--gpu h200 --len-q 1 --len-kv 512"));
    expect_error(command("--len", "512"), 2, "--len: expected --shape or the sizes one by one, got both");
    expect_error("which --torch 2.11 --gpu h200 --dtype bf16 --batch 2", 2,
                 "--len: expected the length of q, k and v, or --len-q and --len-kv, got nothing");
    expect_error("which --torch 2.11 --gpu h200 --dtype bf16 --len 512 --heads 32,8", 2,
                 "--heads: expected 32/8 for 32 query heads");
    expect_error("which " TESSERA_SOURCE_DIR "/examples/traces/causal.json --len 512", 2,
                 "--len: expected no file beside it");
}

/// The message names the option, what was expected, and what came.
TEST_F(WhichCallTest, names_the_option_that_is_wrong) {
    const char* version = "expected a version like 2.11 or 2.5.1, got";
    const char* gpu =
        "expected a compute capability (9.0, sm90), one of AMD's (gfx942), or one of v100, t4, a100-40, a100, a10, "
        "rtxa5000";
    const char* shape = "expected BATCH,HEADS,LEN,DIM of q, then /k and /v if they differ, got";
    const char* number = "expected a whole number from 0 to 2^63 - 1, got";
    const char* list = "expected values with commas between them, got";
    const char* probability = "expected a probability 0 <= P < 1, got";
    const Refused all[] = {
        {"--torch", "x", version},
        {"--torch", "2.", version},
        {"--torch", "2.11.0.1", version},
        {"--torch", "-2.1", version},
        {"--torch", "99999.1", version},
        {"--gpu", "z9", gpu},
        {"--gpu", "sm", gpu},
        {"--gpu", "smx", gpu},
        {"--gpu", "9.0.1", gpu},
        {"--gpu", "9.10", gpu},
        {"--gpu", "0.9", gpu},
        {"--gpu", "sm4294967386", gpu},
        {"--shape", "1,2", shape},
        {"--shape", "1,2,3,4,5", shape},
        {"--shape", "1,2,3,4/1,2/3", shape},
        {"--shape", "a,b,c,d", number},
        {"--shape", "-1,2,3,4", number},
        {"--shape", "1,,3,4", list},
        {"--shape", "1,2,3,4/1,2,3,4/1,2,3,4/1,2,3,4", "expected at most the shapes of q, k and v, got"},
        {"--dtype", "int8", "expected one of fp16, bf16, fp32, fp64, fp8, got"},
        {"--dtype", "bf16/fp32/x", "expected one of fp16, bf16, fp32, fp64, fp8, got"},
        {"--dtype", "bf16/bf16/bf16/bf16", "expected at most the dtypes of q, k and v, got"},
        {"--mask", "diagonal", "expected one of none, causal, lower-right, bool, float, got"},
        {"--mask", "causal:1,2", "expected a shape only after bool or float, got"},
        {"--mask", "bool:x", number},
        {"--mask", "bool:", list},
        {"--mask", "bool:3,64", "expected a shape that broadcasts to the scores' 1,8,512,512, got"},
        {"--mask", "float:2,4,512,512", "expected a shape that broadcasts to the scores' 1,8,512,512, got"},
        {"--dropout", "1", probability},
        {"--dropout", "-0.1", probability},
        {"--dropout", "nan", probability},
        {"--dropout", "x", "expected a number, got"},
        {"--cudnn", "9.x", "expected a version like 9.19.0, got"},
        {"--cuda", "abc", "expected a version like 13.0, got"},
        {"--off", "flash,foo", "expected one of flash, efficient, math, cudnn, got"},
        {"--off", ",", list},
    };
    for (const Refused& row : all)
        expect_error(command(row.option, row.value), 2, fmt::format("{}: {}", row.option, row.message));
}

TEST_F(WhichCallTest, says_what_is_missing) {
    expect_error(command("--torch"), 2, "--torch: expected PyTorch's version: 2.4 to 2.15");
    expect_error(command("--shape"), 2, "--shape: expected the shape of q");
    expect_error(command("--dtype"), 2, "--dtype: expected the dtype of q, k and v");
}

TEST_F(WhichCallTest, refuses_a_release_that_is_not_in_the_table) {
    for (const char* version : {"2.3", "2.16", "3.0"})
        expect_error(command("--torch", version), 69,
                     std::string("expected a release from 2.4 to 2.15, got ") + version);
}

TEST_F(WhichCallTest, takes_a_gpu_by_its_name_and_by_its_capability) {
    const auto taken = [&](const std::string& gpu) {
        return run_ok(command("--gpu", gpu) + " --json").json().at("taken").get<std::string>();
    };
    for (const char* hopper : {"h200", "'NVIDIA H200'", "9.0", "sm90", "9"})
        EXPECT_EQ(taken(hopper), "cuDNN") << hopper;
    for (const char* ampere : {"a100", "'NVIDIA A100-SXM4-80GB'", "8.0", "sm80"}) EXPECT_EQ(taken(ampere), "flash");
    EXPECT_EQ(taken("sm120"), "flash");
}

TEST_F(WhichCallTest, every_option_reaches_its_check) {
    const auto rules = [&](const std::string& options) {
        std::set<std::string> found;
        const nlohmann::json answer = run_ok(command() + options + " --json").json();
        for (const auto& backend : answer.at("backends")) {
            for (const auto& rule : backend.at("refusals")) found.insert(rule.at("rule"));
        }
        return found;
    };
    const auto shaped = [&](const std::string& shape, const std::string& options) {
        return run_ok(command("--shape", shape) + options + " --json").json().dump();
    };
    EXPECT_TRUE(rules("").empty());
    EXPECT_EQ(rules(" --mask float:1,8,512,512").count("flash-mask"), 1U);
    EXPECT_EQ(rules(" --mask bool:8,512,512").count("cudnn-mask-shape"), 1U);
    EXPECT_EQ(rules(" --deterministic").count("cudnn-deterministic"), 1U);
    EXPECT_EQ(rules(" --off efficient,cudnn").count("efficient-off"), 1U);
    EXPECT_EQ(rules(" --dropout 0.25 --cudnn 9.12").count("cudnn-dropout-version"), 1U);
    EXPECT_NE(run_ok(command("--dtype", "bf16/fp32") + " --json").out.find("flash-dtype"), std::string::npos);
    EXPECT_NE(shaped("1,8,512,64/1,2,512,64", "").find("flash-heads"), std::string::npos);
    EXPECT_EQ(shaped("1,8,512,64/1,2,512,64", " --gqa").find("flash-heads"), std::string::npos);
    EXPECT_NE(shaped("1,8,512,64/1,8,512,64/1,8,512,128", "").find("flash-head-dim"), std::string::npos);
    const std::string wide = " --shape 1,8,512,256 --dtype bf16 --torch 2.11 --gpu 8.6 --dropout 0.1 --json";
    EXPECT_EQ(run_ok("which" + wide).json().dump().find("flash-wide-training"), std::string::npos);
    EXPECT_NE(run_ok("which --grad" + wide).json().dump().find("flash-wide-training"), std::string::npos);
}

TEST_F(WhichCallTest, words_each_standing) {
    const auto text = [&](const std::string& arguments) {  // without the breaks of lines
        std::istringstream words(run_ok(arguments).out);
        std::string joined;
        for (std::string word; words >> word;) joined += (joined.empty() ? "" : " ") + word;
        return joined;
    };
    const auto expect_words = [&](const std::string& arguments, std::initializer_list<const char*> words) {
        const std::string out = text(arguments);
        for (const char* part : words) EXPECT_NE(out.find(part), std::string::npos) << part << "\n" << out;
    };
    expect_words(command(), {"PyTorch takes cuDNN.", "the first in the order, and its checks pass",
                             "its checks pass, but another one comes first",
                             "Ways to another backend, with the predicted time of the forward", "+-"});
    expect_words(command() + " --off cudnn", {"PyTorch takes flash.", "cuDNN attention has been runtime",
                                              "its checks pass, and PyTorch refuses those before it",
                                              "cuDNN leave sdpa_kernel(...), and remove enable_..._sdp(False)"});
    expect_words(command("--gpu", "a100") + " --mask bool",
                 {"PyTorch takes memory-efficient. ", "flash takes no mask tensor", "flash drop attn_mask",
                  "Assumed: attn_mask is [len_q, len_kv];", "\"Flash Attention does not support non-null",
                  "FA3 nothing gets there: FA3 is compiled for Hopper"});
    expect_words(command("--shape", "2,32,4096,128/2,8,4096,128"),
                 {"PyTorch raises a RuntimeError (\"The size of tensor a (32) must match the size of tensor b (8) at "
                  "non-singleton dimension 1\")",
                  "The smallest change after which it runs, by cuDNN: set enable_gqa=True."});
    const std::string lower_right = command("--shape", "2,32,256,128/2,32,4096,128") + " --mask lower-right";
    expect_words(lower_right, {"PyTorch takes flash.", "causal_lower_right asks flash, then the memory-efficient"});
    expect_words(lower_right + " --off flash,efficient",
                 {"PyTorch takes cuDNN.", "causal_lower_right becomes a bool tensor of [len_q, len_kv] here"});
    expect_words(command() + " --off flash,efficient,cudnn",
                 {"PyTorch takes math.", "[len_q, len_kv] scores to memory"});
    expect_words(command() + " --off flash,efficient,math,cudnn",
                 {"PyTorch raises: every backend refuses this call (\"No available kernel. Aborting execution.\")."});
    const std::string unknown = text(command("--gpu"));
    EXPECT_NE(unknown.find("The options do not determine which backend PyTorch takes."), std::string::npos);
    EXPECT_NE(unknown.find("can't be known without the GPU's compute capability"), std::string::npos) << unknown;
    EXPECT_EQ(unknown.find("another one comes first"), std::string::npos) << unknown;
}

TEST_F(WhichCallTest, tells_programs_the_same) {
    const auto json = run_ok(command() + " --mask bool --json").json();
    EXPECT_EQ(json.at("taken"), "cuDNN");
    EXPECT_EQ(json.at("aborts"), false);
    EXPECT_EQ(json.at("order"), (nlohmann::json{"cuDNN", "flash", "memory-efficient", "math"}));
    EXPECT_EQ(json.at("backends").size(), 6U);
    for (const auto& backend : json.at("backends")) {
        const bool refused = backend.at("verdict") == "refused";
        EXPECT_EQ(refused, !backend.at("refusals").empty()) << backend.dump();
        for (const auto& rule : backend.at("refusals")) {
            for (const char* key : {"rule", "meaning", "source"}) EXPECT_NE(rule.at(key), "") << rule.dump();
        }
    }
    EXPECT_FALSE(json.at("assumed").empty());
    EXPECT_EQ(json.at("ways").size(), 4U);
    for (const auto& way : json.at("ways")) {
        const bool says_why = !way.at("blocked_by").empty() || !way.at("missing_fields").empty();
        EXPECT_TRUE(way.at("found") || says_why) << way.dump();
        EXPECT_NE(way.at("kernel_ms").is_null(), way.at("error").is_number()) << way.dump();
    }
    const auto unknown = run_ok(command("--gpu") + " --json").json();
    EXPECT_TRUE(unknown.at("taken").is_null());
    EXPECT_EQ(unknown.at("backends").at(0).at("missing_fields"), (nlohmann::json{"the GPU's compute capability"}));
    EXPECT_TRUE(run_ok(command() + " --off flash,efficient,math,cudnn --json").json().at("aborts").get<bool>());
}

/// Names as PyTorch prints them, and AMD's GPUs by the names on their boxes.
TEST_F(WhichCallTest, takes_names_of_dtypes_and_of_amd_gpus) {
    expect_says(run_ok(command("--dtype", "torch.bfloat16")), "cuDNN");
    const Outcome amd = run_ok(command("--gpu", "mi300x"));
    expect_says(amd, "AMD Instinct MI300X");
    expect_says(amd, "on ROCm flash comes");
    expect_error(command("--gpu", "mi100"), 2, "expected an AMD GPU of MI200, MI300 or MI350");
}

}  // namespace
}  // namespace tessera::which_call_test
