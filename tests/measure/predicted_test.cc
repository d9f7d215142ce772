// SPDX-License-Identifier: Apache-2.0
//
// Predictions beside measurements, and the roofs that no figure can exceed.
#include "measure/predicted.hpp"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "tessera/tessera.hpp"

namespace tessera::measure::predicted_test {
namespace {

Record on_h200(double ms) {
    Record r{
        .schedule = "fa3", .kernel = "cuda.fa3.forward", .pass = "forward", .dtype = "bf16", .batch = 8, .len_q = 2048};
    r.len_kv = 2048;
    r.heads_q = r.heads_kv = 16;
    r.head_dim = r.head_dim_v = 128;
    r.device = "NVIDIA H200";
    r.ms = ms;
    r.tflops = 4.0 * 8 * 16 * 2048 * 2048 * 128 / (ms * 1e9);
    return r;
}

Problem problem_of_h200() {
    Problem p = Problem::dense(8, 2048, 16, 128);
    p.dtype = DType::bf16;
    return p;
}

TEST(Predicted, a_known_call_has_a_prediction) {
    const Record measured = on_h200(0.42);
    const auto prediction = predict(measured);
    ASSERT_TRUE(prediction.has_value());
    EXPECT_GT(prediction->ms, 0.2);
    EXPECT_LT(prediction->ms, 0.9);
    const Record record = record_of(*prediction, measured);
    EXPECT_EQ(record.what, "predicted");
    EXPECT_EQ(record.len_q, 2048);
    EXPECT_EQ(record.device, measured.device);
    EXPECT_FALSE(record.bound.empty());
    EXPECT_EQ(to_json(record_from_json(to_json(record))), to_json(record));
}

TEST(Predicted, what_the_model_does_not_know_has_none) {
    Record r = on_h200(0.42);
    r.device = "an abacus";
    EXPECT_FALSE(predict(r).has_value());
    r = on_h200(0.42);
    r.mask = "something else";
    EXPECT_FALSE(predict(r).has_value());
    r = on_h200(0.42);
    r.features = "ragged rows 5 x 5";
    EXPECT_FALSE(predict(r).has_value());
}

TEST(Roof, figures_that_can_be_pass) {
    const model::Machine& h200 = *model::find_machine("h200");
    EXPECT_FALSE(above_roof(on_h200(0.42), problem_of_h200(), h200).has_value());  // 654 TFLOP/s
}

TEST(Roof, faster_products_than_the_device_has_are_refused) {
    const model::Machine& h200 = *model::find_machine("h200");
    const auto above = above_roof(on_h200(0.2), problem_of_h200(), h200);  // 1,374 TFLOP/s
    ASSERT_TRUE(above.has_value());
    EXPECT_NE(above->reason.find("TFLOP/s"), std::string::npos);
    EXPECT_TRUE(above->certain) << above->reason;
}

TEST(Roof, less_time_than_reading_takes_is_refused) {
    Record r = on_h200(0.001);
    r.len_q = 1;
    r.len_kv = 65536;  // 4.3 GB of K and V
    r.tflops = 1;
    Problem p = problem_of_h200();
    p.len_q = 1;
    p.len_kv = 65536;
    const auto above = above_roof(r, p, *model::find_machine("h200"));
    ASSERT_TRUE(above.has_value());
    EXPECT_NE(above->reason.find("read the inputs"), std::string::npos);
}

TEST(Roof, an_estimated_roof_is_not_certain) {
    model::Machine machine = *model::find_machine("h200");
    machine.clock_ghz.source = "estimate: a guess";
    EXPECT_FALSE(above_roof(on_h200(0.2), problem_of_h200(), machine)->certain);
}

/// Up to twice a calibrated roof, the calibration is doubted rather than the figure.
TEST(Roof, of_a_calibrated_host_is_not_certain) {
    model::Machine machine = *model::find_machine("xeon-16");
    Record r = on_h200(1);
    r.threads = 1;
    Problem p = problem_of_h200();
    p.dtype = DType::fp16;
    r.tflops = 1.5 * machine.product_flop(p.dtype, false) * machine.clock_ghz * 1e-3;
    EXPECT_TRUE(above_roof(r, p, machine)->certain);
    set_measured_kernels(machine, {{"fp16 forward", {}, "26 calls timed by tessera calibrate"}});
    EXPECT_FALSE(above_roof(r, p, machine)->certain);
    r.tflops *= 2;
    EXPECT_TRUE(above_roof(r, p, machine)->certain);
}

TEST(RecordJson, sizes_are_whole_and_errors_name_the_field) {
    nlohmann::ordered_json json = to_json(Record{.schedule = "fa2", .pass = "forward", .dtype = "fp32", .len_q = 16});
    EXPECT_EQ(record_from_json(json).len_q, 16);
    json["len_q"] = 16.0;
    EXPECT_EQ(record_from_json(json).len_q, 16);
    const std::pair<const char*, nlohmann::ordered_json> wrong[] = {
        {"len_q", 1.5}, {"len_q", "16"}, {"ms", "fast"}, {"dtype", 5}, {"lens_q", 3}};
    for (const auto& [field, value] : wrong) {
        nlohmann::ordered_json bad = json;
        bad[field] = value;
        try {
            record_from_json(bad);
            ADD_FAILURE() << field << " " << value;
        } catch (const Error& error) {
            EXPECT_EQ(error.argument(), field);
            EXPECT_NE(std::string(error.what()).find("expected a"), std::string::npos) << error.what();
            EXPECT_EQ(std::string(error.what()).find("json.exception"), std::string::npos) << error.what();
        }
    }
    const Record ragged{.lens_q = {3, 5}, .lens_kv = {4, 6}};
    EXPECT_EQ(record_from_json(to_json(ragged)).lens_kv, ragged.lens_kv);
}

TEST(SameCase, is_about_what_was_measured_and_not_about_the_result) {
    Record a = on_h200(0.4), b = on_h200(0.5);
    b.date = "later";
    EXPECT_TRUE(same_case(a, b));
    b.threads = 2;
    EXPECT_FALSE(same_case(a, b));
}

}  // namespace
}  // namespace tessera::measure::predicted_test
