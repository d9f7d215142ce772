// SPDX-License-Identifier: Apache-2.0
//
// The families of kernels on other GPUs, by tables that others published, and of PyTorch's memory-efficient kernels.
// `fit_model --device` refits them: bench/fit/main.cc.
#include "model/families.hpp"

namespace tessera::model {
namespace {

constexpr const char* kPublished = "bench/results/published/fitted_cards.jsonl";
constexpr const char* kPyTorch = "bench/results/h200/peers_pytorch.jsonl";

/// A family of kernels by tcgen05, FlashAttention-4 or cuDNN. They are of fa3's kind.
constexpr Family on_tcgen05(const char* by, Pass pass, const Constants& constants) {
    return {.by = by,
            .schedule = Schedule::fa3,
            .pass = pass,
            .fitted_on = kPublished,
            .warp_wide = false,
            .order = Order::longest_first,
            .constants = constants,
            .tcgen05 = true};
}

/// The fit of cuDNN's backward. FlashAttention-4's is predicted with the same constants.
constexpr Constants kBackwardOnTcgen05{
    .call_us = 0.0608, .exp_exposed = 0.0129, .adds_exposed = 0.366, .end_cycles = 9840, .launches = 3};

constexpr Family kCardFamilies[] = {
    on_tcgen05("cudnn", Pass::forward,
               {.call_us = 8.53, .exp_exposed = 0.36, .end_cycles = 4800, .mask_exposed = 0.869}),
    on_tcgen05("cudnn", Pass::backward, kBackwardOnTcgen05),
    on_tcgen05("flash-attention", Pass::forward,
               {.call_us = 8.6, .exp_exposed = 0.365, .end_cycles = 7290, .mask_exposed = 0.394}),
    on_tcgen05("flash-attention", Pass::backward, kBackwardOnTcgen05),
    {"cudnn",
     Schedule::fa2,
     Pass::forward,
     kPublished,
     true,
     Order::longest_first,
     {.exp_exposed = 1.44, .shared_exposed = 0.158, .mask_exposed = 8.46}},
    {"cudnn",
     Schedule::fa2,
     Pass::forward,
     kPublished,
     true,
     Order::longest_first,
     {.exp_exposed = 0.744, .shared_exposed = 0.0931, .mask_exposed = 3.17, .single_block_factor = 1.32},
     false,
     0,
     true},
    {"cudnn",
     Schedule::fa2,
     Pass::backward,
     kPublished,
     true,
     Order::longest_first,
     {.call_us = 2.2,
      .exp_exposed = 3.24,
      .adds_exposed = 1.73,
      .end_cycles = 5790,
      .mask_exposed = 18.8,
      .launches = 3}},
    {"memory-efficient",
     Schedule::fa2,
     Pass::forward,
     kPyTorch,
     true,
     Order::grid_order,
     {.call_us = 0.0545,
      .exp_exposed = 3.46,
      .shared_exposed = 1.31,
      .end_cycles = 1460,
      .mask_exposed = 1.39,
      .single_block_factor = 1.45}},
    {"memory-efficient",
     Schedule::fa2,
     Pass::backward,
     kPyTorch,
     true,
     Order::grid_order,
     {.call_us = 0.0838,
      .exp_exposed = 9.1,
      .shared_exposed = 1.24,
      .adds_exposed = 0.962,
      .end_cycles = 183,
      .mask_exposed = 6.75,
      .launches = 2}},
};

}  // namespace

std::span<const Family> card_families() { return kCardFamilies; }

}  // namespace tessera::model
