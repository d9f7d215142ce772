// SPDX-License-Identifier: Apache-2.0
#include "cuda/backend.hpp"

#include <utility>

#include "cuda/decode/kernels.hpp"
#include "cuda/fa1/kernels.hpp"
#include "cuda/fa2/kernels.hpp"
#include "cuda/fa3/forward/kernels.hpp"
#include "cuda/standard/kernels.hpp"

namespace tessera::cuda {

std::vector<Kernel> kernels() {
    std::vector<Kernel> all = decode::kernels();
    for (auto* of_schedule : {fa3::kernels, fa2::kernels, fa1::kernels, standard::kernels}) {
        for (Kernel& kernel : of_schedule()) all.push_back(std::move(kernel));
    }
    return all;
}

}  // namespace tessera::cuda
