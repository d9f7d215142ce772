// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cstddef>

#include "tessera/tensor.hpp"

namespace tessera::check {

/// Address space that gets memory only when it is touched, for tensors whose offsets pass 2^32 elements. Elements that
/// were never written read as 0, so a wrapped offset shows as a wrong result.
class SparseMemory {
 public:
    explicit SparseMemory(std::size_t bytes) : bytes_(bytes) {
        data_ = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (data_ == MAP_FAILED) data_ = nullptr;
    }
    ~SparseMemory() {
        if (data_ != nullptr) munmap(data_, bytes_);
    }
    SparseMemory(const SparseMemory&) = delete;
    SparseMemory& operator=(const SparseMemory&) = delete;

    /// Null when the system does not give so much address space.
    void* data() const { return data_; }

 private:
    void* data_ = nullptr;
    std::size_t bytes_ = 0;
};

}  // namespace tessera::check
