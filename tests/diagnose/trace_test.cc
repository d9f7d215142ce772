// SPDX-License-Identifier: Apache-2.0
//
// Traces of each tool, whole and damaged, and the calls that are found in them.
#include "diagnose/trace.hpp"

#include <gtest/gtest.h>
#include <sqlite3.h>
#include <unistd.h>
#include <zlib.h>

#include <filesystem>
#include <fstream>
#include <random>

#include "diagnose/call_inputs.hpp"
#include "diagnose/diagnosis.hpp"
#include "tessera/error.hpp"
#include "traces.hpp"

namespace tessera::diagnose::trace_test {
namespace {

Diagnosis diagnosis_of(const std::string& bytes) {
    Trace trace = read_trace_bytes(bytes, "t");
    return diagnose(trace);
}

void expect_bad(const std::string& bytes, const std::string& message) {
    try {
        read_trace_bytes(bytes, "t");
        ADD_FAILURE() << "no error for " << bytes.substr(0, 60);
    } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::bad_data);
        EXPECT_NE(std::string(error.what()).find(message), std::string::npos) << error.what();
    }
}

std::string gzipped(const std::string& text) {
    std::string packed(text.size() + 1024, '\0');
    z_stream state{};
    EXPECT_EQ(deflateInit2(&state, 6, Z_DEFLATED, 16 + MAX_WBITS, 8, Z_DEFAULT_STRATEGY), Z_OK);
    state.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(text.data()));
    state.avail_in = static_cast<uInt>(text.size());
    state.next_out = reinterpret_cast<Bytef*>(packed.data());
    state.avail_out = static_cast<uInt>(packed.size());
    EXPECT_EQ(deflate(&state, Z_FINISH), Z_STREAM_END);
    packed.resize(state.total_out);
    deflateEnd(&state);
    return packed;
}

TraceText one_step() {
    TraceText trace;
    trace.sdpa(0, 100).op("aten::_scaled_dot_product_flash_attention", 10, 90);
    trace.kernel(kGemm, 300, -1).kernel(kFlashForward, 100, 50).kernel(kElementwise, 10, 60);
    return trace;
}

void expect_one_step(const Diagnosis& d) {
    EXPECT_EQ(d.tool, "PyTorch profiler");
    ASSERT_EQ(d.gpus.size(), 1U);
    EXPECT_EQ(d.gpus[0].name, "NVIDIA H200");
    EXPECT_EQ(d.gpus[0].capability, 90);
    EXPECT_EQ(d.runs, 3);
    EXPECT_DOUBLE_EQ(d.gpu_us, 410);
    ASSERT_EQ(d.kinds.size(), 1U);
    const AttentionKind& kind = d.kinds[0];
    EXPECT_EQ(kind.reading.family, Family::fa2);
    EXPECT_EQ(kind.calls, 1);
    EXPECT_DOUBLE_EQ(kind.us, 110);  // with the copy inside of the operator
    EXPECT_DOUBLE_EQ(kind.beside_us, 10);
    EXPECT_EQ(kind.asked_by, "aten::scaled_dot_product_attention");
    ASSERT_EQ(kind.shapes.size(), 1U);
    EXPECT_EQ(text_of(kind.shapes[0].call), "batch 2, heads 16, len 4096, head_dim 128, bf16, is_causal");
}

TEST(Traces, reads_pytorch) { expect_one_step(diagnosis_of(one_step().text())); }
TEST(Traces, reads_gzip_and_sequences_after_each_other) {
    const std::string text = one_step().text();
    expect_one_step(diagnosis_of(gzipped(text)));
    expect_one_step(diagnosis_of(gzipped(text.substr(0, 500)) + gzipped(text.substr(500))));
}
TEST(Traces, reads_a_bare_list_of_events) {
    const std::string text = one_step().text();
    const std::size_t begin = text.find("[{\"ph\"") == std::string::npos ? text.find("\"traceEvents\":") + 14 : 0;
    const std::string list = text.substr(begin, text.find("],\"traceName") + 1 - begin);
    EXPECT_EQ(diagnosis_of(list).kinds.size(), 1U);
}

TEST(Traces, reads_kernels_of_graphs_by_their_names_alone) {
    TraceText trace;
    trace.kernel(kFlashForward, 5).kernel(kGemm, 5).kernel(kFlashForward, 5);
    const Diagnosis d = diagnosis_of(trace.text());
    ASSERT_EQ(d.kinds.size(), 1U);
    EXPECT_EQ(d.kinds[0].calls, 2);
    EXPECT_EQ(d.kinds[0].asked_by, "");
    EXPECT_TRUE(d.kinds[0].shapes.empty());
    EXPECT_EQ(d.kinds[0].reading.confidence, Confidence::certain);
}

/// Files that were joined have launches of equal numbers, each of its own process.
TEST(Traces, keeps_processes_of_joined_files_apart) {
    const std::string efficient = "fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel)";
    TraceText trace;
    for (int process = 1; process <= 2; ++process) {
        trace.process(process, 0).at(1000);
        for (int i = 0; i < 10; ++i) {
            const double at = 100.0 * i;
            trace.sdpa(at, at + 50, process == 2).kernel(process == 2 ? efficient : kFlashForward, 10, at + 10);
        }
    }
    const Diagnosis d = diagnosis_of(trace.text());
    ASSERT_EQ(d.kinds.size(), 2U);
    for (const AttentionKind& kind : d.kinds) {
        EXPECT_EQ(kind.calls, 10);
        std::int64_t masked = 0, all = 0;
        for (const ShapeSum& shape : kind.shapes) {
            all += shape.count;
            masked += shape.call.mask_kind != MaskKind::none ? shape.count : 0;
        }
        EXPECT_EQ(all, 10);
        EXPECT_EQ(masked, kind.reading.family == Family::mem_efficient ? all : 0);
    }
    ASSERT_EQ(d.notes.size(), 1U);
    EXPECT_NE(d.notes[0].find("several processes"), std::string::npos);
}

/// Events that were mixed tell their process by time, or not at all.
TEST(Traces, says_what_launched_a_kernel_only_if_it_knows) {
    const std::string efficient = "fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel)";
    TraceText trace;
    for (int i = 0; i < 10; ++i) {
        const double at = 100.0 * i;
        for (int process = 1; process <= 2; ++process) {
            trace.process(process, process - 1).number(2 * i).at(1000 + at);
            trace.sdpa(at, at + 50, process == 2).kernel(process == 2 ? efficient : kFlashForward, 10, at + 10);
        }
    }
    for (const AttentionKind& kind : diagnosis_of(trace.text()).kinds) {
        EXPECT_EQ(kind.calls, 10);
        EXPECT_TRUE(kind.shapes.empty()) << "both had launched, so the call may be of either";
    }
}

TEST(Traces, name_the_gpu_that_ran) {
    TraceText trace;
    trace.gpu("NVIDIA A100-SXM4-80GB", 108, 79.1).second_gpu("NVIDIA H200", 132, 139.8);
    trace.process(1, 1).kernel(kFlashForward, 10);
    const Diagnosis d = diagnosis_of(trace.text());
    ASSERT_EQ(d.gpus.size(), 1U);
    EXPECT_EQ(d.gpus[0].name, "NVIDIA H200");
}

TEST(Traces, reads_operators_without_shapes) {
    TraceText trace;
    trace.op("aten::scaled_dot_product_attention", 0, 100).kernel(kFlashForward, 5, 50);
    const Diagnosis d = diagnosis_of(trace.text());
    ASSERT_EQ(d.kinds.size(), 1U);
    EXPECT_EQ(d.kinds[0].asked_by, "aten::scaled_dot_product_attention");
    EXPECT_TRUE(d.kinds[0].shapes.empty());
}

TEST(Traces, gathers_the_math_path_in_one_call) {
    TraceText trace;
    for (const int begin : {0, 1000}) {
        trace.sdpa(begin, begin + 100, true).op("aten::_scaled_dot_product_attention_math", begin + 1, begin + 99);
        trace.kernel("ampere_sgemm_128x128_tn", 50, begin + 10).kernel(kElementwise, 5, begin + 20);
        trace.kernel(kSoftmax, 20, begin + 30).kernel("ampere_sgemm_128x128_nn", 50, begin + 40);
    }
    const Diagnosis d = diagnosis_of(trace.text());
    ASSERT_EQ(d.kinds.size(), 1U);
    EXPECT_EQ(d.kinds[0].reading.family, Family::math);
    EXPECT_EQ(d.kinds[0].calls, 2);
    EXPECT_DOUBLE_EQ(d.kinds[0].us, 250);
    EXPECT_EQ(d.kinds[0].shapes.at(0).call.mask_kind, MaskKind::boolean);
    EXPECT_EQ(d.kinds[0].reading.features, (std::vector<std::string>{"GEMMs in fp32, without tensor cores"}));
}

TEST(Traces, finds_attention_by_hand) {
    TraceText trace;
    trace.kernel(kGemm, 7).kernel(kGemm, 50).kernel(kElementwise, 5).kernel(kSoftmax, 20).kernel(kElementwise, 5);
    trace.kernel(kGemm, 50).kernel(kGemm, 7);
    const Diagnosis d = diagnosis_of(trace.text());
    ASSERT_EQ(d.kinds.size(), 1U);
    EXPECT_EQ(d.kinds[0].reading.family, Family::eager);
    EXPECT_EQ(d.kinds[0].calls, 1);
    EXPECT_DOUBLE_EQ(d.kinds[0].us, 130);
}

/// A softmax that chooses experts or words is no attention.
TEST(Traces, takes_no_other_softmax_for_attention) {
    TraceText words;
    words.kernel(kGemm, 50)
        .kernel(kSoftmax, 20)
        .kernel("void at::native::sbtopk::gatherTopK<float>(int)", 5)
        .kernel(kGemm, 5);
    EXPECT_TRUE(diagnosis_of(words.text()).kinds.empty());
    TraceText experts;
    experts.op("aten::_softmax", 100, 200, R"("Input Dims":[[4096,64],[],[]])");
    experts.kernel(kGemm, 50, 50).kernel(kSoftmax, 20, 150).kernel(kGemm, 5, 250);
    EXPECT_TRUE(diagnosis_of(experts.text()).kinds.empty());
}

TEST(Traces, says_of_look_alikes_that_they_are_none) {
    TraceText trace;
    trace.kernel("void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16>(int)", 5).kernel("nobody_knows", 3);
    const Diagnosis d = diagnosis_of(trace.text());
    EXPECT_TRUE(d.kinds.empty());
    ASSERT_EQ(d.look_alikes.size(), 1U);
    ASSERT_EQ(d.unknown.size(), 1U);
    EXPECT_EQ(d.unknown[0].kernel.name, "nobody_knows");
}

TEST(Traces, lists_operators_of_a_trace_without_kernels) {
    TraceText trace;
    trace.op("aten::_scaled_dot_product_flash_attention_for_cpu", 0, 10);
    const Diagnosis d = diagnosis_of(trace.text());
    EXPECT_EQ(d.cpu_ops, (std::vector<std::string>{"aten::_scaled_dot_product_flash_attention_for_cpu, once"}));
}

/// A file that was cut off is read up to the cut, and a note says so.
TEST(Traces, reads_what_is_left_of_a_cut_file) {
    const std::string text = one_step().text();
    const std::size_t first_event = text.find("},\n");
    for (std::size_t size = first_event + 10; size < text.size(); size += 7) {
        const Trace trace = read_trace_bytes(text.substr(0, size), "t");
        ASSERT_EQ(trace.notes.size(), 1U) << size;
        EXPECT_NE(trace.notes[0].find("was read"), std::string::npos);
    }
    const std::string packed = gzipped(text);
    const Trace trace = read_trace_bytes(packed.substr(0, packed.size() - 20), "t");
    EXPECT_NE(trace.notes.at(0).find("gzip"), std::string::npos) << trace.notes.at(0);
}

TEST(Traces, refuses_nonsense) {
    expect_bad("", "empty");
    expect_bad("{}", "without any");
    expect_bad("{\"traceEvents\": 3}", "without any");
    expect_bad("[", "without any");
    expect_bad("[1, 2, 3]", "without any");
    expect_bad("{\"traceEvents\": []}", "without any");
    expect_bad("{\"a\": [1, 2", "breaks at byte");
    expect_bad(std::string("\x7f"
                           "ELF\0\0\0\0",
                           8),
               "got a program or a library (ELF)");
    expect_bad(std::string("\1\2\0\0\0\0", 6), "binary");
    expect_bad("GGUF" + std::string(60, '\0'), "got a GGUF file");
    expect_bad("\x89HDF\r\n\x1a\n" + std::string(60, '\0'), "got an HDF5 file");
    expect_bad("{\"metadata\": {}, \"weight_map\": {\"q\": \"a.safetensors\"}}", "got the index of a model");
    expect_bad("version https://git-lfs.github.com/spec/v1\noid sha256:a\nsize 1\n", "got a pointer of git-lfs");
    expect_bad("<!DOCTYPE html><html><body>404</body></html>", "got a web page");
    expect_bad("\n\n  \n", "got none");
    expect_bad(std::string(100'000, '['), "without any");
    try {
        read_trace("nosuch.json");
        ADD_FAILURE();
    } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::cannot_open);
    }
}

TEST(Traces, takes_values_of_any_kind_anywhere) {
    const Diagnosis d = diagnosis_of(
        R"({"traceEvents":[{"ph":"X","cat":"kernel","name":3,"dur":"x","args":[1,{"a":[{}]}],"ts":null},)"
        R"({"ph":"X","cat":"kernel","name":"f","ts":1e308,"dur":-5},{"ph":"X","cat":"kernel","dur":1,"name":"g"},7,[],"x",)"
        R"({"ph":"X","cat":"cpu_op","name":"aten::scaled_dot_product_attention","args":{"Input Dims":[[[{"a":1}]],null]}}],)"
        R"("deviceProperties":{"name":"x"}})");
    EXPECT_EQ(d.runs, 2);
}

TEST(Traces, reads_jax) {
    const Diagnosis d = diagnosis_of(
        R"({"displayTimeUnit":"ns","traceEvents":[)"
        R"({"args":{"name":"/device:GPU:0"},"name":"process_name","ph":"M","pid":1},)"
        R"x({"args":{"name":"Stream #20(Compute)"},"name":"thread_name","ph":"M","pid":1,"tid":20
},)x"
        R"({"args":{"name":"XLA Ops"},"name":"thread_name","ph":"M","pid":1,"tid":2},)"
        R"({"args":{"hlo_op":"custom-call.1","correlation_id":4},"dur":80.5,"name":)"
        R"("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_kernel0_0",)"
        R"("ph":"X","pid":1,"tid":20,"ts":10},)"
        R"({"dur":80.5,"name":"custom-call.1","ph":"X","pid":1,"tid":2,"ts":10},)"
        R"({"dur":9,"name":"python","ph":"X","pid":9,"tid":2,"ts":10}]})");
    EXPECT_EQ(d.tool, "JAX profiler");
    EXPECT_EQ(d.runs, 1);
    ASSERT_EQ(d.kinds.size(), 1U);
    EXPECT_EQ(d.kinds[0].reading.family, Family::cudnn);
}

/// Sums by name have no order, so a softmax may belong to an attention by hand.
TEST(Traces, names_softmaxes_where_there_is_no_order) {
    const Diagnosis d = diagnosis_of(kGemm + "\n" + kSoftmax + "\n" + kGemm + "\n");
    EXPECT_TRUE(d.kinds.empty());
    ASSERT_EQ(d.softmaxes.size(), 1U);
    EXPECT_EQ(d.softmaxes[0].kernel.name, kSoftmax);
    TraceText loss;
    loss.kernel(kSoftmax, 5);
    EXPECT_TRUE(diagnosis_of(loss.text()).softmaxes.empty());
}

class NsysFile : public testing::Test {
 protected:
    void SetUp() override {
        path_ = (std::filesystem::temp_directory_path() / ("tessera_nsys_" + std::to_string(::getpid()) + ".sqlite"))
                    .string();
        std::filesystem::remove(path_);
    }
    void TearDown() override { std::filesystem::remove(path_); }
    void make(const std::string& script) const {
        sqlite3* database = nullptr;
        ASSERT_EQ(sqlite3_open(path_.c_str(), &database), SQLITE_OK);
        char* error = nullptr;
        EXPECT_EQ(sqlite3_exec(database, script.c_str(), nullptr, nullptr, &error), SQLITE_OK) << error;
        sqlite3_close(database);
    }
    std::string path_;
};

TEST_F(NsysFile, is_read_with_the_columns_that_it_has) {
    make("CREATE TABLE StringIds (id INTEGER, value TEXT); INSERT INTO StringIds VALUES (1, '" + kFlashForward +
         "'), (2, 'gemm'); CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INT, end INT, deviceId INT, streamId INT, "
         "demangledName INT, shortName INT, graphNodeId INT); INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES "
         "(0, 5000, 0, 7, 1, 9, 3), (6000, 8000, 0, 7, 2, 9, NULL), (9000, 9500, 0, 7, 77, 9, NULL);"
         "CREATE TABLE TARGET_INFO_GPU (name TEXT, computeMajor INT, computeMinor INT);"
         "INSERT INTO TARGET_INFO_GPU VALUES ('NVIDIA A100', 8, 0);");
    Trace trace = read_trace(path_);
    const Diagnosis d = diagnose(trace);
    EXPECT_EQ(d.gpus.at(0).capability, 80);
    EXPECT_EQ(d.runs, 3);
    EXPECT_DOUBLE_EQ(d.gpu_us, 7.5);
    ASSERT_EQ(d.kinds.size(), 1U);
    EXPECT_DOUBLE_EQ(d.kinds[0].us, 5);
    EXPECT_NE(d.notes.at(0).find("1 runs of kernels came from CUDA graphs"), std::string::npos);
}

TEST_F(NsysFile, names_the_gpu_that_ran) {
    make("CREATE TABLE StringIds (id INTEGER, value TEXT); INSERT INTO StringIds VALUES (1, '" + kFlashForward +
         "'); CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INT, end INT, deviceId INT, streamId INT, demangledName "
         "INT); INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (0, 5000, 1, 7, 1), (6000, 8000, 1, 7, 1);"
         "CREATE TABLE TARGET_INFO_GPU (id INT, name TEXT, computeMajor INT, computeMinor INT);"
         "INSERT INTO TARGET_INFO_GPU VALUES (0, 'NVIDIA A100', 8, 0), (1, 'NVIDIA H200', 9, 0);");
    const Trace trace = read_trace(path_);
    ASSERT_EQ(trace.gpus.size(), 1U);
    EXPECT_EQ(trace.gpus[0].name, "NVIDIA H200");
}

TEST_F(NsysFile, without_kernels_is_an_error) {
    make("CREATE TABLE other (a INT); CREATE VIEW CUPTI_ACTIVITY_KIND_KERNEL AS SELECT 1;");
    EXPECT_THROW(read_trace(path_), Error);
    std::ofstream(path_) << std::string("SQLite format 3\0 and nothing", 27);
    EXPECT_THROW(read_trace(path_), Error);
}

TEST(Traces, survives_three_thousand_damaged_ones) {
    const std::string seed = one_step().text();
    const std::string pieces[] = {"{",    "}",     "[",  "]",        ",",      ":",    "\"",
                                  "null", "1e999", "-1", "\"args\"", "\"ts\"", "[[[[", "\\u0000"};
    std::mt19937_64 random(20261122);
    const auto below = [&](std::size_t bound) { return static_cast<std::size_t>(random() % bound); };
    int read = 0;
    for (int i = 0; i < 3'000; ++i) {
        std::string text = seed;
        for (std::size_t edit = below(3) + 1; edit > 0; --edit) {
            const std::size_t at = below(text.size());
            if (below(2) == 0) text.insert(at, pieces[below(std::size(pieces))]);
            else if (below(2) == 0) text.erase(at, below(30));
            else text[at] = static_cast<char>(random());
            if (text.empty()) text = seed;
        }
        try {
            const Diagnosis d = diagnosis_of(text);
            ++read;
            ASSERT_LE(d.attention_us, d.gpu_us * (1 + 1e-9)) << text;
        } catch (const Error& error) {
            ASSERT_EQ(error.code(), ErrorCode::bad_data) << text;
        }
    }
    EXPECT_GT(read, 600);
}

}  // namespace
}  // namespace tessera::diagnose::trace_test
