// SPDX-License-Identifier: Apache-2.0
#include "cuda/shared/tensor_map.hpp"

#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <array>
#include <bit>

#include "cuda/device.hpp"
#include "tessera/error.hpp"

namespace tessera::cuda {
namespace {

constexpr std::int64_t kElement = 2;                        // bytes
constexpr std::int64_t kAlignment = 16;                     // bytes, of the address and of every stride
constexpr std::int64_t kMaxStride = std::int64_t{1} << 40;  // bytes
constexpr std::int64_t kMaxSize = std::int64_t{1} << 31;    // coordinates are signed 32-bit numbers
constexpr int kBoxColumns = 64;                             // 128 bytes, the widest swizzle

/// The driver's function, without linking the driver's library.
PFN_cuTensorMapEncodeTiled_v12000 encode_function() {
    static const auto function = [] {
        void* address = nullptr;
        cudaDriverEntryPointQueryResult found{};
        check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &address, 12000, cudaEnableDefault, &found),
              "cudaGetDriverEntryPointByVersion");
        if (found != cudaDriverEntryPointSuccess) {
            throw Error(ErrorCode::device_unavailable, "", "the CUDA driver has no cuTensorMapEncodeTiled");
        }
        return std::bit_cast<PFN_cuTensorMapEncodeTiled_v12000>(address);
    }();
    return function;
}

/// Stride in bytes. A dimension of size 1 is never stepped, so any legal number will do.
std::int64_t stride_bytes(std::int64_t stride, std::int64_t size) { return size == 1 ? kAlignment : stride * kElement; }

}  // namespace

std::optional<std::string> refuse_tma(const Rows& rows, const RowsShape& shape) {
    if (reinterpret_cast<std::uintptr_t>(rows.data) % kAlignment != 0) {
        return fmt::format("expected an address aligned to {} bytes, got {}", kAlignment,
                           static_cast<const void*>(rows.data));
    }
    if (shape.dim > 1 && rows.column != 1) return fmt::format("expected a last stride of 1, got {}", rows.column);
    struct Dimension {
        const char* name;
        std::int64_t stride, size;
    };
    for (const auto& [name, stride, size] :
         {Dimension{"len", rows.row, shape.len}, Dimension{"heads", rows.head, shape.heads},
          Dimension{"batch", rows.batch, shape.batch}}) {
        if (size >= kMaxSize) return fmt::format("expected under 2^31 rows, got {}", size);
        const std::int64_t bytes = stride_bytes(stride, size);
        if (bytes <= 0 || bytes % kAlignment != 0 || bytes >= kMaxStride) {
            return fmt::format("expected positive strides in multiples of 8 elements, got {} for {}", stride, name);
        }
    }
    return std::nullopt;
}

namespace {

/// A dimension of a tensor map after the columns.
struct Rank {
    std::int64_t size, stride;
    int box;
};

CUtensorMap encode(const Rows& rows, std::int64_t columns, DType dtype, const std::array<Rank, 3>& ranks) {
    std::array<cuuint64_t, 4> sizes{static_cast<cuuint64_t>(columns)};
    std::array<cuuint64_t, 3> strides{};
    std::array<cuuint32_t, 4> box{kBoxColumns};
    for (std::size_t i = 0; i < ranks.size(); ++i) {
        sizes[i + 1] = static_cast<cuuint64_t>(ranks[i].size);
        strides[i] = static_cast<cuuint64_t>(stride_bytes(ranks[i].stride, ranks[i].size));
        box[i + 1] = static_cast<cuuint32_t>(ranks[i].box);
    }
    const std::array<cuuint32_t, 4> steps{1, 1, 1, 1};
    CUtensorMap map{};
    const CUresult status = encode_function()(
        &map, dtype == DType::bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 4, rows.data,
        sizes.data(), strides.data(), box.data(), steps.data(), CU_TENSOR_MAP_INTERLEAVE_NONE,
        CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (status != CUDA_SUCCESS) {
        throw Error(ErrorCode::internal, "",
                    fmt::format("cuTensorMapEncodeTiled failed with status {}", static_cast<int>(status)));
    }
    return map;
}

}  // namespace

CUtensorMap tensor_map(const Rows& rows, const RowsShape& shape, DType dtype, int box_rows) {
    return encode(rows, shape.dim, dtype,
                  {{{shape.len, rows.row, box_rows}, {shape.heads, rows.head, 1}, {shape.batch, rows.batch, 1}}});
}

CUtensorMap tensor_map_of_heads(const Rows& rows, const RowsShape& shape, DType dtype, int box_heads, int box_rows) {
    return encode(
        rows, shape.dim, dtype,
        {{{shape.heads, rows.head, box_heads}, {shape.len, rows.row, box_rows}, {shape.batch, rows.batch, 1}}});
}

}  // namespace tessera::cuda
