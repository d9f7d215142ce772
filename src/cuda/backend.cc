// SPDX-License-Identifier: Apache-2.0
#include "cuda/backend.hpp"

#include <utility>

#include "cuda/fa2/kernels.hpp"
#include "cuda/fa3/kernels.hpp"

namespace tessera::cuda {

std::vector<Kernel> kernels() {
    std::vector<Kernel> rows = fa3::kernels();
    for (Kernel& kernel : fa2::kernels()) rows.push_back(std::move(kernel));
    return rows;
}

}  // namespace tessera::cuda
