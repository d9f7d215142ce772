// SPDX-License-Identifier: Apache-2.0
#include "cuda/backend.hpp"

#include "cuda/fa3/kernels.hpp"

namespace tessera::cuda {

std::vector<Kernel> kernels() { return fa3::kernels(); }

}  // namespace tessera::cuda
