// SPDX-License-Identifier: Apache-2.0
//
// Numbers with units, other names of values, and suggestions for mistyped ones.
#include "process.hpp"

namespace tessera::units_test {
namespace {

using UnitsTest = CommandTest;

TEST_F(UnitsTest, a_length_may_be_written_as_people_write_it) {
    const auto len = [&](const std::string& text) {
        return run_ok("roofline --schedule fa2 --json --len " + text).json().at("rows").at(0).at("problem").at("len_q");
    };
    for (const char* text : {"8192", "8k", "8K", "8_192"}) EXPECT_EQ(len(text), 8192) << text;
    EXPECT_EQ(len("1e4"), 10000);
    for (const char* text : {"8kk", "k", "1e", "e4", "_8", "8_", "8__1", "1e99", "9999999999999999k"})
        expect_error(std::string("roofline --len ") + text, 2, "--len: expected a whole number");
}

/// A list of lengths is a list, unless it may as well be one number with separators.
TEST_F(UnitsTest, thousands_are_refused_and_lists_are_not) {
    for (const char* text : {"8,192", "16,384", "1,024", "131,072", "12,288", "10,000"})
        expect_error(std::string("roofline --len ") + text, 2, "--len: expected one number without separators");
    for (const char* text : {"128,256", "64,128,256", "512,1024", "64,512", "192,8"})
        run_ok(std::string("roofline --schedule fa2 --len ") + text);
}

/// "32,8" is refused, because it would be two problems where 32 query heads on 8 key heads may be meant.
TEST_F(UnitsTest, a_list_of_heads_that_may_be_grouped_heads_is_refused) {
    for (const char* text : {"32,8", "8,1"}) {
        const std::string heads = text, first = heads.substr(0, heads.find(','));
        const std::string second = heads.substr(first.size() + 1);
        for (const char* command : {"roofline --schedule fa2 --heads ", "plan --heads "})
            expect_error(command + heads, 2,
                         "--heads: expected " + first + "/" + second + " for " + first + " query heads that share " +
                             second + " key heads, or " + second + "," + first + " for two problems, got \"" + heads);
    }
    for (const char* text : {"8,32", "32,12", "32,16,8", "32/8,16/8"})
        run_ok(std::string("roofline --schedule fa2 --heads ") + text);
}

/// One name for the machine, and one for the sizes, in all commands.
TEST_F(UnitsTest, the_machine_is_device_or_gpu) {
    EXPECT_EQ(run_ok("roofline --schedule fa3 --gpu h100").out, run_ok("roofline --schedule fa3 --device h100").out);
    EXPECT_EQ(run_ok("plan --len 512 --dtype bf16 --gpu h200").out,
              run_ok("plan --len 512 --dtype bf16 --device h200").out);
    expect_error("roofline --gpu 2 --len 4096", 2, "(--gpus takes a number of GPUs)");
}

TEST_F(UnitsTest, other_names_of_values_are_understood) {
    const auto said = [&](const std::string& options) { return run_ok("roofline --schedule fa3 " + options).out; };
    EXPECT_EQ(said("--device H100 --dtype bfloat16"), said("--device h100 --dtype bf16"));
    EXPECT_EQ(said("--dtype float16 --pass bwd"), said("--dtype fp16 --pass backward"));
    EXPECT_EQ(said("--dtype half"), run_ok("roofline --schedule FA3 --dtype fp16").out);
}

TEST_F(UnitsTest, mistyped_names_get_a_suggestion) {
    expect_error("rooflin --len 4096", 2, "got \"rooflin\", perhaps roofline");
    expect_error("roofline --device h10", 2, "got \"h10\", perhaps h100");
    expect_error("roofline --dtype bf61", 2, "got \"bf61\", perhaps bf16");
    expect_error("roofline --schedule standrad", 2, "perhaps standard");
    expect_error("which --torch 2.11 --gpu l40z --shape 1,8,512,64 --dtype bf16", 2, "got \"l40z\", perhaps l40s");
    expect_error("which --torch 2.11 --gpu l40 --shape 1,8,512,64 --dtype bf16", 2, "or one of v100, t4");
}

/// The lengths are quantiles, so a sum and an order are all that is drawn of them.
TEST_F(UnitsTest, lengths_by_their_distribution_add_up) {
    const auto problem = [&](const std::string& text) {
        return run_ok("roofline --schedule fa2 --json --ragged " + text).json().at("rows").at(0).at("problem");
    };
    for (const char* text : {"exp:1024:32k", "uniform:1024:32k", "exp:1000:32768"})
        EXPECT_NEAR(problem(text).at("batch").get<double>(), 32, 1) << text;
    // Q and O in bf16 and LSE, K and V, of 32,768 rows of 8 heads of 64.
    const auto bytes = run_ok("roofline --schedule fa2 --json --ragged exp:1000:32k").json();
    EXPECT_EQ(bytes.at("rows").at(0).at("schedules").at(0).at("passes").at(0).at("memory_bytes"),
              run_ok("roofline --schedule fa2 --json --ragged 32768")
                  .json()
                  .at("rows")
                  .at(0)
                  .at("schedules")
                  .at(0)
                  .at("passes")
                  .at(0)
                  .at("memory_bytes"));
    EXPECT_GT(problem("exp:1024:32k").at("len_q"), 4 * 1024);  // the longest of 32: about 4.2 means
    EXPECT_LT(problem("uniform:1024:32k").at("len_q"), 2 * 1024);
    EXPECT_EQ(problem("exp:1:100").at("batch"), 100);  // each has a row
    EXPECT_EQ(problem("exp:100:100").at("batch"), 1);
    expect_error("roofline --ragged exp:1024", 2, "exp:MEAN:TOTAL");
    expect_error("roofline --ragged exp:1024:100", 2, "MEAN <= TOTAL");
    expect_error("roofline --ragged exp:0:100", 2, "1 <= MEAN");
    expect_error("roofline --ragged exp:1:100000", 2, "at most 65536 sequences");
}

}  // namespace
}  // namespace tessera::units_test
