// SPDX-License-Identifier: Apache-2.0
//
// tessera walk: what it prints, and that its numbers are those of tessera run.
#include <cmath>
#include <sstream>

#include "io/safetensors.hpp"
#include "process.hpp"

namespace tessera::walk_test {
namespace {

class WalkTest : public CommandTest {
 protected:
    static void expect_fits(const Outcome& outcome) {
        std::istringstream lines(outcome.out);
        for (std::string line; std::getline(lines, line);) {
            EXPECT_LE(line.size(), 80U) << line;
            EXPECT_TRUE(line.empty() || line.back() != ' ') << "trailing space: " << line;
        }
    }
    /// Element (batch 0, head, row, column) of a tensor [1, heads, len, dim] that `tessera run` wrote.
    double element(const std::string& name, std::int64_t head, std::int64_t row, std::int64_t column) const {
        const io::TensorFile file = io::read_safetensors(path("out.safetensors"));
        return static_cast<double>(*file.view(*file.find(name)).at<const float>(0, head, row, column));
    }
};

TEST_F(WalkTest, values_on_the_sample_are_those_of_run) {
    // Whatever schedule a backward is of, walk takes O and LSE from the forward that plan() chooses.
    const bool unit = !run_ok("plan --len 1024 --json").json().at("chosen").at("matrix_unit").is_null();
    for (const char* schedule : {"standard", "fa1", "fa2"}) {
        const std::string how = fmt::format("{} --schedule {} --tile 64,64", kSampleOptions, schedule);
        run_ok(fmt::format("run {} --backward -o out.safetensors", how));
        const auto walk = fmt::format("walk {} --head 3 --row 700 --json", how);
        const auto forward = run_ok(walk).json();
        // With a matrix unit a run without an observer is another kernel of fa2, and the walk says so.
        const bool other = !forward.at("plan").at("matrix_unit").is_null();
        EXPECT_EQ(forward.at("path"), "cpu/simd");
        EXPECT_EQ(forward.at("path_unobserved"), other ? "cpu/matrix" : "cpu/simd");
        if (!other) {
            EXPECT_EQ(forward.at("same_bits_as_unobserved"), true);
        }
        const auto expect_as_run = [&](double walked, double ran, bool differs) {
            EXPECT_NEAR(walked, ran, differs ? 2e-6 * std::max(1.0, std::abs(ran)) : 0.0) << schedule;
        };
        EXPECT_EQ(forward.at("queries"), (std::vector<int>{640, 704}));
        const auto& last = forward.at("steps").back();
        EXPECT_EQ(last.at("step"), "finish");
        for (const int c : {0, 17, 63}) {
            expect_as_run(last.at("o").at(static_cast<std::size_t>(c)).get<double>(), element("o", 3, 700, c), other);
        }
        const auto backward = run_ok(walk + " --backward").json();
        EXPECT_EQ(backward.at("same_bits_as_unobserved"), true);  // tiles of 64 x 64 are not what a unit takes
        double dq = 0;
        for (const auto& step : backward.at("steps")) {
            if (step.contains("dq")) dq = step.at("dq").at(17).get<double>();
        }
        expect_as_run(dq * 0.125, element("dq", 3, 700, 17), unit);  // the scale is a power of two: exact
        EXPECT_EQ(backward.at("tiles").at("skipped"), 13);
    }
}

TEST_F(WalkTest, a_row_stands_beside_its_exact_one) {
    for (const char* schedule : {"standard", "fa1", "fa2"}) {
        const std::string how = fmt::format("walk --len 200 --tile 32,32 --schedule {} --json", schedule);
        const auto json = run_ok(how + " --row 190").json();
        const auto& last = json.at("steps").back();
        EXPECT_LT(last.at("error").get<double>(), 1e-6) << schedule;
        const double lse = last.at("m").get<double>() + std::log(last.at("l").get<double>());
        EXPECT_NEAR(json.at("exact").at("lse").get<double>(), lse, 1e-5) << schedule;
        for (std::size_t c = 0; c < 64; ++c) {
            EXPECT_NEAR(last.at("estimate").at(c).get<double>(), json.at("exact").at("o").at(c).get<double>(), 1e-6);
        }
        EXPECT_FALSE(run_ok(how).json().contains("exact")) << "a tile of queries has no one row";
    }
}

TEST_F(WalkTest, prints_tables_that_fit) {
    for (const char* schedule : {"standard", "fa1", "fa2"}) {
        for (const char* more : {"", " --backward", " --row 100", " --row 100 --backward"}) {
            const Outcome outcome =
                run_ok(fmt::format("walk --len 300 --causal bottom-right --schedule {}{}", schedule, more));
            expect_fits(outcome);
            const bool other = outcome.out.find("cpu/matrix") != std::string::npos;
            EXPECT_EQ(outcome.out.find("bit for bit") == std::string::npos, other) << outcome.out;
            EXPECT_NE(outcome.out.find("cpu/simd"), std::string::npos) << outcome.out;
        }
    }
    expect_fits(run_ok("walk --len-q 1 --len-kv 700 --heads 4/2 --head-dim 40/80 --dtype bf16 --schedule fa1"));
    const Outcome all = run_ok("walk --len 8000 --head-dim 8 --tile 64,64 --all");
    const Outcome cut = run_ok("walk --len 8000 --head-dim 8 --tile 64,64");
    EXPECT_GT(all.out.size(), cut.out.size());
    EXPECT_NE(cut.out.find("--all"), std::string::npos);
    EXPECT_EQ(all.out.find("--all"), std::string::npos);
}

TEST_F(WalkTest, by_hand_shows_fractions) {
    for (const char* schedule : {"standard", "fa1", "fa2"}) {
        const Outcome outcome = run_ok(fmt::format("walk --by-hand --backward --schedule {}", schedule));
        expect_fits(outcome);
        EXPECT_NE(outcome.out.find("O = (5/2, 3/2)"), std::string::npos) << outcome.out;
        const auto json = run_ok(fmt::format("walk --by-hand --backward --json --schedule {}", schedule)).json();
        EXPECT_EQ(json.at("rows").at(0).at("o"), (std::vector<std::string>{"5/2", "3/2"}));
    }
    // However the tiles are cut, no line is longer than a terminal's; sums go on below.
    for (const char* schedule : {"standard", "fa1", "fa2"}) {
        for (const char* tile : {"1,1", "1,4", "3,2", "4,4"}) {
            for (const char* mask : {"none", "bottom-right", "top-left"}) {
                expect_fits(run_ok(fmt::format("walk --by-hand --backward --schedule {} --tile {} --causal {}",
                                               schedule, tile, mask)));
            }
        }
    }
    const std::string whole = run_ok("walk --by-hand --schedule fa1 --tile 4,4").out;
    EXPECT_NE(whole.find("1/4 * (8, -4)) / (2)\n            = (5/2, 3/2)\n"), std::string::npos) << whole;
}

TEST_F(WalkTest, sequences_of_a_ragged_batch) {
    run_ok("gen --ragged 3x9,4x0,0x2,70 --heads 4/2 --head-dim 8 --grad -o r.safetensors");
    const std::string walk = "walk r.safetensors --cu-seqlens-q cu_seqlens_q --cu-seqlens-kv cu_seqlens_kv";
    for (const char* more : {"", " --backward", " --schedule standard", " --schedule fa1 --backward"}) {
        const auto trace = run_ok(walk + more + " --sequence 3 --row 69 --json").json();
        EXPECT_EQ(trace.at("problem").at("batch"), 4) << more;
        const std::string out = run_ok(walk + more + " --sequence 1").out;  // without a key
        const bool other = out.find("cpu/matrix") != std::string::npos;
        EXPECT_EQ(out.find("bit for bit") == std::string::npos, other) << more << "\n" << out;
    }
    const double lse = run_ok(walk + " --sequence 0 --row 2 --json").json().at("exact").at("lse").get<double>();
    EXPECT_TRUE(std::isfinite(lse));
    expect_error(walk + " --sequence 2", 2, "--sequence: expected a query to follow, got none");
    expect_error(walk + " --sequence 4", 2, "--sequence: expected 0..3");
    expect_error("walk r.safetensors --cu-seqlens-q cu_seqlens_kv --cu-seqlens-kv cu_seqlens_kv", 65,
                 "cu_seqlens_q: expected values up to the total 77, got 81 at index 4");
}

TEST_F(WalkTest, a_file_without_queries_is_bad_data) {
    run_ok("gen --len 0 -o none.safetensors");
    run_ok("gen --batch 0 --len 5 -o nobody.safetensors");
    run_ok("gen --len 5 --heads 0 -o headless.safetensors");
    expect_error("walk --len 5 --heads 0", 2, "--heads: expected a query to follow, got none");
    for (const char* name : {"none.safetensors", "nobody.safetensors", "headless.safetensors"})
        expect_error(fmt::format("walk {}", name), 65, fmt::format("{}: expected a query to follow, got none", name));
}

TEST_F(WalkTest, a_gradient_of_another_shape_is_bad_data) {
    run_ok("gen --len 5 --heads 2 --head-dim 8 --grad -o a.safetensors");
    run_ok("gen --len 5 --heads 2 --head-dim 8 --bias -o b.safetensors");
    expect_error("walk a.safetensors --backward --dlse do", 65, "a.safetensors: dlse: expected shape [1, 2, 5]");
    expect_error("walk b.safetensors --backward --do bias", 65, "b.safetensors: do: expected shape [1, 5, 2, 8]");
}

TEST_F(WalkTest, bad_options_are_told) {
    expect_error("walk --row 256", 2, "--row: expected 0..255, got 256");
    expect_error("walk --head 1", 2, "--head: expected 0..0, got 1");
    expect_error("walk --sequence 1", 2, "--sequence: expected 0..0");
    expect_error("walk --tile 64,64 --q-tile 9", 2, "--q-tile: expected 0..3");
    expect_error("walk --row 1 --q-tile 0", 2, "--q-tile");
    expect_error("walk --schedule fa3", 69, "fa3");
    expect_error("walk --by-hand " + kSample, 2, "--by-hand");
    const std::string own = "walk --by-hand --numbers 'q 1 0; k 1 0, 3 0, 2 0, 5 0; v 1 0, 1 0, 1 0, 1 0'";
    EXPECT_NE(run_ok(own + " --tile 1,2").out.find("l = 1/4 * 5/4 + 1/8 + 1 = 23/16"), std::string::npos);
    EXPECT_NE(run_ok("walk --by-hand --causal bottom-right").out.find("keys 2 and 3: skipped"), std::string::npos);
    expect_error("walk --by-hand --numbers 'q 1 0; k 1; v 1 0'", 2, "--numbers");
    expect_error("walk --by-hand --numbers 'q 1 0; v 1 0'", 2, "no k");
    expect_error("walk --by-hand --numbers 'q 9 9; k 9 9, -9 -9; v 7 9, 5 8'", 2,
                 "--numbers: expected scores less than 62 apart");
    expect_error("walk --numbers 'q 1 0; k 1 0; v 1 0'", 2, "expected --by-hand with it");
    expect_error("walk --by-hand --tile 0,1", 2, "--tile: expected 1 or more of both, got \"0,1\"");
    expect_error("walk " + kSample + " --len 5", 2, "--len");
    expect_error("walk nosuch.safetensors", 66, "nosuch.safetensors");
    expect_error("walk --len 0", 2, "--len");
    EXPECT_NE(run_ok("walk --len 10000 --head-dim 256 --tile 64,64")
                  .err.find("once, observed, by one; with --len-q 64 only those"),
              std::string::npos);
    EXPECT_EQ(run_ok("walk --len 256").err, "");
}

}  // namespace
}  // namespace tessera::walk_test
