// SPDX-License-Identifier: Apache-2.0
//
// Traces for tests, made of a few events each.
#pragma once

#include <fmt/format.h>

#include <string>
#include <vector>

namespace tessera::diagnose {

inline const std::string kFlashForward =
    "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4, false, false, cutlass::bfloat16_t, "
    "Flash_kernel_traits<128, 128, 64, 4, cutlass::bfloat16_t> >, false, true, false, false, true, true, false, "
    "false>(pytorch_flash::Flash_fwd_params)";
inline const std::string kGemm = "nvjet_tst_192x192_64x4_2x1_v_bz_coopB_TNN";
inline const std::string kSoftmax =
    "void at::native::(anonymous namespace)::cunn_SoftMaxForwardReg<8, float, float, float, "
    "at::native::(anonymous namespace)::SoftMaxForwardEpilogue, long, 2>(float*, float const*, long)";
inline const std::string kElementwise =
    "void at::native::vectorized_elementwise_kernel<4, at::native::AUnaryFunctor<float>, std::array<char*, 2ul> >(int)";

/// A PyTorch profiler's trace, as text.
class TraceText {
 public:
    /// Events of another process, whose launches count from the beginning again, on a GPU of this number.
    TraceText& process(int number, int gpu) {
        process_ = number, gpu_ = gpu, correlation_ = 0;
        return *this;
    }
    TraceText& number(int launches) {
        correlation_ = launches;
        return *this;
    }
    TraceText& at(double us) {
        gpu_us_ = us;
        return *this;
    }
    /// `us` long, launched at `launch_us` on the CPU (none: a CUDA graph).
    TraceText& kernel(const std::string& name, double us, double launch_us = -1) {
        ++correlation_;
        if (launch_us >= 0) {
            add(fmt::format(
                R"({{"ph":"X","cat":"cuda_runtime","name":"cudaLaunchKernel","pid":{},"tid":1,"ts":{},"dur":1,)"
                R"("args":{{"correlation":{}}}}})",
                process_, launch_us, correlation_));
        }
        add(fmt::format(
            R"({{"ph":"X","cat":"kernel","name":"{}","pid":{},"tid":7,"ts":{},"dur":{},"args":{{"device":{},)"
            R"("stream":7,"correlation":{},"grid":[1,1,1],"registers per thread":255}}}})",
            name, gpu_, gpu_us_, us, gpu_, correlation_));
        gpu_us_ += us + 1;
        return *this;
    }
    /// The GPU waits.
    TraceText& gap(double us) {
        gpu_us_ += us;
        return *this;
    }
    TraceText& gpu(const std::string& name, int multiprocessors, double gib) {
        device_ = device(0, name, multiprocessors, gib);
        return *this;
    }
    TraceText& second_gpu(const std::string& name, int multiprocessors, double gib) {
        device_ += "," + device(1, name, multiprocessors, gib);
        return *this;
    }
    static std::string device(int id, const std::string& name, int multiprocessors, double gib) {
        return fmt::format(
            R"({{"id":{},"name":"{}","totalGlobalMem":{:.0f},"computeMajor":9,"computeMinor":0,"numSms":{}}})", id,
            name, gib * 1073741824.0, multiprocessors);
    }
    TraceText& op(const std::string& name, double begin, double end, const std::string& args = "") {
        add(fmt::format(R"({{"ph":"X","cat":"cpu_op","name":"{}","pid":{},"tid":1,"ts":{},"dur":{},"args":{{{}}}}})",
                        name, process_, begin, end - begin, args));
        return *this;
    }
    /// aten::scaled_dot_product_attention with shapes.
    TraceText& sdpa(double begin, double end, bool mask = false, const char* dropout = "0.") {
        const std::string m = mask ? "[1,1,4096,4096]" : "[]";
        return op(
            "aten::scaled_dot_product_attention", begin, end,
            fmt::format(R"("Input Dims":[[2,16,4096,128],[2,16,4096,128],[2,16,4096,128],{},[],[],[],[]],)"
                        R"("Input type":["c10::BFloat16","c10::BFloat16","c10::BFloat16","{}","Scalar","Scalar","",)"
                        R"("Scalar"],"Concrete Inputs":["","","","","{}","{}","","False"])",
                        m, mask ? "bool" : "", dropout, mask ? "False" : "True"));
    }
    /// A step that the profiler marked.
    TraceText& step(int number, double begin, double end) {
        add(fmt::format(
            R"({{"ph":"X","cat":"user_annotation","name":"ProfilerStep#{}","pid":1,"tid":1,"ts":{},"dur":{}}})", number,
            begin, end - begin));
        return *this;
    }
    std::string text() const {
        std::string events;
        for (const std::string& event : events_) events += (events.empty() ? "" : ",\n") + event;
        return R"({"schemaVersion":1,"deviceProperties":[)" + device_ +
               R"(],"cuda_runtime_version":12080,"traceEvents":[)" + events + R"(],"traceName":"t.json"})";
    }

 private:
    void add(std::string event) { events_.push_back(std::move(event)); }

    std::vector<std::string> events_;
    int correlation_ = 0;
    int process_ = 1;
    int gpu_ = 0;
    double gpu_us_ = 1000;
    std::string device_ =
        R"({"id":0,"name":"NVIDIA H200","totalGlobalMem":150000000000,"computeMajor":9,"computeMinor":0,"numSms":132})";
};

}  // namespace tessera::diagnose
