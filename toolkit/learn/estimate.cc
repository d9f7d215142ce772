// SPDX-License-Identifier: Apache-2.0
#include "learn/estimate.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <tuple>

#include "learn/quiz.hpp"
#include "learn/setting.hpp"
#include "tessera/error.hpp"

namespace tessera::learn {
namespace {

// Rounded to four digits; tests/learn compares them with the Records.
constexpr MeasuredCall kCalls[] = {
    {64, false, 512, 32, 32, 32, {1.601, 0.2625, 0.2092}, {0, 0.3083, 0.2212}},
    {64, false, 1024, 16, 32, 32, {2.268, 0.4767, 0.3642}, {0, 0.4763, 0.3525}},
    {64, false, 2048, 8, 32, 32, {3.564, 0.9261, 0.5827}, {0, 0.9093, 0.5417}},
    {64, false, 4096, 4, 32, 32, {6.689, 1.831, 1.114}, {0, 1.816, 1.035}},
    {64, false, 8192, 2, 32, 32, {13.18, 3.62, 2.083}, {0, 3.638, 1.923}},
    {64, false, 16384, 1, 32, 32, {30.02, 7.14, 4.137}, {0, 7.481, 3.858}},
    {64, true, 512, 32, 32, 32, {1.395, 0.2322, 0.1525}, {0, 0.2277, 0.1641}},
    {64, true, 1024, 16, 32, 32, {1.722, 0.3177, 0.2267}, {0, 0.3193, 0.2389}},
    {64, true, 2048, 8, 32, 32, {2.405, 0.5214, 0.3355}, {0, 0.5317, 0.3265}},
    {64, true, 4096, 4, 32, 32, {3.9, 0.987, 0.6053}, {0, 1.059, 0.6463}},
    {64, true, 8192, 2, 32, 32, {7.535, 1.906, 1.098}, {0, 1.99, 1.116}},
    {64, true, 16384, 1, 32, 32, {16.78, 3.767, 1.928}, {0, 3.765, 1.971}},
    {128, false, 512, 32, 16, 16, {0.8587, 0.2429, 0.1333}, {0, 0.2734, 0.1622}},
    {128, false, 1024, 16, 16, 16, {1.209, 0.4162, 0.2304}, {0, 0.4138, 0.2194}},
    {128, false, 2048, 1, 64, 8, {0.9577, 0.4019, 0.2072}, {0, 0.475, 0.2462}},
    {128, false, 2048, 8, 16, 16, {1.912, 0.7903, 0.4262}, {0, 0.793, 0.3951}},
    {128, false, 4096, 1, 64, 8, {3.586, 1.626, 0.842}, {0, 1.655, 0.8324}},
    {128, false, 4096, 4, 16, 16, {3.621, 1.573, 0.8468}, {0, 1.574, 0.7542}},
    {128, false, 8192, 1, 64, 8, {14.33, 6.365, 3.237}, {0, 6.558, 3.024}},
    {128, false, 8192, 2, 16, 16, {7.162, 3.11, 1.568}, {0, 3.142, 1.471}},
    {128, false, 16384, 1, 16, 16, {16.35, 6.242, 3.182}, {0, 6.635, 2.944}},
    {128, false, 16384, 1, 64, 8, {67.88, 25.07, 12.86}, {0, 26.19, 11.51}},
    {128, false, 32768, 1, 64, 8, {0, 100.9, 51.36}, {0, 102.8, 48.13}},
    {128, true, 512, 32, 16, 16, {0.7569, 0.1976, 0.105}, {0, 0.19, 0.1285}},
    {128, true, 1024, 16, 16, 16, {0.9384, 0.2757, 0.1441}, {0, 0.2827, 0.1568}},
    {128, true, 2048, 1, 64, 8, {0.6973, 0.29, 0.1155}, {0, 0.271, 0.1148}},
    {128, true, 2048, 8, 16, 16, {1.308, 0.4831, 0.242}, {0, 0.4848, 0.2296}},
    {128, true, 4096, 1, 64, 8, {2.099, 0.9147, 0.4363}, {0, 0.8924, 0.3895}},
    {128, true, 4096, 4, 16, 16, {2.119, 0.9015, 0.4317}, {0, 0.9433, 0.4406}},
    {128, true, 8192, 1, 64, 8, {8.054, 3.377, 1.648}, {0, 3.39, 1.479}},
    {128, true, 8192, 2, 16, 16, {4.117, 1.739, 0.8185}, {0, 1.728, 0.7504}},
    {128, true, 16384, 1, 16, 16, {9.162, 3.396, 1.64}, {0, 3.445, 1.451}},
    {128, true, 16384, 1, 64, 8, {37.01, 12.86, 6.745}, {0, 13.49, 5.808}},
    {128, true, 32768, 1, 64, 8, {0, 52.23, 27.34}, {0, 55, 23.19}},
    {256, false, 512, 32, 8, 8, {0.5957, 0.2481, 0.1306}, {0, 0.2557, 0.1371}},
    {256, false, 1024, 16, 8, 8, {0.9031, 0.4542, 0.2103}, {0, 0.4476, 0.2095}},
    {256, false, 2048, 8, 8, 8, {1.512, 0.8968, 0.3946}, {0, 0.8652, 0.3693}},
    {256, false, 4096, 4, 8, 8, {2.887, 1.793, 0.7138}, {0, 1.675, 0.6968}},
    {256, false, 8192, 2, 8, 8, {5.729, 3.437, 1.46}, {0, 3.384, 1.368}},
    {256, false, 16384, 1, 8, 8, {12.4, 6.851, 2.95}, {0, 7.282, 2.709}},
    {256, true, 512, 32, 8, 8, {0.5118, 0.1734, 0.1013}, {0, 0.1701, 0.1218}},
    {256, true, 1024, 16, 8, 8, {0.6794, 0.2796, 0.1417}, {0, 0.2977, 0.153}},
    {256, true, 2048, 8, 8, 8, {1.02, 0.5102, 0.2335}, {0, 0.5523, 0.2694}},
    {256, true, 4096, 4, 8, 8, {1.722, 1.009, 0.41}, {0, 0.9767, 0.3832}},
    {256, true, 8192, 2, 8, 8, {3.306, 1.956, 0.7223}, {0, 2, 0.7802}},
    {256, true, 16384, 1, 8, 8, {6.92, 3.972, 1.496}, {0, 3.774, 1.434}},
};

/// A time by the rules of thumb lies as near to the model's for most shapes.
constexpr double kTolerance = 0.25;

/// S in 4 bytes and P in 2, both written and read (lesson 1).
constexpr double kBytesPerScore = 12;

[[noreturn]] void refuse(const char* argument, const std::string& expected, const std::string& got) {
    throw Error(ErrorCode::invalid_argument, argument, fmt::format("expected {}, got {}", expected, got));
}

void expect_range(const char* argument, std::int64_t value, std::int64_t least, std::int64_t most) {
    if (value < least || value > most) refuse(argument, fmt::format("{} to {}", least, most), fmt::format("{}", value));
}

std::string heads_text(std::int64_t q, std::int64_t kv) {
    return q == kv ? fmt::format("{}", q) : fmt::format("{}/{}", q, kv);
}

/// Three digits, and no exponent.
std::string digits(double value) { return value < 1000 ? fmt::format("{:.3g}", value) : fmt::format("{:.0f}", value); }

const char* mask_text(bool causal) { return causal ? "causal" : "no mask"; }

/// The figures of the model and those of the pencil, for all layers.
struct Estimate {
    const model::Machine& machine;
    double scores;       ///< that are not hidden
    double flop;         ///< of both products
    double bytes;        ///< of S and P
    double standard_ms;  ///< predicted
    double flash_ms;     ///< predicted
    const char* flash;   ///< the schedule: fa3, or fa2 where there is no fa3
    double roof_share;   ///< of the tensor cores' peak that this schedule reaches: lessons 15 and 20
    double roof_ms;      ///< its products at the full peak
    double memory_ms;    ///< the bytes at the memory's full rate

    double win() const { return standard_ms / flash_ms; }
};

Estimate estimate_of(const ModelShape& shape) {
    validate(shape);
    const model::Machine& machine = *model::find_machine(shape.device);
    Problem problem = problem_of(shape.len, shape.heads_q, shape.head_dim);
    problem.heads_kv = shape.heads_kv;
    if (shape.causal) problem.mask.causal = Causal::bottom_right;
    const measure::SweepRow row = predicted(machine, problem, {Schedule::standard, Schedule::fa2, Schedule::fa3});
    for (const measure::SweepCell& cell : row.cells) {
        if (cell.known() || cell.schedule == Schedule::fa3) continue;
        throw Error(ErrorCode::unsupported, "len",
                    fmt::format("expected a model that {} runs on this GPU, got {} tokens: {}",
                                tessera::name_of(cell.schedule), shape.len, cell.refusal));
    }
    const measure::SweepCell& standard = *row.of(Schedule::standard);
    const measure::SweepCell *fa2 = row.of(Schedule::fa2), *fa3 = row.of(Schedule::fa3);
    if (!standard.fits) {
        throw Error(
            ErrorCode::unsupported, "len",
            fmt::format("expected a length at which the scores of a layer fit {}, got {}", machine.title, shape.len));
    }
    const auto layers = static_cast<double>(shape.layers);
    const bool has_fa3 = fa3 != nullptr;
    const auto len = static_cast<double>(shape.len);
    const double of_head = shape.causal ? len * (len + 1) / 2 : len * len;
    const double scores = of_head * static_cast<double>(shape.heads_q) * layers;
    const double flop = 4 * scores * static_cast<double>(shape.head_dim);
    const bool hopper = machine.warp_matrix_share < 1;
    return {.machine = machine,
            .scores = scores,
            .flop = flop,
            .bytes = kBytesPerScore * scores,
            .standard_ms = standard.ms() * layers,
            .flash_ms = (has_fa3 ? fa3 : fa2)->ms() * layers,
            .flash = has_fa3 ? "fa3" : "fa2",
            .roof_share = has_fa3                    ? 0.65
                          : machine.capability >= 10 ? 0.16
                          : hopper                   ? 0.35
                                                     : 0.6,
            .roof_ms = flop / machine.peak_tflops(DType::bf16) / 1e9,
            .memory_ms = kBytesPerScore * scores / machine.dram_gbs / 1e6};
}

const MeasuredCall::Times* times_of(const MeasuredCall& call, const std::string& device) {
    return device == "h200" ? &call.h200 : device == "h100" ? &call.h100 : nullptr;
}

/// "Measured: ...", with the time of the call and that of as many scores as the model has.
std::string measured_text(const ModelShape& shape, const Estimate& estimate, const std::string& schedule) {
    const MeasuredCall& call = nearest_call(shape);
    const MeasuredCall::Times* times = times_of(call, shape.device);
    if (times == nullptr) return fmt::format("No measurement of {} is kept here.", estimate.machine.title);
    const double ms = schedule == "standard" ? times->standard : schedule == "fa3" ? times->fa3 : times->fa2;
    const std::string what = fmt::format("{} on an {}", call.text(), shape.device == "h200" ? "H200" : "H100");
    if (ms == 0) return fmt::format("{} was not measured for {}.", schedule, what);
    const auto len = static_cast<double>(call.len);
    const double work = (call.causal ? len * (len + 1) / 2 : len * len) *
                        static_cast<double>(call.batch * call.heads_q * call.head_dim);
    // standard moves scores, FlashAttention multiplies: its work has head_dim as a factor.
    const double factor = schedule == "standard" ? estimate.scores / (work / static_cast<double>(call.head_dim))
                                                 : estimate.flop / 4 / work;
    return fmt::format("Measured: {} of {} takes {:.4g} ms. Scaled to your model, that is {} ms.", schedule, what, ms,
                       digits(factor * ms));
}

std::string measured_win_text(const ModelShape& shape, const Estimate& estimate) {
    const MeasuredCall& call = nearest_call(shape);
    const MeasuredCall::Times* times = times_of(call, shape.device);
    const char* name = estimate.flash;
    double flash = times == nullptr ? 0 : name == std::string("fa3") ? times->fa3 : times->fa2;
    const char* where = "";
    if (times == nullptr || times->standard == 0 || flash == 0) {
        times = &call.h200, name = "fa3", flash = times->fa3;
        where = ", the one GPU on which both were measured";
    }
    if (times->standard == 0) return fmt::format("standard was not measured for {}.", call.text());
    return fmt::format("Measured on an H200{}, {}, standard over {}: {:.4g} / {:.4g} = {:.1f} times.", where,
                       call.text(), name, times->standard, flash, times->standard / flash);
}

/// The reply to an answer by the rules of thumb, for a model to which they do not apply.
std::string beyond_rules(const ModelShape& shape) {
    return std::string("So say the rules of thumb. They do not hold here: ") +
           (shape.len < 4096 ? "in short calls, starts of kernels and idle SMs take a large part of the time."
                             : "they were measured on an A100, an H100 and an H200.");
}

Exercise bytes_exercise(const ModelShape& shape) {
    const Estimate e = estimate_of(shape);
    const double layers = static_cast<double>(shape.layers), gb = e.bytes / 1e9;
    const std::string of_head = shape.causal ? fmt::format("{0}^2 / 2", shape.len) : fmt::format("{}^2", shape.len);
    return {.task = fmt::format("{} Standard attention writes S and P to memory and reads them "
                                "back{}. How many GB are that in one forward pass, over all heads and layers?",
                                text_of(shape), shape.causal ? ", without the tiles that the mask hides" : ""),
            .unit = "GB",
            .value = gb,
            .tolerance = 0.1,
            .answer = fmt::format("{} GB", digits(gb)),
            .why = fmt::format("12 bytes a score: 12 * {} * {} heads * {} layers. FlashAttention moves none of them.",
                               of_head, shape.heads_q, shape.layers),
            .mistakes = {{gb / layers, "That is one layer."},
                         {gb / static_cast<double>(shape.heads_q), "That is one head."},
                         {gb / 2, "Each is written and read: two directions."},
                         {gb * static_cast<double>(shape.heads_kv) / static_cast<double>(shape.heads_q),
                          "Each head of queries has scores of its own, also when it shares keys."},
                         {gb * (shape.causal ? 2 : 0.5), "Does the mask hide any scores of this model?"}},
            .hint = "12 bytes a score (lesson 1): 4 + 4 of S, 2 + 2 of P. How many scores are there?"};
}

Exercise standard_exercise(const ModelShape& shape) {
    const Estimate e = estimate_of(shape);
    return {
        .task = fmt::format("{} The memory moves {:g} GB/s. How many ms does standard attention take in one forward "
                            "pass of all layers? (A quarter more or less counts as right.)",
                            text_of(shape), e.machine.dram_gbs.value),
        .unit = "ms",
        .value = e.standard_ms,
        .tolerance = kTolerance,
        .answer = fmt::format("about {} ms", digits(e.standard_ms)),
        .why =
            fmt::format("By pencil: {} GB / {:g} GB/s = {} ms at the full rate, of which standard reaches 0.7: {} ms. "
                        "The model says {} ms. {}",
                        digits(e.bytes / 1e9), e.machine.dram_gbs.value, digits(e.memory_ms), digits(e.memory_ms / 0.7),
                        digits(e.standard_ms), measured_text(shape, e, "standard")),
        .mistakes = {{e.standard_ms / static_cast<double>(shape.layers), "That is one layer."},
                     {e.memory_ms, "That is the memory at its full rate, which standard does not reach."},
                     {e.memory_ms / 0.7, beyond_rules(shape)}},
        .hint = "It waits for the bytes of the question before. Which share of the rate does it reach (lesson 15)?"};
}

Exercise flash_exercise(const ModelShape& shape) {
    const Estimate e = estimate_of(shape);
    return {.task = fmt::format("{} The tensor cores do {:.0f} TFLOP/s in bf16. How many ms does FlashAttention ({}) "
                                "take in one forward pass of all layers? (A quarter more or less counts as right.)",
                                text_of(shape), e.machine.peak_tflops(DType::bf16), e.flash),
            .unit = "ms",
            .value = e.flash_ms,
            .tolerance = kTolerance,
            .answer = fmt::format("about {} ms", digits(e.flash_ms)),
            .why = fmt::format(
                "By pencil: 4 * {} FLOP for each of {} billion scores are {} TFLOP, {} ms at the peak and {} ms at "
                "{:g} of it. The model says {} ms. {}",
                shape.head_dim, digits(e.scores / 1e9), digits(e.flop / 1e12), digits(e.roof_ms),
                digits(e.roof_ms / e.roof_share), e.roof_share, digits(e.flash_ms), measured_text(shape, e, e.flash)),
            .mistakes = {{e.flash_ms / static_cast<double>(shape.layers), "That is one layer."},
                         {e.roof_ms, "That is the peak of the tensor cores, which no kernel reaches."},
                         {e.roof_ms / e.roof_share, beyond_rules(shape)},
                         {e.standard_ms, "That is standard attention: which of the two waits for the memory?"}},
            .hint = "FLOP of both products, over the share of the peak that this kernel reaches (lesson 15)."};
}

Exercise win_exercise(const ModelShape& shape) {
    const Estimate e = estimate_of(shape);
    return {.task = fmt::format(
                "{} How many times as fast does attention become? (A quarter more or less counts as right.)",
                text_of(shape)),
            .unit = "times",
            .value = e.win(),
            .tolerance = kTolerance,
            .answer = fmt::format("about {:.1f} times", e.win()),
            .why = fmt::format("The model: {} / {} = {:.2f}. {}", digits(e.standard_ms), digits(e.flash_ms), e.win(),
                               measured_win_text(shape, e)),
            .mistakes = {{1 / e.win(), "It is the other quotient: the old time over the new one."},
                         {e.memory_ms / 0.7 / (e.roof_ms / e.roof_share), beyond_rules(shape)}},
            .hint = "The time of standard attention over that of FlashAttention."};
}

Exercise gain_exercise(const ModelShape& shape) {
    const Estimate e = estimate_of(shape);
    const double whole = measure::amdahl_speedup(shape.share, e.win());
    return {.task = fmt::format("{} With standard attention, attention takes {:g} of its time. How many times as fast "
                                "does the whole model become?",
                                text_of(shape), shape.share),
            .unit = "times",
            .value = whole,
            .tolerance = 0.05,
            .answer = fmt::format("about {:.2f} times", whole),
            .why = fmt::format("Amdahl: 1 / (1 - {0:g} + {0:g} / {1:.2f}) = {2:.2f}. Were attention free, it would be "
                               "{3:.2f}.",
                               shape.share, e.win(), whole, 1 / (1 - shape.share)),
            .mistakes = {{e.win(), "That is attention alone; the rest stays as it is."},
                         {1 / (1 - shape.share), "That is the limit, when attention takes no time at all."}},
            .hint = "Amdahl's law (lesson 15): what stays, and what becomes of attention's share?"};
}

}  // namespace

std::string MeasuredCall::text() const {
    return fmt::format("{} x {} tokens, {} heads of {}, {}", batch, len, heads_text(heads_q, heads_kv), head_dim,
                       mask_text(causal));
}

void validate(const ModelShape& model) {
    const model::Machine* machine = model::find_machine(model.device);
    if (machine == nullptr || machine->kind != model::MachineKind::gpu || !machine->supports(DType::bf16)) {
        std::string names;
        for (const model::Machine& one : model::machines()) {
            if (one.kind == model::MachineKind::gpu && one.supports(DType::bf16))
                names += (names.empty() ? "" : ", ") + one.name;
        }
        refuse("device", "a GPU that computes in bf16: " + names, fmt::format("\"{}\"", model.device));
    }
    expect_range("layers", model.layers, 1, 1000);
    expect_range("heads", model.heads_q, 1, 1024);
    if (model.heads_kv < 1 || model.heads_q % model.heads_kv != 0) {
        refuse("heads", "a number of query heads that is a multiple of the key heads",
               fmt::format("{}/{}", model.heads_q, model.heads_kv));
    }
    expect_range("head_dim", model.head_dim, 1, 256);
    expect_range("len", model.len, 1, std::int64_t{1} << 20);
    if (!(model.share > 0 && model.share < 1))
        refuse("share", "more than 0 and less than 1", fmt::format("{}", model.share));
}

std::string text_of(const ModelShape& model) {
    return fmt::format("Your model has {} layers and {} heads of {}. It reads {} tokens in bf16, {}, on {}.",
                       model.layers, heads_text(model.heads_q, model.heads_kv), model.head_dim, model.len,
                       model.causal ? "with a causal mask" : "without a mask",
                       model::find_machine(model.device)->title);
}

Exercise estimate_exercise(int index, const ModelShape& model) {
    constexpr Exercise (*kMake[kEstimates])(const ModelShape&) = {bytes_exercise, standard_exercise, flash_exercise,
                                                                  win_exercise, gain_exercise};
    return kMake[index](model);
}

Exercise exercise_for(const ExerciseId& id, const ModelShape& model) {
    return id.quiz != nullptr && id.quiz->estimates() ? estimate_exercise(id.index, model) : id.make();
}

std::span<const MeasuredCall> measured_calls() { return kCalls; }

const MeasuredCall& nearest_call(const ModelShape& model) {
    const auto distance = [&](const MeasuredCall& call) {
        const auto octaves = [](std::int64_t a, std::int64_t b) {
            return std::abs(std::log2(static_cast<double>(a) / static_cast<double>(b)));
        };
        return std::tuple(call.causal != model.causal, octaves(call.head_dim, model.head_dim),
                          octaves(call.len, model.len), octaves(call.heads_q * call.batch, model.heads_q));
    };
    return *std::min_element(std::begin(kCalls), std::end(kCalls),
                             [&](const MeasuredCall& a, const MeasuredCall& b) { return distance(a) < distance(b); });
}

}  // namespace tessera::learn
