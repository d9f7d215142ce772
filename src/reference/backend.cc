// SPDX-License-Identifier: Apache-2.0
#include "reference/backend.hpp"

namespace tessera::reference {
namespace {

std::optional<std::string> refuse(const Problem&, const std::optional<Tile>& tile, const Device&) {
    if (tile) return "works row by row, not by tiles";
    return std::nullopt;
}

Kernel row(Pass pass) {
    const bool is_forward = pass == Pass::forward;
    return {
        .info = {.name = is_forward ? "reference.forward" : "reference.backward",
                 .backend = Backend::reference,
                 .schedule = Schedule::standard,
                 .pass = pass,
                 .dtypes = {DType::fp64, DType::fp32, DType::bf16, DType::fp16},
                 .summary = "plain loops in fp64, the definition that everything else is tested against",
                 .limits = "none"},
        .refuse = refuse,
        .default_tile =
            [](const Problem&, const Device&) {
                return Tile{1, 1};
            },
        .workspace_bytes = is_forward ? forward_workspace : backward_workspace,
        .target = [](const Device&) { return std::string("scalar"); },
        .forward = is_forward ? forward : nullptr,
        .backward = is_forward ? nullptr : backward,
    };
}

}  // namespace

std::vector<Kernel> kernels() { return {row(Pass::forward), row(Pass::backward)}; }

}  // namespace tessera::reference
