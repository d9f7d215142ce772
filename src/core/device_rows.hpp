// SPDX-License-Identifier: Apache-2.0
//
// The operations of context_parallel() on memory of a device that are not attention: rows that are copied and added,
// and the order of two streams.
#pragma once

#include <cstddef>
#include <cstdint>

#include "tessera/dtype.hpp"

namespace tessera {

/// Rows of a matrix: `pitch` bytes from one to the next.
struct RowsAt {
    void* data = nullptr;
    std::size_t pitch = 0;
};

/// Sums of rows of `parts`, [.., widths[0] + widths[1]]: row r of the result is the sum, in fp32 and in this order, of
/// the rows sources[first[r]], .. up to sources[first[r + 1]]. fp64 is added in fp64. Its two halves go to two tensors.
struct RowSums {
    DType dtype = DType::fp32;
    const void* parts = nullptr;
    const std::int64_t* first = nullptr;  ///< [rows + 1], memory of the device
    const std::int64_t* sources = nullptr;
    std::int64_t rows = 0;
    std::int64_t widths[2] = {};  ///< elements of both halves
    RowsAt to[2];
};

/// Copies of the rows of two tensors into rows that hold both side by side. Row from[i] of the first source and row
/// from[i] of the second become the two halves of target row to[i]. Target rows below `split` lie in target[0], the
/// others in target[1].
struct RowCopies {
    const std::int64_t* from = nullptr;  ///< [count], memory of the device
    const std::int64_t* to = nullptr;
    std::int64_t count = 0;
    std::int64_t split = 0;
    std::int64_t bytes[2] = {};  ///< of a row of both tensors
    RowsAt source[2];
    RowsAt target[2];
};

/// Memory of one device that lives as long as this object, and work on it. Each function that takes a stream queues
/// its work there (a cudaStream_t); on the CPU, whose streams are null, it has ended on return.
class DeviceRows {
 public:
    virtual ~DeviceRows() = default;

    /// Memory of the device. Throws Error(out_of_memory).
    virtual void* allocate(std::size_t bytes) = 0;
    /// Copies between host memory and the device, and waits for the copy.
    virtual void write(void* to, const void* from, std::size_t bytes) = 0;
    virtual void read(void* to, const void* from, std::size_t bytes) = 0;

    virtual void copy(const RowsAt& to, const RowsAt& from, std::size_t width, std::int64_t rows, void* stream) = 0;
    virtual void add(const RowSums& sums, void* stream) = 0;

    /// A stream of this object's own, for exchanges beside the caller's stream.
    virtual void* side_stream() = 0;
    /// A stream of this object's own, for kernels beside those on the caller's stream. Null on the CPU.
    virtual void* second_stream() = 0;
    /// Marks what is queued on a stream so far, under one of kMarks numbers.
    virtual void mark(int number, void* stream) = 0;
    /// Later work on `stream` begins when the work of the mark has ended.
    virtual void wait(int number, void* stream) = 0;

    static constexpr int kMarks = 14;
};

}  // namespace tessera
