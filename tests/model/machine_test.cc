// SPDX-License-Identifier: Apache-2.0
//
// Machines: the table, machine files, calibration.
#include "model/machine.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>

#include "measure/calibrate.hpp"
#include "measure/calibrate_kernels.hpp"
#include "measure/descent.hpp"
#include "measure/machine_file.hpp"
#include "model/cpu.hpp"
#include "tessera/error.hpp"

namespace tessera::model::machine_test {
namespace {

using Json = nlohmann::ordered_json;

TEST(Machines, every_number_has_a_source) {
    std::set<std::string> names;
    for (const Machine& machine : machines()) {
        EXPECT_TRUE(names.insert(machine.name).second) << machine.name;
        EXPECT_NO_THROW(validate(machine)) << machine.name;
        for_each_quantity(machine, [&](const char* name, const char*, const Quantity& quantity) {
            EXPECT_FALSE(quantity.source.empty()) << machine.name << " " << name;
        });
        EXPECT_GE(machine.clock_ghz, machine.loaded_clock_ghz) << machine.name;
    }
    for (const char* name :
         {"v100", "t4", "a100-40", "a100", "a10", "l4", "rtx3090", "rtx4090", "h100-pcie", "h100", "h200", "b200"})
        EXPECT_TRUE(names.contains(name)) << name;
}

/// Dense peaks with fp32 sums, as the makers state them.
TEST(Machines, peaks_are_those_of_the_datasheets) {
    const std::pair<const char*, double> peaks[] = {
        {"v100", 125},      {"t4", 65},         {"a100", 312}, {"a10", 125},  {"l4", 121},   {"rtx3090", 71},
        {"rtx4090", 165.2}, {"h100-pcie", 756}, {"h100", 989}, {"h200", 989}, {"b200", 2250}};
    for (const auto& [name, tflops] : peaks) {
        EXPECT_NEAR(find_machine(name)->peak_tflops(DType::fp16) / tflops, 1, 0.01) << name;
    }
    EXPECT_FALSE(find_machine("v100")->supports(DType::bf16));
    EXPECT_TRUE(find_machine("a100")->supports(DType::bf16));
    EXPECT_EQ(find_machine("no such"), nullptr);
}

TEST(Machines, are_found_by_device_names) {
    const auto name_of = [](const char* device) {
        const Machine* machine = machine_of_device(device);
        return machine == nullptr ? std::string("none") : machine->name;
    };
    EXPECT_EQ(name_of("NVIDIA H200"), "h200");
    EXPECT_EQ(name_of("sm_90 (NVIDIA H100 80GB HBM3)"), "h100");
    EXPECT_EQ(name_of("NVIDIA H100 PCIe"), "h100-pcie");
    EXPECT_EQ(name_of("NVIDIA A100-SXM4-80GB"), "a100");
    EXPECT_EQ(name_of("NVIDIA A100-SXM4-40GB"), "a100-40");
    EXPECT_EQ(name_of("NVIDIA A10"), "a10");
    EXPECT_EQ(name_of("NVIDIA L40"), "none");
    EXPECT_EQ(name_of("AVX3"), "none");
    EXPECT_EQ(name_of("Intel(R) Xeon(R) Processor (AVX3, AMX, 16 cores, 300 MiB cache)"), "xeon-16");
    EXPECT_EQ(name_of("Intel(R) Xeon(R) Processor (AVX3, 2 cores, 300 MiB cache)"), "none");
    EXPECT_EQ(name_of("Intel(R) Xeon(R) Processor (AVX3)"), "none");
    EXPECT_EQ(name_of("Intel(R) Xeon(R) Processor"), "none");
    EXPECT_EQ(name_of("AMD A10-7850K Radeon R7"), "none");
}

class MachineFile : public testing::Test {
 protected:
    void SetUp() override {
        path_ = (std::filesystem::temp_directory_path() / ("tessera_machine_" + std::to_string(::getpid()) + ".json"))
                    .string();
    }
    void TearDown() override { std::filesystem::remove(path_); }

    void expect_bad(const Json& json, const std::string& message) const {
        std::ofstream(path_) << json.dump();
        try {
            measure::read_machine(path_);
            ADD_FAILURE() << "read " << json.dump();
        } catch (const Error& error) {
            EXPECT_EQ(error.code(), ErrorCode::bad_data);
            EXPECT_NE(std::string(error.what()).find(message), std::string::npos) << error.what();
        }
    }
    std::string path_;
};

TEST_F(MachineFile, round_trip_of_every_machine) {
    for (const Machine& machine : machines()) {
        measure::write_machine(path_, machine);
        const Machine back = measure::read_machine(path_);
        EXPECT_EQ(measure::to_json(back), measure::to_json(machine));
    }
}

TEST_F(MachineFile, may_name_a_known_machine) {
    std::ofstream(path_) << "\"xeon-16\"\n";
    EXPECT_EQ(measure::to_json(measure::read_machine(path_)), measure::to_json(*find_machine("xeon-16")));
    expect_bad("Intel(R) Xeon(R) Processor", "expected the name of a built-in machine, got \"Intel(R)");
}

TEST_F(MachineFile, has_the_kernels_that_were_measured) {
    Machine machine = *find_machine("xeon-16");
    KernelShares shares{.gemm_share = 0.5, .exp_share = 1.5, .extra_tiles = 0, .loop_starts = 1, .call_us = 12};
    shares.start_us = 90, shares.read_share = 0.3;
    set_measured_kernels(machine, {{"bf16 forward", shares, "a test"}});
    measure::write_machine(path_, machine);
    const Machine back = measure::read_machine(path_);
    ASSERT_EQ(measured_kernels(back).size(), 1U);
    EXPECT_EQ(measured_kernels(back)[0].kernels, "bf16 forward");
    EXPECT_EQ(measured_kernels(back)[0].shares.read_share, 0.3);
    EXPECT_EQ(measure::to_json(back), measure::to_json(machine));
    Json json = measure::to_json(machine);
    json["kernels"][0].erase("contended_speed");
    expect_bad(json, "kernels[0].contended_speed: expected a number, got nothing");
    const auto has_older_names = [&](const MeasuredKernels& one) {
        return one.shares.contended_speed == 0.75 && one.shares.gemm_share == 0.625 && one.shares.extra_tiles == 2 &&
               one.shares.loop_starts == 3;
    };
    json["kernels"][0]["crowd"] = 0.75;
    for (const char* name : {"gemm_share", "extra_tiles", "loop_starts"}) json["kernels"][0].erase(name);
    expect_bad(json, "kernels[0].gemm_share: expected a number, got nothing");
    json["kernels"][0]["product_share"] = 0.625, json["kernels"][0]["last"] = 2, json["kernels"][0]["loops"] = 3;
    std::ofstream(path_) << json;
    EXPECT_TRUE(has_older_names(measured_kernels(measure::read_machine(path_))[0]));
    json["kernels"][0]["contended_speed"] = 1;
    expect_bad(json, "kernels[0].crowd: expected a number of measured kernels");
    json["kernels"][0].erase("crowd");
    json["kernels"][0].erase("mask_share");
    expect_bad(json, "kernels[0].mask_share: expected a number (an older tessera wrote the file: calibrate again)");
    json["kernels"][0]["mask_share"] = 1;
    json = measure::to_json(machine);
    json["kernels"][0]["speed"] = 1;
    expect_bad(json, "kernels[0].speed: expected a number of measured kernels");
    json = measure::to_json(machine);
    json["kernels"][0]["contended_speed"] = -1;
    expect_bad(json, "kernels, bf16 forward, contended_speed: expected a number from");
    json = measure::to_json(machine);
    json["kernels"][0]["read_share"] = 13.1;
    expect_bad(json, "kernels, bf16 forward, read_share: expected a number from 0.01 to 4, got 13.1");
    json = measure::to_json(machine);
    json["kernels"].push_back(json["kernels"][0]);
    expect_bad(json, "kernels: expected each kind once, got a second bf16 forward");
    json = measure::to_json(machine);
    json["kernels"][0]["kernels"] = "bf17 forward";
    expect_bad(json, "got bf17 forward");
    json["kernels"] = nullptr;
    expect_bad(json, "kernels: expected a list");
    json = measure::to_json(*find_machine("h200"));
    json["kernels"] = measure::to_json(machine)["kernels"];
    expect_bad(json, "kernels: expected no kernels in the file of a GPU, got bf16 forward");
    json["kernels"] = 3;
    expect_bad(json, "kernels: expected a list, got 3");
}

TEST_F(MachineFile, is_read_strictly) {
    const Json good = measure::to_json(*find_machine("h200"));
    Json json = good;
    json.erase("exp_rate");
    expect_bad(json, "exp_rate: expected an object");
    json = good;
    json["speed"] = 3;
    expect_bad(json, "speed: expected a field of a machine");
    json = good;
    json["cores"]["value"] = "132";
    expect_bad(json, "cores.value: expected a number, got \"132\"");
    json["cores"]["value"] = 1.5;
    expect_bad(json, "cores: expected a whole number, got 1.5");
    json = good;
    json["cores"].erase("source");
    expect_bad(json, "cores.source: expected a text, got nothing");
    json = good;
    json["clock_ghz"]["unit"] = "MHz";
    expect_bad(json, "clock_ghz.unit: expected \"GHz\", got \"MHz\"");
    json = good;
    json["dram_gbs"]["value"] = -1;
    expect_bad(json, "dram_gbs: expected a number from 1e-06 to 1000000000, got -1");
    json = good;
    json["warp_matrix_share"]["value"] = 1.5;
    expect_bad(json, "warp_matrix_share: expected a number from 1e-06 to 1, got 1.5");
    json = good;
    json["clock_ghz"]["value"] = 1e-320;
    expect_bad(json, "clock_ghz: expected a number from 1e-06 to 1000000000, got 1e-320");
    json = good;
    json["kind"] = "tpu";
    expect_bad(json, "kind: expected gpu or cpu");
    std::ofstream(path_) << "{ not json";
    EXPECT_THROW(measure::read_machine(path_), Error);
    EXPECT_THROW(measure::read_machine(path_ + ".none"), Error);
}

TEST(Calibrate, gpu_from_records_of_bench_micro) {
    const auto records = measure::read_records(TESSERA_SOURCE_DIR "/bench/results/h200/micro.jsonl");
    const Machine machine = measure::calibrate_gpu(*find_machine("h200"), records);
    EXPECT_NEAR(machine.matrix_flop, 4095, 5);
    EXPECT_NEAR(machine.warp_matrix_share, 0.667, 0.002);
    EXPECT_NEAR(machine.exp_rate, 16, 0.1);
    EXPECT_NEAR(machine.fma_flop, 244, 2);
    EXPECT_NEAR(machine.shared_bytes, 128, 1);
    EXPECT_NEAR(machine.launch_us, 2.8, 0.2);
    EXPECT_NEAR(machine.clock_ghz, 1.966, 0.01);
    EXPECT_NE(machine.exp_rate.source.find("measured"), std::string::npos);
    EXPECT_EQ(machine.l2_mib.source, find_machine("h200")->l2_mib.source);  // not measured: stays
    EXPECT_THROW(measure::calibrate_gpu(*find_machine("h200"), {}), Error);
    for (const char* other : {"a100", "xeon-16"})  // the Records are of another device
        EXPECT_THROW(measure::calibrate_gpu(*find_machine(other), records), Error) << other;
}

/// The fit finds the shares from which the times were made, however far its start is from them.
TEST(Calibrate, shares_are_fitted_to_times) {
    Machine machine = *find_machine("xeon-16");
    for (const Pass pass : {Pass::forward, Pass::backward}) {
        const PredictOptions all;
        const Problem held_out = Problem::dense(2, 1500, 12, 128, DType::bf16);
        const Question question{held_out, Schedule::fa2, pass, machine, all};
        KernelShares made = cpu_family_of(question).constants;
        made.gemm_share *= 0.6, made.contended_speed = 0.3, made.start_us = 450, made.call_us = 40,
                                made.read_share = 0.4;
        std::vector<measure::TimedCall> calls;
        for (const measure::KernelProbe& probe : measure::kernel_probes(Schedule::fa2, pass, 16)) {
            measure::TimedCall call{measure::problem_of(probe, DType::bf16), {.threads = probe.threads}};
            Prediction x{.schedule = Schedule::fa2, .pass = pass};
            predict_cpu_family({call.problem, Schedule::fa2, pass, machine, call.options}, made, x);
            call.ms = x.ms;
            calls.push_back(call);
        }
        const auto ms = [&](const KernelShares& shares) {
            Prediction x{.schedule = Schedule::fa2, .pass = pass};
            predict_cpu_family(question, shares, x);
            return x.ms;
        };
        const KernelShares found = measure::fitted_shares(machine, Schedule::fa2, pass, calls);
        EXPECT_GT(std::abs(ms(cpu_family_of(question).constants) / ms(made) - 1), 0.1);
        EXPECT_NEAR(ms(found) / ms(made), 1, 0.06);
        EXPECT_NEAR(found.start_us / made.start_us, 1, 0.25);
        EXPECT_NEAR(found.contended_speed / made.contended_speed, 1, 0.2);
        for (measure::TimedCall& call : calls) call.ms *= 1e-3;  // no machine: the fit stays within what can be
        EXPECT_TRUE(in_range(measure::fitted_shares(machine, Schedule::fa2, pass, calls)));
    }
}

TEST(Calibrate, probes_are_calls_of_all_cores_and_not_too_large) {
    for (const int cores : {1, 2, 16, 1024}) {
        for (const Schedule schedule : {Schedule::standard, Schedule::fa1, Schedule::fa2}) {
            int most = 0;
            for (const measure::KernelProbe& probe : measure::kernel_probes(schedule, Pass::backward, cores)) {
                EXPECT_NO_THROW(measure::problem_of(probe, DType::fp32).validate());
                EXPECT_LE(probe.heads, measure::kMostProbeHeads);
                most = std::max(most, probe.threads);
            }
            EXPECT_EQ(most, cores);
        }
    }
}

/// A call that something else disturbed leaves the others' fit as it is.
TEST(Calibrate, a_disturbed_probe_is_no_more_than_that) {
    const Machine machine = *find_machine("xeon-16");
    const PredictOptions all;
    const Problem problem = Problem::dense(2, 700, 12, 64, DType::fp32);
    const auto ms = [&](const Problem& p, const PredictOptions& options, const KernelShares& shares) {
        Prediction x{.schedule = Schedule::fa2, .pass = Pass::backward};
        predict_cpu_family({p, Schedule::fa2, Pass::backward, machine, options}, shares, x);
        return x.ms;
    };
    KernelShares made = cpu_family_of({problem, Schedule::fa2, Pass::backward, machine, all}).constants;
    made.gemm_share *= 0.7, made.start_us = 200, made.read_share = 0.4;
    std::vector<measure::TimedCall> calls;
    for (const measure::KernelProbe& probe : measure::kernel_probes(Schedule::fa2, Pass::backward, 16)) {
        const Problem p = measure::problem_of(probe, DType::fp32);
        const PredictOptions options{.threads = probe.threads};
        calls.push_back({p, options, ms(p, options, made)});
    }
    calls[1].ms *= 3, calls[9].ms *= 4;
    const KernelShares found = measure::fitted_shares(machine, Schedule::fa2, Pass::backward, calls);
    EXPECT_NEAR(ms(problem, all, found) / ms(problem, all, made), 1, 0.1);
}

/// A call that was disturbed in one of three rounds keeps its median.
TEST(Calibrate, rounds_have_a_median) {
    const Problem a = Problem::dense(1, 64, 2, 64, DType::fp32), b = Problem::dense(1, 128, 2, 64, DType::fp32);
    const PredictOptions one{.threads = 1}, two{.threads = 2};
    const auto kept = measure::medians_of({{a, one, 1.0}, {b, one, 5.0}, {a, two, 3.0}, {a, one, 9.0}, {a, one, 1.1}});
    ASSERT_EQ(kept.size(), 3U);
    EXPECT_EQ(kept[0].ms, 1.1);
    EXPECT_EQ(kept[1].ms, 5.0);
    EXPECT_EQ(kept[2].ms, 3.0);
}

/// A read share is fitted to tensors and copies that no second-level cache holds, on one thread and on all.
TEST(Calibrate, probes_are_larger_than_a_core_s_caches) {
    for (const Pass pass : {Pass::forward, Pass::backward}) {
        for (const int threads : {1, 16}) {
            double most = 0;
            for (const measure::KernelProbe& probe : measure::kernel_probes(Schedule::fa2, pass, 16)) {
                if (probe.threads != threads) continue;
                const Problem p = measure::problem_of(probe, DType::bf16);
                const double tensors = pass == Pass::forward ? 1 : 2;
                most = std::max(most, tensors * static_cast<double>(p.heads_q * (p.len_q + p.len_kv) * 2 * p.head_dim) *
                                          2 / threads);
            }
            EXPECT_GT(most, 2 << 20) << threads;
        }
    }
}

TEST(Calibrate, descent_stays_where_a_loss_is_finite) {
    struct Two {
        double a, b;
    };
    constexpr double Two::*kFree[] = {&Two::a, &Two::b};
    const auto loss = [](const Two& x) {
        return x.a > 3 ? std::numeric_limits<double>::infinity() : std::pow(x.a - 5, 2) + std::pow(x.b - 2, 2);
    };
    const Two least = measure::descend<Two>({1, 0}, kFree, loss);
    EXPECT_LE(least.a, 3);
    EXPECT_NEAR(least.a, 3, 0.01);
    EXPECT_EQ(least.b, 0);
    EXPECT_NEAR(measure::descend<Two>({1, 9}, kFree, loss).b, 2, 0.01);
}

TEST(Calibrate, cpu_gives_a_machine_that_can_be) {
    int told = 0;
    const Machine machine = measure::calibrate_cpu(1, [&](const std::string&) { ++told; });
    EXPECT_EQ(told, measure::kCpuMeasurements);
    EXPECT_NO_THROW(validate(machine));
    EXPECT_EQ(machine.kind, MachineKind::cpu);
    EXPECT_GT(machine.clock_ghz, 0.5);
    EXPECT_LT(machine.clock_ghz, 8);
    EXPECT_LE(machine.loaded_clock_ghz, machine.clock_ghz);
    EXPECT_GT(machine.matrix_flop, machine.exp_rate);
    EXPECT_EQ(measured_kernels(machine).size(), static_cast<std::size_t>(measure::kKernelKinds));
    for (const MeasuredKernels& one : measured_kernels(machine)) {  // one thread says nothing about others
        EXPECT_EQ(one.shares.start_us, 0) << one.kernels;
        EXPECT_EQ(one.shares.contended_speed, 1) << one.kernels;
    }
    told = 0;
    EXPECT_TRUE(measure::measure_roofs(1, [&](const std::string&) { ++told; }).kernels == nullptr);
    EXPECT_EQ(told, measure::kRoofMeasurements);
    EXPECT_THROW(measure::calibrate_cpu(100'000, [](const std::string&) {}), Error);
}

}  // namespace
}  // namespace tessera::model::machine_test
