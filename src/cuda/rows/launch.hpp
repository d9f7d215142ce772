// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include "core/device_rows.hpp"

namespace tessera::cuda::rows {

/// Adds all rows of `sums` in one launch. T: float, __nv_bfloat16 or __half.
template <class T>
cudaError_t start_add(const RowSums& sums, cudaStream_t stream);

/// Makes all copies in one launch.
cudaError_t start_copy(const RowCopies& copies, cudaStream_t stream);

}  // namespace tessera::cuda::rows
