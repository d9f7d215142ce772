// SPDX-License-Identifier: Apache-2.0
//
// tessera bench: suites, and resuming after an interruption.
#include <csignal>
#include <sstream>
#include <thread>

#include "measure/machine_file.hpp"
#include "measure/record.hpp"
#include "process.hpp"

namespace tessera::bench_test {
namespace {

class BenchTest : public CommandTest {
 protected:
    void write(const std::string& name, const std::string& text) const { std::ofstream(path(name)) << text; }

    /// A suite of `cases` lengths that takes a while for each.
    void write_slow_suite(int cases) const {
        std::string lengths;
        for (int i = 0; i < cases; ++i) lengths += fmt::format("{}{}", i == 0 ? "" : ", ", 200 + i);
        write("slow.json", R"({"about": "slow", "sets": [{"schedule": "fa2", "heads": 4, "len": [)" + lengths + "]}]}");
    }
    std::size_t lines() const {
        const std::string text = text_of(path("r.jsonl"));
        return static_cast<std::size_t>(std::count(text.begin(), text.end(), '\n'));
    }
};

constexpr int kMostWaits = 12000;  // of 10 ms: a loaded machine takes long to start a program

const std::string kSlow = "bench --suite slow.json --repeat 40 --warm-up 200 -o r.jsonl";

TEST_F(BenchTest, more_threads_than_cores_are_told) {
    const std::string bench = "bench --backend cpu --schedule fa2 --len 16 --repeat 1 --warm-up 0 --threads ";
    const Outcome four = run_on(kUnknownHost, bench + "4");
    EXPECT_NE(four.err.find("4 threads share 3 cores"), std::string::npos) << four.err;
    const Outcome three = run_on(kUnknownHost, bench + "3");
    EXPECT_EQ(three.err.find("threads share "), std::string::npos) << three.err;
}

TEST_F(BenchTest, suites_by_name_are_found_and_valid) {
    const auto suites = run_ok("bench --list-suites --json").json();
    ASSERT_GE(suites.size(), 3U);
    for (const auto& suite : suites) EXPECT_FALSE(suite.at("about").get<std::string>().empty());
    expect_error("bench --suite nosuch", 66, "expected one of h200, lengths, quick, shapes");
}

TEST_F(BenchTest, a_suite_gives_the_records_of_its_sets) {
    write("s.json", R"({"about": "x", "sets": [
        {"len": [16, 32], "heads": "2/1", "head-dim": 8, "pass": ["forward", "backward"], "causal": "top-left"},
        {"ragged": "5,1x7", "heads": 1, "head-dim": 8, "alibi": true}]})");
    const Outcome outcome = run_ok("bench --suite s.json --repeat 1 --warm-up 0 -o r.jsonl");
    std::istringstream text(outcome.out);
    for (std::string line; std::getline(text, line);) EXPECT_LE(line.size(), 100U) << line;
    const auto records = measured_records("r.jsonl");
    ASSERT_EQ(records.size(), 5U);
    EXPECT_EQ(records[0].mask, "causal top-left");
    EXPECT_EQ(records[2].len_q, 32);
    EXPECT_EQ(records[4].features, "ragged rows 6 x 12, alibi");
}

TEST_F(BenchTest, mistakes_in_a_suite_name_the_field) {
    const auto expect_bad = [&](const std::string& text, const std::string& message) {
        write("bad.json", text);
        expect_error("bench --suite bad.json", 65, message);
    };
    expect_bad("{", "bad.json: expected JSON");
    expect_bad("[]", "bad.json: expected an object");
    expect_bad(R"({"about": "x"})", "sets: expected a list of sets");
    expect_bad(R"({"sets": []})", "sets: expected");
    expect_bad(R"({"sets": [{"len": 16}, {"lenn": 16}]})", "sets[1].lenn: expected one of");
    expect_bad(R"({"sets": [{"len": {}}]})", "sets[0].len: expected");
    expect_bad(R"({"sets": [{"alibi": 1}]})", "sets[0].alibi: expected true or false");
    expect_bad(R"({"sets": [{"len": -1}]})", "sets[0]: --len: expected");
    expect_bad(R"({"sets": [{"len": []}]})",
               "sets[0].len: expected a text, a number or a list of those that is not empty");
    expect_error("bench --suite ./missing.json", 66, "missing.json");
    expect_error("bench --len 16 --resume", 2, "--resume: expected --output with it");
    expect_error("bench --len 16 --warm-up -1", 2, "--warm-up: expected 0..60000");
}

/// A machine file whose products are `factor` times as fast as those of a known host.
std::string machine_file(double factor) {
    model::Machine machine = *model::find_machine("xeon-16");
    machine.fma_flop = {machine.fma_flop * factor, "a test"};
    machine.clock_ghz.source = machine.dram_gbs.source = "a test";
    machine.dram_gbs.value = 1e6;
    return measure::to_json(machine).dump();
}

TEST_F(BenchTest, predictions_stand_beside_measurements) {
    write("m.json", machine_file(10));
    const std::string bench = "bench --backend cpu --len 64,128 --heads 2 --repeat 2 --warm-up 0 --device m.json";
    const Outcome outcome = run_ok(bench + " -o r.jsonl");
    EXPECT_NE(outcome.out.find("predicted"), std::string::npos) << outcome.out;
    const auto records = measure::read_records(path("r.jsonl"));
    ASSERT_EQ(records.size(), 4U);
    EXPECT_EQ(records[0].what, "measured");
    EXPECT_EQ(records[1].what, "predicted");
    EXPECT_EQ(records[1].len_q, 64);
    EXPECT_GT(records[1].ms, 0);
    EXPECT_FALSE(records[0].bound.empty());
    run_ok(bench + " -o r.jsonl --resume");
    EXPECT_EQ(measure::read_records(path("r.jsonl")).size(), 4U);
}

/// The model recognises a host by all its properties. If only the processor's name matches, nothing is predicted.
TEST_F(BenchTest, predicts_on_a_known_host_only) {
    struct OnHost {
        std::string host;
        std::string device;
        bool known;
    };
    const OnHost hosts[] = {
        {kXeon16, "Intel(R) Xeon(R) Processor (AVX3, AMX, 16 cores, 300 MiB cache)", true},
        {kCloudXeon2, "Intel(R) Xeon(R) Processor (AVX3, 2 cores, 300 MiB cache)", false},
        {kXeon16 + "; cores=8", "Intel(R) Xeon(R) Processor (AVX3, AMX, 8 cores, 300 MiB cache)", false},
        {kXeon16 + "; cores=1", "Intel(R) Xeon(R) Processor (AVX3, AMX, 1 core, 300 MiB cache)", false},
        {kXeon16 + "; matrix_unit=", "Intel(R) Xeon(R) Processor (AVX3, 16 cores, 300 MiB cache)", false},
        {kXeon16 + "; isa=AVX2", "Intel(R) Xeon(R) Processor (AVX2, AMX, 16 cores, 300 MiB cache)", false},
        {kXeon16 + "; cache_mib=32", "Intel(R) Xeon(R) Processor (AVX3, AMX, 16 cores, 32 MiB cache)", false},
        {kXeon16 + "; cache_mib=0", "Intel(R) Xeon(R) Processor (AVX3, AMX, 16 cores)", false},
        {"cpu=AMD EPYC; isa=AVX2; matrix_unit=; cores=8; cache_mib=32", "AMD EPYC (AVX2, 8 cores, 32 MiB cache)",
         false},
        {"cpu=AMD A10-7850K Radeon R7; isa=AVX2; matrix_unit=; cores=4; cache_mib=4",
         "AMD A10-7850K Radeon R7 (AVX2, 4 cores, 4 MiB cache)", false},
        {kUnknownHost, "a processor that no machine has (AVX2, 3 cores, 7 MiB cache)", false},
    };
    for (const OnHost& one : hosts) {
        const std::string file = fmt::format("{}.jsonl", names().size());
        const Outcome outcome = run_on(one.host, "bench --backend cpu --len 16 --repeat 1 --warm-up 0 -o " + file);
        const auto records = measure::read_records(path(file));
        ASSERT_EQ(records.size(), one.known ? 2U : 1U) << one.host;
        EXPECT_EQ(records[0].device, one.device);
        EXPECT_EQ(records[0].versions.at("host"), "faked");
        EXPECT_EQ(records[0].bound.empty(), !one.known) << one.host;
        EXPECT_EQ(outcome.out.find("predicted") != std::string::npos, one.known) << outcome.out;
        const bool says_why = outcome.err.find("the model does not know " + one.device) != std::string::npos;
        EXPECT_EQ(says_why, !one.known) << outcome.err;
    }
}

TEST_F(BenchTest, a_faked_host_is_checked) {
    const auto expect_bad = [&](const std::string& host, const std::string& message) {
        const Outcome outcome = run("bench --backend cpu --len 16 --repeat 1", "TESSERA_FAKE_HOST='" + host + "'");
        EXPECT_NE(outcome.code, 0) << host;
        EXPECT_NE(outcome.err.find(message), std::string::npos) << outcome.err;
    };
    expect_bad("cpus=x", "expected cpu, isa, matrix_unit, cores or cache_mib, got \"cpus\"");
    expect_bad("cores=many", "cores: expected 0..1048576, got \"many\"");
    expect_bad("cache_mib=-1", "cache_mib: expected");
}

TEST_F(BenchTest, figures_above_the_roof_are_refused) {
    write("m.json", machine_file(1e-6));
    const Outcome outcome =
        run("bench --backend cpu --len 256 --heads 2 --repeat 2 --warm-up 0 --device m.json -o r.jsonl");
    EXPECT_EQ(outcome.code, 1);
    EXPECT_NE(outcome.err.find("above the"), std::string::npos) << outcome.err;
    EXPECT_NE(outcome.err.find("not recorded"), std::string::npos) << outcome.err;
    EXPECT_TRUE(measure::read_records(path("r.jsonl")).empty());
    expect_error("bench --len 16 --device nosuch", 2, "--device: expected a machine file");
}

TEST_F(BenchTest, a_killed_run_goes_on_where_it_was) {
    constexpr int kCases = 12;
    write_slow_suite(kCases);
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
        if (::chdir(folder().c_str()) != 0) ::_exit(99);
        ::execl("/bin/sh", "sh", "-c", fmt::format("exec {} {} >/dev/null 2>&1", TESSERA_COMMAND, kSlow).c_str(),
                nullptr);
        ::_exit(99);
    }
    for (int i = 0; i < kMostWaits && lines() < 3; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(10));
    ASSERT_EQ(::kill(child, SIGKILL), 0);
    ::waitpid(child, nullptr, 0);
    const std::string kept = text_of(path("r.jsonl"));
    const std::size_t before = measure::read_records(path("r.jsonl")).size();
    ASSERT_GE(before, 3U);
    ASSERT_LT(before, static_cast<std::size_t>(kCases)) << "the run was over before it was killed";

    std::ofstream(path("r.jsonl"), std::ios::app)
        << R"({"what":"measured","by":"tess)";  // half a line, as of a power cut
    const Outcome resumed = run_ok(kSlow + " --resume");
    EXPECT_NE(resumed.err.find(" cases that r.jsonl already holds"), std::string::npos) << resumed.err;
    EXPECT_EQ(text_of(path("r.jsonl")).rfind(kept, 0), 0U) << "records that were there changed";
    std::multiset<std::int64_t> lengths;
    for (const auto& record : measured_records("r.jsonl")) lengths.insert(record.len_q);
    EXPECT_EQ(lengths.size(), static_cast<std::size_t>(kCases));
    for (int i = 0; i < kCases; ++i) EXPECT_EQ(lengths.count(200 + i), 1U);

    const std::string all = text_of(path("r.jsonl"));
    run_ok(kSlow + " --resume");  // nothing is left to do
    EXPECT_EQ(text_of(path("r.jsonl")), all);
}

TEST_F(BenchTest, an_interrupted_run_ends_with_130) {
    write_slow_suite(50);
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
        if (::chdir(folder().c_str()) != 0) ::_exit(99);
        ::signal(SIGINT, SIG_DFL);  // a shell that runs the tests in the background has it ignored
        ::execl("/bin/sh", "sh", "-c", fmt::format("exec {} {} >/dev/null 2>&1", TESSERA_COMMAND, kSlow).c_str(),
                nullptr);
        ::_exit(99);
    }
    for (int i = 0; i < kMostWaits && lines() < 1; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(10));
    ::kill(child, SIGINT);
    int status = 0;
    ::waitpid(child, &status, 0);
    ASSERT_TRUE(WIFEXITED(status));
    EXPECT_EQ(WEXITSTATUS(status), 130);
    EXPECT_GE(measure::read_records(path("r.jsonl")).size(), 1U);
}

}  // namespace
}  // namespace tessera::bench_test
