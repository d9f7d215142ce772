// SPDX-License-Identifier: Apache-2.0
#include "cuda/rows/device_rows.hpp"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <fmt/format.h>

#include <vector>

#include "cuda/device.hpp"
#include "cuda/rows/launch.hpp"
#include "tessera/error.hpp"

namespace tessera::cuda {
namespace {

cudaStream_t as_stream(void* stream) { return static_cast<cudaStream_t>(stream); }

class CudaRows : public DeviceRows {
 public:
    explicit CudaRows(const Device& device) : device_(device) {
        const CurrentDevice current(device_);
        int least = 0, greatest = 0;
        check(cudaDeviceGetStreamPriorityRange(&least, &greatest), "a stream for exchanges");
        check(cudaStreamCreateWithPriority(&side_, cudaStreamNonBlocking, greatest), "a stream for exchanges");
        check(cudaStreamCreateWithFlags(&second_, cudaStreamNonBlocking), "a second stream");
        for (cudaEvent_t& event : marks_)
            check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "an event for exchanges");
    }

    ~CudaRows() override {
        int before = 0;
        if (cudaGetDevice(&before) != cudaSuccess || cudaSetDevice(device_.index) != cudaSuccess) return;
        // The runtime frees objects that are still in use when their work has ended. Errors cannot be reported here.
        for (cudaEvent_t event : marks_) static_cast<void>(cudaEventDestroy(event));
        for (cudaStream_t stream : {side_, second_}) static_cast<void>(cudaStreamDestroy(stream));
        for (void* memory : memory_) static_cast<void>(cudaFree(memory));
        static_cast<void>(cudaSetDevice(before));
    }
    CudaRows(const CudaRows&) = delete;
    CudaRows& operator=(const CudaRows&) = delete;

    void* allocate(std::size_t bytes) override {
        const CurrentDevice current(device_);
        void* memory = nullptr;
        if (cudaMalloc(&memory, bytes) != cudaSuccess) {
            static_cast<void>(cudaGetLastError());  // clears the error, which the caller's next call must not report
            throw Error(ErrorCode::out_of_memory, "", fmt::format("could not allocate {} bytes on the device", bytes));
        }
        return memory_.emplace_back(memory);
    }

    void write(void* to, const void* from, std::size_t bytes) override { move(to, from, bytes, true); }
    void read(void* to, const void* from, std::size_t bytes) override { move(to, from, bytes, false); }

    void copy(const RowsAt& to, const RowsAt& from, std::size_t width, std::int64_t count, void* stream) override {
        const CurrentDevice current(device_);
        check(cudaMemcpy2DAsync(to.data, to.pitch, from.data, from.pitch, width, static_cast<std::size_t>(count),
                                cudaMemcpyDeviceToDevice, as_stream(stream)),
              "a copy of rows");
    }

    void add(const RowSums& sums, void* stream) override { add_rows(sums, device_, stream); }

    void* side_stream() override { return side_; }
    void* second_stream() override { return second_; }

    void mark(int number, void* stream) override {
        const CurrentDevice current(device_);
        check(cudaEventRecord(marks_[number], as_stream(stream)), "an event of an exchange");
    }
    void wait(int number, void* stream) override {
        const CurrentDevice current(device_);
        check(cudaStreamWaitEvent(as_stream(stream), marks_[number], 0), "waiting for an exchange");
    }

 private:
    /// Runs on the side stream, so that it follows an exchange there and waits for no other stream.
    void move(void* to, const void* from, std::size_t bytes, bool to_device) {
        const CurrentDevice current(device_);
        const auto kind = to_device ? cudaMemcpyHostToDevice : cudaMemcpyDeviceToHost;
        check(cudaMemcpyAsync(to, from, bytes, kind, side_), "a copy for an exchange");
        check(cudaStreamSynchronize(side_), "a copy for an exchange");
    }

    Device device_;
    cudaStream_t side_ = nullptr;
    cudaStream_t second_ = nullptr;
    cudaEvent_t marks_[kMarks] = {};
    std::vector<void*> memory_;
};

}  // namespace

void add_rows(const RowSums& sums, const Device& device, void* stream) {
    const CurrentDevice current(device);
    if (sums.dtype == DType::fp32) check(rows::start_add<float>(sums, as_stream(stream)), "a sum of rows");
    else if (sums.dtype == DType::bf16) check(rows::start_add<__nv_bfloat16>(sums, as_stream(stream)), "a sum of rows");
    else if (sums.dtype == DType::fp16) check(rows::start_add<__half>(sums, as_stream(stream)), "a sum of rows");
    else
        throw Error(ErrorCode::unsupported, "k",
                    fmt::format("takes fp32, bf16 and fp16 on CUDA, got {}", name_of(sums.dtype)));
}

void copy_rows(const RowCopies& copies, const Device& device, void* stream) {
    const CurrentDevice current(device);
    check(rows::start_copy(copies, as_stream(stream)), "copies of rows");
}

std::unique_ptr<DeviceRows> device_rows(const Device& device) { return std::make_unique<CudaRows>(device); }

}  // namespace tessera::cuda
