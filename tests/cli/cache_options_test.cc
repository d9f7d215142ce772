// SPDX-License-Identifier: Apache-2.0
//
// --kv-lengths and --pages: K and V as a cache.
#include "process.hpp"

namespace tessera::cache_options_test {
namespace {

class CacheOptionsTest : public CommandTest {
 protected:
    /// walk shows the path that a call in fp32 runs, but for processors with AMX, where a call multiplies in bf16
    /// parts.
    static void expect_bits_of_a_run(const Outcome& walked) {
        const bool amx = walked.out.find("GEMMs on AMX") != std::string::npos;
        expect_says(walked, amx ? "which multiplies on AMX" : "bit for bit");
    }
};

const std::string kHeads = " --heads 4/2 --head-dim 16";
const std::string kSizes = kHeads + " --dtype bf16";

TEST_F(CacheOptionsTest, make_a_cache_of_the_problem) {
    expect_says(run_ok("plan --kv-lengths 40,17,5 --pages 16" + kSizes), "len 1 x 48");
    expect_says(run_ok("plan --kv-lengths 40,17,5 --pages 16" + kSizes), "cache in pages of");
    expect_says(run_ok("plan --kv-lengths 40,17 --len-kv 64" + kSizes), "len 1 x 64");
    expect_says(run_ok("plan --ragged 2x40,1x17 --pages 16" + kSizes), "ragged (rows 3 x 0)");
    expect_says(run_ok("plan --len-q 1 --len-kv 64 --pages 0" + kSizes), "cache");
}

TEST_F(CacheOptionsTest, errors_name_the_option) {
    expect_error("plan --kv-lengths 40,17 --batch 2", 2, "--kv-lengths: gives the batch and the keys");
    expect_error("plan --kv-lengths 40,17 --len-kv 17", 2, "--len-kv: expected a capacity of at least 40");
    expect_error("plan --len-q 1 --len-kv 100 --pages 16", 2, "--len-kv: expected a multiple of page_size = 16");
    expect_error("plan --len-q 1 --len-kv 64 --pages 16 --bias", 2, "--bias: expected none with a cache");
    expect_error("plan --kv-lengths 4x", 2, "--kv-lengths: expected a whole number");
    expect_error("roofline --tokens 64 --kv-lengths 40", 2, "--tokens: gives the batch");
}

/// Free slots take memory and no time.
TEST_F(CacheOptionsTest, predictions_count_the_keys_of_the_sequences) {
    const std::string lengths = "roofline --device xeon-16 --schedule fa2 --json --kv-lengths 1000,1000" + kSizes;
    const std::string small = run_ok(lengths + " --pages 16").out;
    const auto time_of = [](const std::string& json) {
        const std::size_t at = json.find("\"ms\":");
        return at == std::string::npos ? "" : json.substr(at, json.find_first_of(",}", at) - at);
    };
    EXPECT_NE(time_of(small), "");
    EXPECT_EQ(time_of(small), time_of(run_ok(lengths + " --pages 16 --len-kv 65536").out));
}

TEST_F(CacheOptionsTest, gen_and_bench_make_its_tensors) {
    run_ok("gen --kv-lengths 40,17,5 --pages 16 -o " + path("cache.safetensors") + kSizes);
    expect_says(run_ok("gen --kv-lengths 40,17,5 --pages 16 -o " + path("cache.safetensors") + kSizes), "page_table");
    expect_says(run_ok("bench --repeat 1 --warm-up 0 --schedule fa2 --kv-lengths 40,17,5 --pages 16" + kSizes),
                "cache in pages of 16");
}

TEST_F(CacheOptionsTest, run_and_walk_read_its_tensors) {
    const std::string file = path("cache.safetensors");
    const std::string names = " --kv-lengths kv_lengths";
    run_ok("gen --kv-lengths 40,17,5 --pages 16 -o " + file + kSizes);
    const std::string pages = names + " --page-table page_table";
    const Outcome checked = run_ok("run " + file + pages + " --check");
    expect_says(checked, "cache in pages of 16");
    expect_says(checked, "within the contract");
    expect_says(run_ok("walk " + file + pages + " --sequence 1"), "17 keys of a capacity of 48, in pages 5, 4 of 16");
    const std::string fp32 = path("fp32.safetensors");
    run_ok("gen --kv-lengths 40,17,5 --pages 16 -o " + fp32 + kHeads + " --dtype fp32");
    expect_bits_of_a_run(run_ok("walk " + fp32 + pages + " --sequence 1"));
    expect_error("run " + file + " --page-table page_table", 2, "--page-table: expected --kv-lengths with it");
    expect_error("run " + file + pages + " --backward", 2, "--kv-lengths: expected a forward with it");
    run_ok("gen --kv-lengths 40,17,5 -o " + path("slots.safetensors") + kSizes);
    expect_says(run_ok("run " + path("slots.safetensors") + names + " --check"), "within the contract");
}

TEST_F(CacheOptionsTest, sinks_reach_walk) {
    run_ok("gen --len 48 --sinks -o " + path("sinks.safetensors") + kSizes);
    expect_says(run_ok("run " + path("sinks.safetensors") + " --sinks sinks --check"), "within the contract");
    run_ok("gen --len 48 --sinks -o " + path("fp32.safetensors") + kHeads + " --dtype fp32");
    expect_bits_of_a_run(run_ok("walk " + path("fp32.safetensors") + " --sinks sinks"));
}

}  // namespace
}  // namespace tessera::cache_options_test
