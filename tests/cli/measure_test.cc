// SPDX-License-Identifier: Apache-2.0
//
// toolkit/measure: statistics, work, records and their files.
#include <chrono>
#include <thread>
#include "measure/bench.hpp"
#include "measure/host.hpp"
#include "measure/record.hpp"
#include "measure/statistics.hpp"
#include "measure/timer.hpp"
#include "measure/work.hpp"

#include "process.hpp"
#include "tessera/error.hpp"

namespace tessera::measure::measure_test {
namespace {

class RecordFileTest : public CommandTest {};

TEST(Statistics, median_and_interquartile_range) {
    EXPECT_EQ(summarize({}).count, 0U);
    const Summary one = summarize({3});
    EXPECT_EQ(one.median, 3);
    EXPECT_EQ(one.spread, 0);
    const Summary five = summarize({5, 1, 4, 2, 3});
    EXPECT_EQ(five.median, 3);
    EXPECT_EQ(five.spread, 2);
    EXPECT_EQ(five.least, 1);
    EXPECT_EQ(five.most, 5);
    EXPECT_EQ(summarize({1, 2, 3, 100}).median, 2.5);
}

TEST(Work, counts_visible_pairs) {
    Problem p = Problem::dense(2, 10, 3, 4);
    EXPECT_EQ(visible_pairs(p), 2 * 3 * 100);
    p.mask.causal = Causal::bottom_right;
    EXPECT_EQ(visible_pairs(p), 2 * 3 * 55);
    EXPECT_EQ(flop(p, Pass::forward, 10), 2 * 8 * 10);
    EXPECT_EQ(flop(p, Pass::backward, 10), 2 * 20 * 10);
    EXPECT_EQ(gflops(2e9, 1000), 2);
}

TEST(Bench, calls_once_more_than_it_counts) {
    ColdCache cache(1 << 20);
    std::vector<float> data(1000, 1.0F);
    const TensorView view = dense_view(data.data(), DType::fp32, {1000});
    const TensorView empty = dense_view(nullptr, DType::fp32, {0});
    int calls = 0;
    const Measurement measured = time_call([&] { ++calls; }, std::vector{view, empty}, cache, {.repeat = 4});
    EXPECT_EQ(calls, 5);
    EXPECT_EQ(measured.ms.count, 4U);
    EXPECT_EQ(measured.clock_mhz, 0);
    EXPECT_EQ(data[999], 1.0F);
}

TEST(Bench, warms_up_for_the_time_that_is_asked) {
    int calls = 0;
    double last = 0;  // when the last call began
    const Timer timer;
    const auto call = [&] {
        ++calls;
        last = timer.milliseconds();
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
    };
    time_call(call, [] {}, {.repeat = 1, .warm_up_ms = 20});
    EXPECT_GE(last, 20) << "the call that counts began before";
    EXPECT_LE(calls, 11) << "ten calls take 20 ms at least";
    calls = 0;
    time_call(call, [] {}, {.repeat = 1});
    EXPECT_EQ(calls, 2);
}

/// Keeps the thread busy for this time on the thread's own clock, so that other programs do not lengthen it.
void work_for(double milliseconds) {
    const ThreadTimer own;
    while (own.milliseconds() < milliseconds) {
    }
}

TEST(Bench, measures_again_what_is_noisy) {
    int calls = 0;
    const auto call = [&] {  // calls of the first round differ by ten
        const bool odd = ++calls <= 5 && calls % 2 == 1;
        work_for(odd ? 2 : 20);
    };
    const Measurement once = time_call(call, [] {}, {.repeat = 4, .own_time = true});
    EXPECT_EQ(calls, 5);
    EXPECT_TRUE(is_noisy(once.ms.median, once.ms.spread)) << once.ms.median << " spread " << once.ms.spread;
    calls = 0;
    const Measurement again = time_call(call, [] {}, {.repeat = 4, .rounds = 3, .own_time = true});
    EXPECT_GE(calls, 9);
    EXPECT_LE(calls, 13);
    EXPECT_LT(again.ms.spread / again.ms.median, once.ms.spread / once.ms.median);
}

/// Reads 10 J more each time.
class StepGauge : public Gauge {
 public:
    double clock_mhz() const override { return 1000; }
    std::optional<double> joules() const override { return joules_ += 10; }

 private:
    mutable double joules_ = 0;
};

TEST(Bench, power_is_energy_over_time_of_the_calls) {
    const StepGauge gauge;
    const auto call = [] { work_for(20); };
    const Measurement measured = time_call(
        call, [] {}, {.repeat = 4, .own_time = true}, &gauge);
    EXPECT_EQ(measured.clock_mhz, 1000);
    ASSERT_TRUE(measured.watts.has_value());
    EXPECT_LT(*measured.watts, 501);  // 10 J in 20 ms, or a little longer
    EXPECT_GT(*measured.watts, 200);
    EXPECT_FALSE(time_call([] {}, [] {}, {.repeat = 4}, &gauge).watts.has_value());  // too short to tell
}

TEST(Host, tells_what_it_can) {
    const Host host = describe_host();
    EXPECT_FALSE(host.cpu.empty());
    EXPECT_FALSE(host.isa.empty());
    EXPECT_GE(host.cores, 1);
    EXPECT_EQ(text_of(host).rfind(host.cpu + " (" + host.isa, 0), 0U) << text_of(host);
    EXPECT_GE(clock_mhz(), 0);
    EXPECT_EQ(utc_date().back(), 'Z');
}

Record example() {
    const Plan how = plan(Problem::dense(2, 128, 8, 64));
    Record record = record_of(how, {.count = 3, .median = 1.5, .spread = 0.25}, 3e9);
    record.device = "a CPU";
    record.date = utc_date();
    record.bytes = {{"dram", 1e6}};
    record.versions = {{"tessera", "0.1.0"}};
    record.percent_of_bound = 42.5;
    return record;
}

TEST_F(RecordFileTest, goes_to_json_and_back) {
    const Record record = example();
    EXPECT_DOUBLE_EQ(record.tflops, 2.0);
    EXPECT_EQ(to_json(record_from_json(to_json(record))), to_json(record));
}

TEST_F(RecordFileTest, appends_after_a_line_that_was_cut_off) {
    const std::string file = path("r.jsonl");
    append_records(file, {example(), example()});
    std::ofstream(file, std::ios::app) << R"({"what": "measu)";
    std::int64_t cut_off = 0;
    EXPECT_EQ(read_records(file, &cut_off).size(), 2U);
    EXPECT_EQ(cut_off, 1);
    append_records(file, {example()});
    EXPECT_EQ(read_records(file).size(), 3U);
}

TEST_F(RecordFileTest, says_what_is_wrong_and_where) {
    const std::string file = path("r.jsonl");
    append_records(file, {example()});
    std::ofstream(file, std::ios::app) << R"({"what": "measured", "by": 3})"
                                       << "\n";
    try {
        read_records(file);
        FAIL();
    } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::bad_data);
        EXPECT_NE(std::string(error.what()).find("r.jsonl:2: by"), std::string::npos) << error.what();
    }
    EXPECT_THROW(read_records(path("missing.jsonl")), Error);
    EXPECT_THROW(append_records(path("no/folder.jsonl"), {example()}), Error);
}

}  // namespace
}  // namespace tessera::measure::measure_test
