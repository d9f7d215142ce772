// SPDX-License-Identifier: Apache-2.0
//
// roofline --compare and --model, and the forms --csv and --json.
#include <map>
#include <sstream>

#include "process.hpp"

namespace tessera::questions_test {
namespace {

class QuestionsTest : public CommandTest {
 protected:
    static void expect_fits(const Outcome& outcome) {
        std::istringstream lines(outcome.out);
        for (std::string line; std::getline(lines, line);) EXPECT_LE(line.size(), 80U) << line;
    }

    /// A table of comma-separated values: its rows, each by the names of its columns. No cell of these tests has
    /// quotes.
    static std::vector<std::map<std::string, std::string>> table_of(const Outcome& outcome) {
        std::vector<std::map<std::string, std::string>> rows;
        std::vector<std::string> names;
        std::istringstream lines(outcome.out);
        for (std::string line; std::getline(lines, line);) {
            std::vector<std::string> cells;
            std::istringstream parts(line);
            for (std::string cell; std::getline(parts, cell, ',');) cells.push_back(cell);
            if (names.empty()) {
                names = cells;
                continue;
            }
            auto& row = rows.emplace_back();
            for (std::size_t i = 0; i < std::min(names.size(), cells.size()); ++i) row[names[i]] = cells[i];
        }
        return rows;
    }

    /// The text with one space in the place of each line break and its indentation.
    static std::string in_one_line(const std::string& text) {
        std::string result;
        for (const char c : text)
            if (c != '\n' && (c != ' ' || !result.ends_with(' '))) result += c;
            else if (!result.ends_with(' ')) result += ' ';
        return result;
    }

    void write_config() const {
        std::ofstream(path("config.json"))
            << R"({"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
                   "num_hidden_layers": 32, "num_key_value_heads": 8, "vocab_size": 128256,
                   "torch_dtype": "bfloat16", "unknown": [1]})";
    }
};

TEST_F(QuestionsTest, machines_stand_in_one_table) {
    const std::string call = "--len 8192 --heads 16 --head-dim 128 --causal bottom-right";
    const Outcome text = run_ok("roofline --compare a100,h200,rtx4090 " + call);
    expect_fits(text);
    for (const char* word : {"\na100 ", "\nh200 ", "\nrtx4090 ", "1.00x", "TFLOP/s", "+-", "the time of a100 over"})
        expect_says(text, word);
    const auto document = run_ok("roofline --json --compare a100,h200,rtx4090 " + call).json();
    ASSERT_EQ(document.at("rows").size(), 3U);
    const auto alone = run_ok("roofline --json --device h200 " + call).json().at("rows").at(0).at("schedules");
    double best = 1e9;
    for (const auto& schedule : alone) best = std::min(best, schedule.at("ms").get<double>());
    const auto& h200 = document.at("rows").at(1);
    EXPECT_EQ(h200.at("ms").get<double>(), best);
    EXPECT_EQ(h200.at("speed").get<double>(), document.at("rows").at(0).at("ms").get<double>() / best);
    EXPECT_GT(h200.at("error").get<double>(), 0);
    expect_says(run_ok("roofline --compare a100,h200 --len-q 1 --len-kv 65536 --batch 32 --heads 32/8"), "GB/s");
    const auto mixed = run_ok("roofline --compare t4,h200 --len 1024 --json").json().at("rows");
    EXPECT_EQ(mixed.at(0).at("refusal"), "needs compute capability 8.0, t4 has 7.5");
    EXPECT_EQ(mixed.at(1).at("problem").at("dtype"), "fp16");  // both have it
    run_ok("machine h200 --set cores=66 -o half.json");
    EXPECT_NEAR(run_ok("roofline --compare h200,half.json --json " + call).json().at("rows").at(1).at("speed"), 0.5,
                0.1);
}

TEST_F(QuestionsTest, compare_names_bad_machines) {
    expect_error("roofline --compare h200", 2, "--compare: expected two machines or more");
    expect_error("roofline --compare h200,h300", 2, "--compare: expected a machine file");
    expect_error("roofline --compare h200,h200", 2, "--compare: expected each value once");
    expect_error("roofline --compare h200,xeon-16", 2, "--compare: expected GPUs only or CPUs only");
    expect_error("roofline --compare h200,a100 --device l4", 2, "--device: expected --compare or --device");
    expect_error("roofline --compare h200,a100 --worksheet", 2, "--worksheet: has no effect with --compare");
    expect_error("roofline --compare h200,a100 --baseline eager", 2, "--baseline: has no effect with --compare");
    expect_error("roofline --compare v100,t4 --len 64", 69, "no machine can be predicted");
}

TEST_F(QuestionsTest, compare_says_what_the_times_leave_out) {
    const std::string call = "roofline --compare 'h100, b200' --len 16384 --heads 16 --head-dim 128 ";
    const Outcome plain = run_ok(call);
    expect_fits(plain);
    EXPECT_EQ(plain.out.find("e+0"), std::string::npos) << plain.out;  // 1,350 TFLOP/s
    EXPECT_EQ(plain.out.find("not modelled"), std::string::npos);
    expect_says(run_ok(call + "--softcap 50"), "softcap: the kernels take longer by its cost on h100, b200");
    EXPECT_EQ(run_ok(call + "--softcap 50 --json").json().at("rows").at(1).at("not_modelled"), "softcap");
    expect_says(run_ok("roofline --compare h100,b200 --len-q 1 --len-kv 8192"), "as published tables have few of them");
}

TEST_F(QuestionsTest, a_baseline_in_each_form) {
    const std::string call =
        "roofline --device h200 --len 2048 --heads 16 --head-dim 64 --schedule fa3 --baseline eager ";
    const Outcome csv = run_ok(call + "--csv");
    const auto row = run_ok(call + "--json").json().at("rows").at(0);
    expect_says(csv, ",baseline,baseline_ms,win,win_error\n");
    expect_says(csv, fmt::format(",eager,{},{}", row.at("baseline").at("ms").dump(),
                                 row.at("schedules").at(0).at("win").dump()));
    expect_error(call + "--csv --amdahl 0.4", 2, "--amdahl: has no effect with --csv");
    run_ok(call + "--svg a.svg");
    std::ifstream file(path("a.svg"));
    const std::string svg{std::istreambuf_iterator<char>(file), {}};
    EXPECT_NE(svg.find(">eager<"), std::string::npos);
}

TEST_F(QuestionsTest, a_comparison_with_standard_needs_all_costs) {
    const Outcome drops = run_ok("roofline --device h200 --len 4096 --dropout 0.1 --baseline math");
    EXPECT_EQ(drops.out.find("never faster than standard"), std::string::npos) << drops.out;
    expect_says(run_ok("roofline --device h200 --kv-lengths 4000,17,512 --len-q 1 --len-kv 8192"), "efficient");
    expect_says(run_ok("roofline --device h200 --dtype fp32 --by tessera --len 4k"),
                "memory-efficient are of 16-bit inputs");
}

TEST_F(QuestionsTest, a_model_by_its_config) {
    write_config();
    const std::string command = "roofline --model config.json --batch 4 --len 8k";
    const Outcome text = run_ok(command);
    expect_fits(text);
    for (const char* word :
         {"llama: 32 layers (32 full), heads 32/8, head_dim 128", "bf16, batch 4, len 8,192", "8.03 billion parameters",
          "prefill", "training step", "decode", "of the FLOP of the model", "of the bytes that a step reads",
          "128.0 KiB a token", "assumed"})
        EXPECT_NE(in_one_line(text.out).find(word), std::string::npos) << word << "\n" << text.out;
    const auto row = run_ok(command + " --json").json().at("rows").at(0);
    EXPECT_EQ(row.at("cache_bytes"), 4.0 * 8192 * 131072);
    EXPECT_EQ(row.at("fits"), true);
    // A layer costs as much as the same call by its numbers.
    const auto alone = run_ok(
                           "roofline --json --batch 4 --len 8192 --heads 32/8 --head-dim 128 --causal bottom-right "
                           "--schedule fa3")
                           .json();
    EXPECT_EQ(row.at("calls").at(0).at("layers").at(0).at("ms_of_layer"),
              alone.at("rows").at(0).at("schedules").at(0).at("ms"));
    EXPECT_FALSE(row.at("assumed").empty());
    EXPECT_EQ(run_ok("roofline --model . --batch 4 --len 8k").out, text.out);  // the folder of a model
    const auto both = run_ok(command + " --compare a100,h200 --json").json().at("rows");
    EXPECT_EQ(both.at(1).at("calls"), row.at("calls"));
    expect_fits(run_ok(command + " --compare a100,h200"));
    EXPECT_EQ(run_ok("roofline --model config.json --device l4 --batch 64 --len 32k --json")
                  .json()
                  .at("rows")
                  .at(0)
                  .at("fits"),
              false);
    EXPECT_EQ(table_of(run_ok(command + " --csv")).size(), 3U);
}

TEST_F(QuestionsTest, a_model_judges_memory_of_what_it_counts) {
    write_config();
    const Outcome compared = run_ok("roofline --model config.json --batch 4 --len 8k --compare h100,rtx5090");
    std::istringstream lines(compared.out);
    int calls = 0;
    for (std::string line; std::getline(lines, line);) {
        if (line.find(" ms ") == std::string::npos) continue;
        const bool training = line.starts_with("training step  ");
        if (!training && !line.starts_with("prefill ")) continue;
        ++calls;
        EXPECT_TRUE(line.ends_with(training ? " -" : " fit")) << line;
    }
    EXPECT_EQ(calls, 4) << compared.out;
    std::ofstream(path("fp8.json"))
        << R"({"model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32,
               "quantization_config": {"quant_method": "fp8"}})";
    const Outcome fp8 = run_ok("roofline --model fp8.json --len 8k");
    EXPECT_EQ(fp8.out.find("fit the"), std::string::npos) << fp8.out;
    EXPECT_NE(in_one_line(fp8.out).find("weights are counted in bf16, while the file says fp8"), std::string::npos);
    EXPECT_FALSE(run_ok("roofline --model fp8.json --len 8k --json").json().at("rows").at(0).contains("fits"));
}

TEST_F(QuestionsTest, a_model_says_why_it_has_no_answer) {
    std::ofstream(path("sinks.json"))
        << R"({"model_type": "gpt_oss", "head_dim": 64, "hidden_size": 2880, "num_attention_heads": 64,
               "num_key_value_heads": 8, "num_hidden_layers": 24, "sliding_window": 128})";
    const Outcome none = run("roofline --model sinks.json --len 8k --by flash-attention");
    EXPECT_EQ(none.code, 69);
    const std::string said = in_one_line(none.err);
    for (const char* word : {"no call of the model can be predicted", "flash-attention takes no sinks",
                             "--by tessera: predicts prefill, training step, decode"})
        EXPECT_NE(said.find(word), std::string::npos) << word << said;
    for (const char* by : {"", " --by tessera"})
        for (const auto& row : table_of(run_ok(std::string("roofline --model sinks.json --len 8k --csv") + by)))
            EXPECT_EQ(row.count("refusal"), 0U) << row.at("call");
    std::ofstream(path("latent.json"))
        << R"({"model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "kv_lora_rank": 512,
               "num_attention_heads": 128, "num_hidden_layers": 61, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
               "qk_rope_head_dim": 64, "v_head_dim": 128})";
    const auto rows = table_of(run_ok("roofline --model latent.json --len 8k --csv"));
    ASSERT_EQ(rows.size(), 3U);
    EXPECT_EQ(rows[2].at("call"), "decode");
    EXPECT_NE(rows[2].at("refusal").find("multi-head latent attention"), std::string::npos);
}

TEST_F(QuestionsTest, a_model_says_what_its_times_leave_out) {
    std::ofstream(path("gemma.json"))
        << R"({"model_type": "gemma2", "attn_logit_softcapping": 50.0, "head_dim": 256, "hidden_size": 3584,
               "num_attention_heads": 16, "num_hidden_layers": 42, "num_key_value_heads": 8, "sliding_window": 4096})";
    const std::string command = "roofline --model gemma.json --len 8k";
    for (const char* machines : {"", " --compare h100,h200"}) {
        const Outcome text = run_ok(command + machines);
        expect_fits(text);
        EXPECT_NE(in_one_line(text.out).find("not modelled softcap: the kernels take longer by its cost"),
                  std::string::npos)
            << text.out;
        // Each bar of the table has its sentence.
        for (const char* word : {"(window, forward)", "(grouped heads, forward)", "(decode, forward)"})
            EXPECT_NE(in_one_line(text.out).find(word), std::string::npos) << word << text.out;
    }
    const Outcome text = run_ok(command);
    EXPECT_NE(text.out.find("\ncall           layers            error\n"), std::string::npos) << text.out;
    const auto calls = run_ok(command + " --json").json().at("rows").at(0).at("calls");
    EXPECT_EQ(calls.at(0).at("layers").at(0).at("not_modelled"), "softcap");
}

TEST_F(QuestionsTest, a_model_says_what_is_wrong) {
    write_config();
    expect_error("roofline --model none.json", 66, "none.json");
    std::ofstream(path("empty.json")) << "{}";
    expect_error("roofline --model empty.json", 65, "empty.json: hidden_size: expected a whole number");
    std::ofstream(path("index.json")) << R"({"weight_map": {"a": "model-00001-of-00002.safetensors"}})";
    expect_error("roofline --model index.json", 65, "expected the config.json of a model, it is the index of a model");
    std::ofstream(path("text.json")) << "Entry not found";
    expect_error("roofline --model text.json", 65, "it is the error of a server");
    std::ofstream(path("open.json")) << "[[[[";
    for (const char* option : {"--model", "--device"})
        expect_error(std::string("roofline ") + option + " open.json", 65,
                     "it is text that begins like JSON and has an error at byte 5");
    std::ofstream(path("cut.json")) << R"({"model_type": "llama", "hidden_size": )";
    expect_error("roofline --model cut.json", 65, "has an error at byte 40");
    std::string machine = run_ok("machine h200").out;
    const std::string name = R"("name": "h200")";
    ASSERT_NE(machine.find(name), std::string::npos);
    machine.replace(machine.find(name), name.size(), R"("name": "h200\nsecond")");
    std::ofstream(path("lines.json")) << machine;
    expect_error("roofline --device lines.json", 65,
                 R"(name: expected a text of one line without control characters, got "h200\nsecond")");
    std::ofstream(path("deep.json")) << std::string(100'000, '[') + std::string(100'000, ']');
    expect_error("roofline --model deep.json", 65, "config: expected a JSON object, got a list");
    expect_error("roofline --device deep.json", 65, "machine: expected a JSON object, got a list");
    std::ofstream(path("wide.json"))
        << R"({"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 512})";
    expect_error("roofline --model wide.json", 69, "wide.json: head_dim: expected 1..256, got 512");
    expect_error("roofline --model config.json --head-dim 64", 2, "--head-dim: has no effect with --model");
    expect_error("roofline --model config.json --batch 0", 2, "--batch: expected 1..2^20");
    expect_error("roofline --model config.json --len 0", 2, "--len: expected 1..2^24");
}

TEST_F(QuestionsTest, sizes_of_0_are_refused) {
    for (const char* size : {"--len 0", "--batch 0", "--heads 0", "--len-q 0", "--len-kv 0"})
        expect_error(std::string("roofline ") + size, 2, ": expected 1 or more, since a call without work");
}

TEST_F(QuestionsTest, csv_has_the_numbers_of_json) {
    const auto rows = table_of(run_ok("roofline --csv --len 1024,4096 --pass both"));
    const auto document = run_ok("roofline --json --len 1024,4096 --pass both").json();
    ASSERT_EQ(rows.size(), 2U * 4 * 2);
    const auto& pass = document.at("rows").at(1).at("schedules").at(3).at("passes").at(1);
    EXPECT_EQ(rows.back().at("schedule"), "fa3");
    EXPECT_EQ(rows.back().at("pass"), "backward");
    EXPECT_EQ(rows.back().at("len_q"), "4096");
    EXPECT_EQ(rows.back().at("ms"), pass.at("ms").dump());
    EXPECT_EQ(rows.back().at("error"), pass.at("error").dump());
    EXPECT_EQ(table_of(run_ok("machine --csv")).front().at("name"), "v100");
    EXPECT_EQ(table_of(run_ok("plan --csv --device h200 --dtype bf16 --len 4096 --head-dim 128")).front().at("kernel"),
              "cuda.fa3.forward");
    EXPECT_EQ(table_of(run_ok("bench --csv --len 16 --heads 1 --head-dim 8 --repeat 1")).front().at("len_q"), "16");
    const Outcome list = run_ok("list --csv");
    EXPECT_EQ(list.out.rfind("name,backend,schedule,pass,dtypes,summary,limits\n", 0), 0U) << list.out;
    EXPECT_NE(list.out.find("cpu.fa2.forward,cpu,fa2,forward,"), std::string::npos);
    EXPECT_EQ(table_of(run_ok("check --csv --kernel cpu.fa1.forward --case causal_square")).front().at("ran"), "1");
    const Outcome both = run("list --csv --json");
    EXPECT_EQ(both.code, 2);
    EXPECT_EQ(both.json().at("error"), "--csv: expected without --json, which is another form of the same answer");
    expect_error("roofline --csv --worksheet --len 64", 2, "--csv: has no effect with");
}

TEST_F(QuestionsTest, documents_name_their_schema) {
    write_config();
    run_ok("gen --len 8 --heads 2 --head-dim 8 -o a.safetensors");
    std::ofstream(path("names.txt")) << "flash_fwd_kernel\n";
    const std::pair<const char*, const char*> documents[] = {
        {"list", "tessera.list/1"},
        {"machine", "tessera.machine.list/1"},
        {"machine h200", "tessera.machine/1"},
        {"plan", "tessera.plan/1"},
        {"why", "tessera.plan/1"},
        {"roofline --len 64", "tessera.roofline/1"},
        {"roofline --len 64 --timeline", "tessera.roofline.timeline/1"},
        {"roofline --tile 64,64", "tessera.roofline.tile/1"},
        {"roofline --len 64 --compare a100,h200", "tessera.roofline.compare/1"},
        {"roofline --model config.json", "tessera.roofline.model/1"},
        {"run a.safetensors", "tessera.run/1"},
        {"walk a.safetensors", "tessera.walk/1"},
        {"walk --by-hand", "tessera.walk.by_hand/1"},
        {"check --kernel cpu.fa1.forward --case causal_square", "tessera.check/1"},
        {"gen --len 8 -o b.safetensors", "tessera.gen/1"},
        {"which names.txt", "tessera.which/1"},
    };
    for (const auto& [command, schema] : documents) {
        const Outcome outcome = run_ok(std::string(command) + " --json");
        EXPECT_EQ(outcome.json().at("schema"), schema) << command;
        EXPECT_EQ(outcome.out.rfind("{\n  \"schema\"", 0), 0U) << command;  // the first field
    }
    for (const auto& record : run_ok("bench --json --len 16 --heads 1 --head-dim 8 --repeat 1").json())
        EXPECT_EQ(record.at("schema"), "tessera.bench/1");
    EXPECT_EQ(run("roofline --device h300 --json").json().at("schema"), "tessera.error/1");
}

TEST_F(QuestionsTest, plan_of_a_model_names_the_kernel_of_each_call) {
    write_config();
    const std::string command = "plan --model config.json --device h200 --batch 4 --len 8k";
    const Outcome text = run_ok(command);
    for (const char* word : {"prefill", "training step", "decode", "cuda.fa3.forward", "cuda.fa3.backward",
                             "cuda.decode.forward", "32 full"})
        expect_says(text, word);
    const auto json = run_ok(command + " --json").json();
    EXPECT_EQ(json.at("schema"), "tessera.plan.model/1");
    ASSERT_EQ(json.at("rows").size(), 4U);
    const auto& prefill = json.at("rows").at(0);
    EXPECT_EQ(prefill.at("layers"), 32);
    EXPECT_NEAR(prefill.at("ms"), 32 * prefill.at("ms_of_layer").get<double>(), 1e-9);
    const auto one = run_ok(
                         "plan --device h200 --json --batch 4 --len 8k --heads 32/8 --head-dim 128 "
                         "--causal bottom-right")
                         .json();
    EXPECT_EQ(prefill.at("kernel"), one.at("chosen").at("kernel"));
    EXPECT_EQ(prefill.at("ms_of_layer"), one.at("chosen").at("predicted").at("ms"));
    expect_says(run_ok(command + " --csv"), "call,kind,layers,pass,");
    expect_error("plan --model config.json", 2, "expected --device with it");
    expect_error("plan --model config.json --device h200 --heads 4", 2, "--heads");
    const Outcome a100 = run_ok("plan --model config.json --device a100");
    expect_says(a100, "cuda.fa2.forward");
    std::ofstream(path("latent.json"))
        << R"({"model_type": "deepseek_v3", "hidden_size": 7168, "num_attention_heads": 128, "num_hidden_layers": 61,
               "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
               "v_head_dim": 128, "intermediate_size": 18432, "vocab_size": 129280})";
    expect_says(run_ok("plan --model latent.json --device h200"), "compressed cache");
}

}  // namespace
}  // namespace tessera::questions_test
