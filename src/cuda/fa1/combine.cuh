// SPDX-License-Identifier: Apache-2.0
//
// The end of a step, lines 10 to 13 of the algorithm. The warps of a group each have a sum of O over their own keys.
// They combine these through shared memory; each warp then owns some columns of O, which it reads from memory,
// rescales, adds to and writes back.
//
// A thread's registers hold o[16 rows][8 columns][4]. Column tile n of warp w is tile n ^ 2w of O (MatrixAddress::
// swapped), so that in every 64 columns tiles 0 and 1 are the warp's own, and tiles 2t and 2t + 1 those of its partner
// w ^ t. So the registers to send are known at compile time.
#pragma once

#include "cuda/fa1/shared.cuh"
#include "cuda/fa1/state.cuh"
#include "cuda/fa1/work.cuh"
#include "cuda/ptx/mma.cuh"

namespace tessera::cuda::fa1 {

/// O, m and l of a tile of queries in memory, as one thread sees them.
template <Config kConfig>
struct Stored {
    float4* o;   // [units][2][32 lanes]: the thread's own float4s, interleaved with those of its warp
    float2* ml;  // [block_q]
    bool begun;  // a step has written them; otherwise O = 0, m = -inf, l = 0

    __device__ Stored(const Launch& launch, const Work& work, const Shared<kConfig>& shared, int tile, bool begun)
        : begun(begun) {
        constexpr int kVectors = kConfig.block_q() * kConfig.head_dim / 4;
        const std::int64_t index = work.first_tile + tile;
        o = reinterpret_cast<float4*>(launch.o) + index * kVectors + shared.warp * (kVectors / kWarps) + shared.lane;
        ml = launch.ml + index * kConfig.block_q();
    }
    __device__ __forceinline__ float4 read_o(int unit, int tile) const {
        return begun ? o[(unit * 2 + tile) * 32] : float4{0, 0, 0, 0};
    }
    /// Prefetches the warp's part of O to the L2, a line of 8 float4s by each lane.
    __device__ __forceinline__ void prefetch(int lane) const {
        constexpr int kLines = kConfig.units() * 2 * 32 / 8;
        static_assert(kLines <= 32);
        if (!begun) return;
        if (lane < kLines) ptx::prefetch_l2(o - lane + 8 * lane);
        if (lane < kConfig.block_q()) ptx::prefetch_l2(ml + lane);
    }
    __device__ __forceinline__ void write_o(int unit, int tile, const float4& value) const {
        o[(unit * 2 + tile) * 32] = value;
    }
    __device__ __forceinline__ float2 read_ml(int row) const { return begun ? ml[row] : float2{-INFINITY, 0}; }
};

/// O before the step, for the units that are exchanged at once.
template <Config kConfig>
struct Old {
    float4 o[kConfig.units_at_once()][2];

    __device__ __forceinline__ void read(const Stored<kConfig>& stored, int first_unit) {
#pragma unroll
        for (int u = 0; u < kConfig.units_at_once(); ++u) {
#pragma unroll
            for (int t = 0; t < 2; ++t) o[u][t] = stored.read_o(first_unit + u, t);
        }
    }
};

/// The warp's sums of O in its registers, and their exchange with the other warps.
template <Config kConfig>
struct Parts {
    static constexpr int kUnitsOfRows = kConfig.head_dim / 64;
    float o[kConfig.row_tiles][kConfig.head_dim / 8][4] = {};

    __device__ __forceinline__ const float (&at(int unit, int tile) const)[4] {
        return o[unit / kUnitsOfRows][unit % kUnitsOfRows * 8 + tile];
    }

    /// Sends the columns that other warps own, of units [first_unit, first_unit + units_at_once).
    __device__ __forceinline__ void send(const Shared<kConfig>& shared, int first_unit) const {
#pragma unroll
        for (int u = 0; u < kConfig.units_at_once(); ++u) {
#pragma unroll
            for (int distance = 1; distance < kWarps; ++distance) {
#pragma unroll
                for (int t = 0; t < 2; ++t) {
                    const float(&mine)[4] = at(first_unit + u, 2 * distance + t);
                    shared.part(u, partner(shared.warp, distance), distance, t) = {mine[0], mine[1], mine[2], mine[3]};
                }
            }
        }
    }

    /// O = (O exp(m_old - m) l_old + sum over the warps of exp(m_w - m) O_w) / l, for the warp's own columns.
    /// `combinations`: [16 rows][2], with of_part in the order of partners.
    __device__ __forceinline__ void combine(const Shared<kConfig>& shared, int first_unit, const Old<kConfig>& old,
                                            const Combination (&combinations)[kConfig.row_tiles][2],
                                            const Stored<kConfig>& stored) const {
#pragma unroll
        for (int u = 0; u < kConfig.units_at_once(); ++u) {
            const Combination(&rows)[2] = combinations[(first_unit + u) / kUnitsOfRows];
#pragma unroll
            for (int t = 0; t < 2; ++t) {
                const float(&mine)[4] = at(first_unit + u, t);
                const float4 before = old.o[u][t];
                float4 sum{before.x * rows[0].of_old, before.y * rows[0].of_old, before.z * rows[1].of_old,
                           before.w * rows[1].of_old};
                add(sum, {mine[0], mine[1], mine[2], mine[3]}, rows, 0);
#pragma unroll
                for (int distance = 1; distance < kWarps; ++distance)
                    add(sum, shared.part(u, shared.warp, distance, t), rows, distance);
                stored.write_o(first_unit + u, t, sum);
            }
        }
    }

 private:
    __device__ static __forceinline__ void add(float4& sum, const float4& part, const Combination (&rows)[2],
                                               int distance) {
        sum.x = fmaf(part.x, rows[0].of_part[distance], sum.x);
        sum.y = fmaf(part.y, rows[0].of_part[distance], sum.y);
        sum.z = fmaf(part.z, rows[1].of_part[distance], sum.z);
        sum.w = fmaf(part.w, rows[1].of_part[distance], sum.w);
    }
};

}  // namespace tessera::cuda::fa1
