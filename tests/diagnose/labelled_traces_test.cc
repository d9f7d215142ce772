// SPDX-License-Identifier: Apache-2.0
//
// The diagnosis of traces that were taken on an H200, where the kernels that ran are known (tests/diagnose/traces).
#include <gtest/gtest.h>
#include <zlib.h>

#include <cstdio>
#include <fstream>
#include <map>
#include <set>
#include <sstream>

#include "diagnose/advice.hpp"
#include "diagnose/by_hand.hpp"
#include "diagnose/diagnosis.hpp"

namespace tessera::diagnose::labelled_traces_test {
namespace {

const std::string kFolder = TESSERA_SOURCE_DIR "/tests/diagnose/traces/";

struct Labelled {
    std::string name, forward, backward;
};

std::vector<Labelled> labelled() {
    std::vector<Labelled> rows;
    std::ifstream file(kFolder + "labels.tsv");
    for (std::string line; std::getline(file, line);) {
        if (line.empty() || line[0] == '#') continue;
        std::istringstream fields(line);
        Labelled row;
        for (std::string* field : {&row.name, &row.forward, &row.backward}) std::getline(fields, *field, '\t');
        rows.push_back(row);
    }
    return rows;
}

/// The families of a pass, "-" for none.
std::string families(const Diagnosis& d, KernelPass pass) {
    std::set<std::string> found;
    for (const AttentionKind& kind : d.kinds) {
        if (kind.reading.role == Role::attention && kind.reading.pass == pass)
            found.insert(name_of(kind.reading.family));
    }
    std::string text;
    for (const std::string& family : found) text += (text.empty() ? "" : ", ") + family;
    return text.empty() ? "-" : text;
}

Diagnosis diagnosis_of(const std::string& name) {
    Trace trace = read_trace(kFolder + name + ".json.gz");
    return diagnose(trace);
}

TEST(LabelledTraces, are_read_as_what_ran) {
    const auto rows = labelled();
    EXPECT_GE(rows.size(), 164U);
    for (const Labelled& row : rows) {
        SCOPED_TRACE(row.name);
        const Diagnosis d = diagnosis_of(row.name);
        const bool jax = row.name.rfind("jax_", 0) == 0;
        EXPECT_EQ(d.tool, jax ? "JAX profiler" : "PyTorch profiler");
        EXPECT_EQ(families(d, KernelPass::forward), row.forward);
        EXPECT_EQ(families(d, KernelPass::backward), row.backward);
        EXPECT_TRUE(d.notes.empty()) << d.notes.front();
        if (jax) continue;
        EXPECT_EQ(d.gpus.at(0).name, "NVIDIA H200");
        EXPECT_TRUE(d.unknown.empty()) << d.unknown.front().kernel.name;
        for (const AttentionKind& kind : d.kinds) {
            EXPECT_EQ(kind.reading.role, Role::attention) << "a helper found no call";
            EXPECT_GE(kind.reading.confidence, Confidence::likely);
            EXPECT_GT(kind.calls, 0);
        }
    }
}

/// The gradient of a gradient is no attention of its own: it goes to the one whose backward went over the same scores.
TEST(LabelledTraces, know_the_gradient_of_a_gradient) {
    const std::vector<std::string> twice = {"gradient of a gradient", "GEMMs in fp32, without tensor cores"};
    std::int64_t first = 0;
    std::int64_t second = 0;
    for (const AttentionKind& kind : diagnosis_of("step_double_backward_train").kinds) {
        if (kind.reading.pass == KernelPass::backward) (kind.reading.features == twice ? second : first) += kind.calls;
    }
    EXPECT_EQ(first, 2);
    EXPECT_EQ(second, 1);
    ByHandReader reader;
    const SoftmaxSigns signs{.scores = {2, 8, 64, 64}, .safe = false, .twice = true};
    EXPECT_EQ(reader.read(KernelPass::backward, signs).confidence, Confidence::unsure);
    EXPECT_EQ(reader.read(KernelPass::backward, {.scores = {2, 8, 64, 64}, .safe = true}).family, Family::math);
    EXPECT_EQ(reader.read(KernelPass::backward, signs).family, Family::math);
    EXPECT_EQ(reader.read(KernelPass::backward, {.scores = {2, 8, 64, 32}, .twice = true}).family, Family::eager);
}

/// A compiler makes many kernels of one softmax, with other sums on the way.
TEST(LabelledTraces, count_a_softmax_in_pieces_once) {
    for (const AttentionKind& kind : diagnosis_of("step_compiled_cosine_train").kinds) EXPECT_EQ(kind.calls, 1);
    for (const AttentionKind& kind : diagnosis_of("served_compiled_sinks_train").kinds) EXPECT_EQ(kind.calls, 1);
    EXPECT_EQ(diagnosis_of("step_compiled_sinks").kinds.at(0).calls, 1);
    EXPECT_EQ(diagnosis_of("step_decode_loop").kinds.at(0).calls, 4);
    EXPECT_EQ(diagnosis_of("step_gpt_graph_train").kinds.at(0).calls, 4);
}

const AttentionKind& only_kind(const Diagnosis& d) {
    EXPECT_EQ(d.kinds.size(), 1U);
    return d.kinds.at(0);
}

TEST(LabelledTraces, tell_what_was_called) {
    const AttentionKind causal = only_kind(diagnosis_of("flash_causal"));
    EXPECT_EQ(causal.reading.release, "2.6.0 or later");
    EXPECT_EQ(causal.reading.mask, "causal");
    EXPECT_EQ(causal.shapes.at(0).call.is_causal, true);
    EXPECT_EQ(*causal.shapes.at(0).call.q.shape, (Sizes{1, 32, 4096, 128}));
    EXPECT_EQ(causal.shapes.at(0).call.q.element, Element::bf16);
    const AttentionKind masked = only_kind(diagnosis_of("cudnn_mask"));
    EXPECT_EQ(masked.shapes.at(0).call.mask_kind, MaskKind::boolean);
    EXPECT_GT(masked.beside_us, 0) << "PyTorch makes numbers of the mask";
    EXPECT_TRUE(only_kind(diagnosis_of("flash_no_shapes")).shapes.empty());
    EXPECT_EQ(only_kind(diagnosis_of("graph_cudnn")).asked_by, "");
    EXPECT_EQ(only_kind(diagnosis_of("cudnn_decode")).reading.arch, 80) << "cuDNN runs Ampere's code for one query";
}

/// The backward of grouped heads: cuDNN's operator does not say that they are grouped, its shapes do.
TEST(LabelledTraces, knows_grouped_heads_of_a_backward) {
    for (const AttentionKind& kind : diagnosis_of("llama_sdpa_train").kinds) {
        const Call& call = kind.shapes.at(0).call;
        EXPECT_EQ(call.enable_gqa, true) << name_of(kind.reading.pass);
        EXPECT_EQ((*call.k.shape)[1], 2);
    }
}

TEST(LabelledTraces, tell_the_math_path_from_a_models_own_code) {
    EXPECT_EQ(diagnosis_of("math_train").kinds.at(0).reading.library, "PyTorch");
    EXPECT_EQ(diagnosis_of("eager_train").kinds.at(0).reading.library, "the model's own code");
    EXPECT_EQ(only_kind(diagnosis_of("flex_uncompiled")).reading.library, "PyTorch's FlexAttention, not compiled");
    const auto features = diagnosis_of("math_causal").kinds.at(0).reading.features;
    EXPECT_EQ(features, (std::vector<std::string>{"GEMMs in fp32, without tensor cores"}));
}

/// Four calls by each of the four backends, and four by hand: those of the math path look alike here.
TEST(LabelledTraces, of_nsight_compute_tell_the_same) {
    Trace trace = read_trace(kFolder + "ncu.csv");
    const Diagnosis d = diagnose(trace);
    EXPECT_EQ(d.tool, "Nsight Compute");
    EXPECT_EQ(d.gpus.at(0).capability, 90);
    std::map<std::string, std::int64_t> calls;
    for (const AttentionKind& kind : d.kinds) calls[name_of(kind.reading.family)] += kind.calls;
    EXPECT_EQ(calls,
              (std::map<std::string, std::int64_t>{{"cudnn", 4}, {"eager", 8}, {"fa2", 4}, {"mem-efficient", 4}}));
}

/// The file without its compression, for the length of a test.
class Unpacked {
 public:
    explicit Unpacked(const std::string& name) : path_(testing::TempDir() + "tessera_" + name) {
        std::ofstream out(path_, std::ios::binary);
        gzFile file = gzopen((kFolder + name + ".gz").c_str(), "rb");
        char piece[4096];
        for (int got = 0; (got = gzread(file, piece, sizeof piece)) > 0;) out.write(piece, got);
        gzclose(file);
    }
    Unpacked(const Unpacked&) = delete;
    Unpacked& operator=(const Unpacked&) = delete;
    ~Unpacked() { std::remove(path_.c_str()); }
    const std::string& path() const { return path_; }

 private:
    std::string path_;
};

/// Exports of Nsight Systems 2025.3, of which the tables of kernels, their names and the GPU are kept: each case of
/// which_traces.py's groups "graphs" (three runs to warm up, one as a graph) and "eager" (one run).
TEST(LabelledTraces, of_nsight_systems_tell_the_same) {
    const auto calls_in = [](const char* name) {
        const Unpacked file(name);
        Trace trace = read_trace(file.path());
        const Diagnosis d = diagnose(trace);
        EXPECT_EQ(d.tool, "Nsight Systems");
        EXPECT_EQ(d.gpus.at(0).name, "NVIDIA H200");
        EXPECT_TRUE(d.unknown.empty()) << d.unknown.front().kernel.name;
        std::map<std::string, std::int64_t> calls;
        for (const AttentionKind& kind : d.kinds)
            calls[std::string(name_of(kind.reading.family)) + " " + name_of(kind.reading.pass)] += kind.calls;
        return calls;
    };
    using Calls = std::map<std::string, std::int64_t>;
    EXPECT_EQ(calls_in("nsys_graphs.sqlite"),
              (Calls{{"cudnn forward", 4}, {"eager forward", 8}, {"fa2 forward", 4}, {"mem-efficient forward", 4}}));
    EXPECT_EQ(calls_in("nsys_eager.sqlite"),
              (Calls{{"cudnn backward", 1}, {"cudnn forward", 2}, {"eager backward", 2}, {"eager forward", 7}}));
}

/// By hand, between much else: T5 has a bias of positions, whose gradient is summed between the products; Mixtral's
/// softmax over experts is none.
TEST(LabelledTraces, count_calls_by_hand) {
    for (const auto& [name, calls] : {std::pair{"t5_eager_train", 6}, {"mixtral_eager_train", 2}, {"eager_train", 1}}) {
        const Diagnosis d = diagnosis_of(name);
        ASSERT_EQ(d.kinds.size(), 2U) << name;
        for (const AttentionKind& kind : d.kinds) EXPECT_EQ(kind.calls, calls) << name << name_of(kind.reading.pass);
    }
}

/// PyTorch's rules say nothing of calls that go past its choice.
TEST(LabelledTraces, get_advice_where_pytorch_chose) {
    const Call said{.torch = Version{2, 11, 0}};
    const auto has_advice = [&](const char* name) {
        const Diagnosis d = diagnosis_of(name);
        return advise(d, only_kind(d), said).has_value();
    };
    EXPECT_TRUE(has_advice("flash_causal"));
    EXPECT_TRUE(has_advice("math_mask"));
    EXPECT_TRUE(has_advice("eager"));
    EXPECT_FALSE(has_advice("varlen"));
    EXPECT_FALSE(has_advice("flex_uncompiled"));
    EXPECT_FALSE(has_advice("graph_flash"));
}

/// On this machine PyTorch 2.11 took cuDNN wherever its rules allow it. A backend that was requested by name
/// contradicts the rules.
TEST(LabelledTraces, surprise_the_rules_only_where_a_backend_was_asked_for) {
    const Call said{.torch = Version{2, 11, 0}};
    for (const Labelled& row : labelled()) {
        if (row.name.rfind("default_", 0) != 0) continue;
        const Diagnosis d = diagnosis_of(row.name);
        for (const AttentionKind& kind : d.kinds) {
            if (kind.reading.pass != KernelPass::forward) continue;
            const auto advice = advise(d, kind, said);
            ASSERT_TRUE(advice.has_value()) << row.name;
            EXPECT_TRUE(advice->surprise.empty()) << row.name;
        }
    }
    const Diagnosis asked_for = diagnosis_of("math_mask");
    EXPECT_FALSE(advise(asked_for, only_kind(asked_for), said)->surprise.empty());
}

/// Predictions of calls with dropout or a mask tensor lack a part of their time. Their bars, which are wide for that,
/// hold for the traces.
TEST(LabelledTraces, of_calls_with_dropout_or_a_mask_are_inside_of_their_bars) {
    const Call said{.torch = Version{2, 11, 0}};
    int rows = 0, inside = 0;
    for (const char* name :
         {"flash_dropout", "efficient_dropout", "new_compiled_block_train", "cudnn_mask", "default_mask",
          "efficient_mask_train", "llama_sdpa_padded", "mistral_window_sdpa_train", "new_compiled_mask_train",
          "new_float_mask", "new_groups_efficient", "new_mask_flash_dim"}) {
        const Diagnosis d = diagnosis_of(name);
        for (const AttentionKind& kind : d.kinds) {
            const auto advice = advise(d, kind, said);
            if (!advice || advice->ways.baseline.predicted_ms <= 0) continue;
            const Baseline& baseline = advice->ways.baseline;
            const double factor = baseline.ms / baseline.predicted_ms;
            ++rows, inside += std::max(factor, 1 / factor) <= 1 + baseline.predicted_error;
        }
    }
    EXPECT_EQ(rows, 20);
    EXPECT_GE(inside, 0.9 * rows);
}

}  // namespace
}  // namespace tessera::diagnose::labelled_traces_test
