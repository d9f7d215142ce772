// SPDX-License-Identifier: Apache-2.0
//
// The compiled shape that runs a Problem.
#pragma once

#include <algorithm>
#include <optional>

#include "cuda/fa2/host/config.h"
#include "cuda/gradient/host/dispatch.hpp"
#include "cuda/host/scores.hpp"
#include "tessera/kernel.hpp"

namespace tessera::cuda::fa2 {

/// A bound on the bytes of shared memory that the forward declares beside its tiles.
inline constexpr int kDeclaredShared = 1024;

/// The index in Shapes, in 16 bits; every legal Problem has a shape.
inline std::size_t shape_of(const Problem& p) {
    const std::int64_t dim = std::max(p.head_dim, p.head_dim_v);
    const bool general = changes_scores(p) || !scale_can_wait(p);
    return *Shapes::first([&](const Config& c) { return c.general == general && dim <= c.head_dim; });
}
/// That index on a device whose thread blocks can have so much shared memory. Without room for the plain shape the
/// general one of that head_dim runs, which has the same tile and may have less.
inline std::size_t shape_of(const Problem& p, std::int64_t shared_bytes) {
    const std::size_t shape = shape_of(p);
    const Config c = Shapes::kConfigs[shape];
    if (c.general || c.shared_bytes() + kDeclaredShared <= shared_bytes) return shape;
    return *Shapes::first([&](const Config& other) { return other.general && other.head_dim == c.head_dim; });
}

/// The index in ShapesFp32.
inline std::size_t shape_of_fp32(const Problem& p) {
    const std::int64_t dim = std::max(p.head_dim, p.head_dim_v);
    return *ShapesFp32::first([&](const ConfigFp32& c) { return dim <= c.head_dim; });
}

inline Tile tile_of(const Problem& p) {
    if (p.dtype == DType::fp32) {
        const ConfigFp32 c = ShapesFp32::kConfigs[shape_of_fp32(p)];
        return {c.block_q(), c.block_kv};
    }
    const Config c = Shapes::kConfigs[shape_of(p)];
    return {c.block_q(), c.block_kv};
}

/// Shared memory of a CTA of the forward, on such a device.
inline int shared_bytes_of(const Problem& p, std::int64_t shared_bytes) {
    if (p.dtype == DType::fp32) return ShapesFp32::kConfigs[shape_of_fp32(p)].shared_bytes() + kDeclaredShared;
    return Shapes::kConfigs[shape_of(p, shared_bytes)].shared_bytes() + kDeclaredShared;
}

/// The shape of the backward, in 16 bits.
inline gradient::Config backward_config_of(const Problem& p) {
    return BackwardShapes::kConfigs[gradient::shape_index<BackwardShapes>(p)];
}

/// True if the backward in fp32 runs by parts, else by multiply-adds.
inline bool backward_by_parts(const Problem& p) { return gradient::fits<BackwardShapesParts>(p); }

/// The index in BackwardShapesParts of a Problem that runs by parts, in blocks of so many keys; none if it has no such
/// shape.
inline std::optional<std::size_t> parts_shape_of(const Problem& p, std::int64_t block_kv) {
    const std::int64_t dim = gradient::padded_dim<BackwardShapesParts>(p);
    return BackwardShapesParts::first(
        [&](const gradient::PartsConfig& c) { return c.head_dim == dim && c.block_kv == block_kv; });
}

/// The properties of a shape of the backward in fp32 that the host needs.
struct BackwardExtentsFp32 {
    int head_dim;
    int block_kv;
    int shared_bytes;
};
/// Those of the shape with a tile; none if there is none.
inline std::optional<BackwardExtentsFp32> backward_extents_fp32(const Problem& p, const Tile& tile) {
    const auto extents = [](const auto& c) { return BackwardExtentsFp32{c.head_dim, c.block_kv, c.shared_bytes()}; };
    if (tile.block_q != gradient::kBlockQ) return std::nullopt;
    if (backward_by_parts(p)) {
        const auto shape = parts_shape_of(p, tile.block_kv);
        return shape ? std::optional(extents(BackwardShapesParts::kConfigs[*shape])) : std::nullopt;
    }
    const gradient::ConfigFp32 c = BackwardShapesFp32::kConfigs[gradient::shape_index_by_dim<BackwardShapesFp32>(p)];
    return c.block_kv == tile.block_kv ? std::optional(extents(c)) : std::nullopt;
}

/// The tile of the backward on a device whose thread blocks can have so much shared memory: that of the first shape
/// which has room, or else of the last one.
inline Tile backward_tile_of(const Problem& p, std::int64_t shared_bytes) {
    if (p.dtype != DType::fp32) {
        const gradient::Config c = backward_config_of(p);
        return {c.query_tiles * gradient::kBlockQ, c.block_kv()};
    }
    if (!backward_by_parts(p)) {
        return {gradient::kBlockQ,
                BackwardShapesFp32::kConfigs[gradient::shape_index_by_dim<BackwardShapesFp32>(p)].block_kv};
    }
    int block_kv = 0;
    for (const gradient::PartsConfig& c : BackwardShapesParts::kConfigs) {
        if (c.head_dim != gradient::padded_dim<BackwardShapesParts>(p)) continue;
        block_kv = c.block_kv;
        if (c.shared_bytes() + gradient::kDeclaredShared <= shared_bytes) break;
    }
    return {gradient::kBlockQ, block_kv};
}

}  // namespace tessera::cuda::fa2
