// SPDX-License-Identifier: Apache-2.0
//
// tessera run: what it computes, writes and says, whatever the form of its input.
#include "io/npy.hpp"
#include "io/safetensors.hpp"
#include "process.hpp"

namespace tessera::run_test {
namespace {

class RunTest : public CommandTest {
 protected:
    /// The bytes of a tensor of a file in the work folder.
    std::string tensor(const std::string& file, const std::string& name) const {
        const io::TensorFile read = io::read_safetensors(path(file));
        const io::NamedTensor* found = read.find(name);
        if (found == nullptr) return "no tensor " + name;
        const auto bytes = read.bytes(*found);
        return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
    }
    std::vector<std::int64_t> shape(const std::string& file, const std::string& name) const {
        return io::read_safetensors(path(file)).find(name)->shape;
    }
};

/// The schedules of the CPU backend, from `tessera list`.
std::set<std::string> cpu_schedules(const nlohmann::json& list) {
    std::set<std::string> schedules;
    for (const auto& kernel : list.at("kernels")) {
        if (kernel.at("backend") == "cpu") schedules.insert(kernel.at("schedule"));
    }
    return schedules;
}

TEST_F(RunTest, every_schedule_is_right_on_the_sample) {
    const auto schedules = cpu_schedules(run_ok("list --json").json());
    ASSERT_FALSE(schedules.empty());
    for (const std::string& schedule : schedules) {
        const auto json = run_ok(fmt::format("run {} --backend cpu --schedule {} --backward --check --json",
                                             kSampleOptions, schedule))
                              .json();
        for (const char* pass : {"forward", "backward"}) {
            EXPECT_EQ(json.at(pass).at("plan").at("schedule"), schedule);
            EXPECT_EQ(json.at(pass).at("check").at("pass"), true) << schedule << json.at(pass).dump(1);
            EXPECT_GT(json.at(pass).at("tiles").at("full"), 0);
            EXPECT_GT(json.at(pass).at("ms"), 0);
        }
    }
}

TEST_F(RunTest, every_schedule_is_right_in_every_dtype) {
    const auto schedules = cpu_schedules(run_ok("list --json").json());
    run_ok("gen --len-q 150 --len-kv 200 --heads 4/2 --head-dim 64 --grad --kind outliers -o a.safetensors");
    for (const std::string& schedule : schedules) {
        for (const char* dtype : {"fp32", "bf16", "fp16"}) {
            const Outcome outcome = run_ok(
                fmt::format("run a.safetensors --causal bottom-right --dtype {} --schedule {} --backward --check",
                            dtype, schedule));
            EXPECT_NE(outcome.out.find("within the contract"), std::string::npos) << outcome.out;
        }
    }
}

TEST_F(RunTest, writes_the_samples_own_output) {
    const Outcome outcome = run_ok("run " + kSampleOptions + " --backward -o out.safetensors");
    EXPECT_EQ(names(), std::set<std::string>{"out.safetensors"});
    for (const char* word :
         {"problem", "forward", "backward", "GFLOP/s", "tiles:", "out.safetensors (o, lse, dq, dk, dv;"}) {
        EXPECT_NE(outcome.out.find(word), std::string::npos) << word << "\n" << outcome.out;
    }
    const io::TensorFile input = io::read_safetensors(kSample);
    const io::TensorFile output = io::read_safetensors(path("out.safetensors"));
    const TensorView expected = input.view("o");
    const TensorView o = output.view("o");
    ASSERT_EQ(o.shape, expected.shape);  // [batch, heads, len, dim], as the input
    for (std::int64_t i = 0; i < o.size(); ++i)
        ASSERT_NEAR(*o.at<float>(0, 0, 0, i), *expected.at<float>(0, 0, 0, i), 1e-4) << i;
    EXPECT_EQ(output.find("lse")->shape, (std::vector<std::int64_t>{1, 4, 1500}));
    EXPECT_EQ(output.find("dk")->shape, (std::vector<std::int64_t>{1, 2, 1500, 64}));
    EXPECT_EQ(output.metadata().at("layout"), "batch,heads,seq,head_dim");  // of the input
    EXPECT_EQ(output.metadata().at("tessera.mask"), "causal bottom-right");
}

TEST_F(RunTest, layouts_agree) {
    run_ok("gen --batch 2 --len 33 --heads 4/2 --head-dim 8/16 --grad -o a.safetensors");
    run_ok("gen --batch 2 --len 33 --heads 4/2 --head-dim 8/16 --grad --layout bhsd -o b.safetensors");
    run_ok("run a.safetensors --backward --causal top-left -o oa.safetensors");
    run_ok("run b.safetensors --backward --causal top-left --layout bhsd -o ob.safetensors");
    EXPECT_EQ(shape("oa.safetensors", "o"), (std::vector<std::int64_t>{2, 33, 4, 16}));
    EXPECT_EQ(shape("ob.safetensors", "o"), (std::vector<std::int64_t>{2, 4, 33, 16}));
    EXPECT_EQ(tensor("oa.safetensors", "lse"), tensor("ob.safetensors", "lse"));
    const io::TensorFile a = io::read_safetensors(path("oa.safetensors"));
    const io::TensorFile b = io::read_safetensors(path("ob.safetensors"));
    const TensorView dk_a = a.view("dk");
    const TensorView dk_b = b.view("dk");
    for (std::int64_t i = 0; i < 2; ++i) {
        for (std::int64_t j = 0; j < 33; ++j) ASSERT_EQ(*dk_a.at<float>(i, j, 1, 3), *dk_b.at<float>(i, 1, j, 3));
    }
}

TEST_F(RunTest, npy_files_give_the_same_bytes) {
    run_ok("gen --batch 2 --len 20 --heads 2 --head-dim 8 --grad -o a.safetensors");
    const io::TensorFile file = io::read_safetensors(path("a.safetensors"));
    for (const char* name : {"q", "k", "v", "do"}) io::write_npy(path(std::string(name) + ".npy"), file.view(name));
    run_ok("run a.safetensors --backward -o x.safetensors");
    run_ok("run q.npy k.npy v.npy do.npy --backward -o y.safetensors");
    for (const char* name : {"o", "lse", "dq", "dk", "dv"})
        EXPECT_EQ(tensor("x.safetensors", name), tensor("y.safetensors", name)) << name;
    expect_error("run q.npy k.npy v.npy --backward", 65, "expected a fourth .npy file with do");
    expect_error("run q.npy k.npy v.npy --q z", 2, "--q: names a tensor of a .safetensors file");
}

TEST_F(RunTest, rank_three_is_one_batch_sequence_and_is_written_back_so) {
    run_ok("gen --len 20 --heads 2 --head-dim 8 -o a.safetensors");
    const io::TensorFile file = io::read_safetensors(path("a.safetensors"));
    for (const char* name : {"q", "k", "v"}) {
        io::write_npy(path(std::string(name) + ".npy"), dense_view(file.view(name).data, DType::fp32, {20, 2, 8}));
    }
    run_ok("run a.safetensors -o x.safetensors");
    run_ok("run q.npy k.npy v.npy -o y.safetensors");
    EXPECT_EQ(shape("y.safetensors", "o"), (std::vector<std::int64_t>{20, 2, 8}));
    EXPECT_EQ(shape("y.safetensors", "lse"), (std::vector<std::int64_t>{2, 20}));
    for (const char* name : {"o", "lse"})
        EXPECT_EQ(tensor("x.safetensors", name), tensor("y.safetensors", name)) << name;
}

TEST_F(RunTest, ragged_batch_with_bias_and_slopes) {
    run_ok("gen --ragged 5,0,1x9,7 --heads 4/2 --head-dim 8 --grad --alibi --bias -o a.safetensors");
    const std::string options =
        "run a.safetensors --cu-seqlens-q cu_seqlens_q --cu-seqlens-kv cu_seqlens_kv --alibi-slopes alibi_slopes";
    const auto json =
        run_ok(options +
               " --causal bottom-right --window 3,unbounded --softcap 20 --dropout 0.2 --seed 7 --backward --check "
               "-o out.safetensors --json")
            .json();
    EXPECT_EQ(json.at("problem").at("batch"), 4);
    EXPECT_EQ(json.at("problem").at("len_kv"), 9);
    EXPECT_EQ(json.at("backward").at("check").at("pass"), true);
    EXPECT_EQ(shape("out.safetensors", "o"), (std::vector<std::int64_t>{13, 4, 8}));
    EXPECT_EQ(shape("out.safetensors", "lse"), (std::vector<std::int64_t>{4, 13}));
    expect_error("run a.safetensors --cu-seqlens-q cu_seqlens_q", 2, "--cu-seqlens-kv: expected with --cu-seqlens-q");
    expect_error("run a.safetensors --cu-seqlens-q cu_seqlens_kv --cu-seqlens-kv cu_seqlens_q", 65,
                 "cu_seqlens_q: expected values up to the total 13, got 14 at index 3");
}

TEST_F(RunTest, dtypes_are_converted_exactly_or_refused) {
    run_ok("gen --len 16 --heads 2 --head-dim 8 --dtype fp64 -o d.safetensors");
    const auto kept = run_ok("run d.safetensors --json").json();
    EXPECT_EQ(kept.at("problem").at("dtype"), "fp64");
    EXPECT_EQ(kept.at("forward").at("plan").at("backend"), "reference");
    for (const char* dtype : {"fp32", "bf16", "fp16"}) {
        run_ok(fmt::format("run d.safetensors --dtype {0} --check -o {0}.safetensors", dtype));
        EXPECT_EQ(
            std::string(name_of(io::read_safetensors(path(fmt::format("{}.safetensors", dtype))).view("o").dtype)),
            dtype);
    }
    // Numbers that gen rounds and numbers that run rounds give equal inputs.
    run_ok("gen --len 16 --heads 2 --head-dim 8 --dtype bf16 -o b.safetensors");
    run_ok("run b.safetensors -o kept.safetensors");
    EXPECT_EQ(tensor("kept.safetensors", "o"), tensor("bf16.safetensors", "o"));
}

TEST_F(RunTest, empty_tensors_are_computed) {
    for (const char* shape_options :
         {"--len 0", "--batch 0", "--heads 0", "--len-q 5 --len-kv 0", "--len-q 0 --len-kv 5"}) {
        run_ok(fmt::format("gen {} --head-dim 8 --grad -o a.safetensors", shape_options));
        run_ok("run a.safetensors --backward --check -o out.safetensors");
    }
}

TEST_F(RunTest, threads_do_not_change_bits) {
    run_ok("gen --batch 2 --len 150 --heads 4/2 --head-dim 32 --grad -o a.safetensors");
    run_ok("run a.safetensors --backward --threads 1 -o x.safetensors");
    run_ok("run a.safetensors --backward --threads 7 -o y.safetensors");
    for (const char* name : {"o", "lse", "dq", "dk", "dv"})
        EXPECT_EQ(tensor("x.safetensors", name), tensor("y.safetensors", name)) << name;
}

}  // namespace
}  // namespace tessera::run_test
