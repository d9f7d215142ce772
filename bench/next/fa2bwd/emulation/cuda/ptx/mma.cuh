// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "cuda/ptx/address.cuh"
#include "cuda/ptx/math.cuh"
namespace tessera::cuda::ptx {
template <class T>
void mma(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1) {
    std::uint64_t in[5], out[2];
    std::memcpy(in, d, 16);
    std::memcpy(in + 2, a, 16);
    in[4] = b0 | std::uint64_t(b1) << 32;
    emu::collective(in, 5, out, 2, [](emu::Warp& w) {
        static float A[16][16], B[16][8], D[16][8];
        for (int l = 0; l < 32; ++l) {
            std::uint32_t a[4];
            float d[4];
            std::memcpy(d, w.in[l], 16);
            std::memcpy(a, w.in[l] + 2, 16);
            const int r = l / 4, c = l % 4 * 2;
            for (int e = 0; e < 2; ++e) {
                A[r][c + e] = unpack<T>(a[0], e);
                A[r + 8][c + e] = unpack<T>(a[1], e);
                A[r][c + 8 + e] = unpack<T>(a[2], e);
                A[r + 8][c + 8 + e] = unpack<T>(a[3], e);
                B[c + e][r] = unpack<T>(std::uint32_t(w.in[l][4]), e);
                B[c + 8 + e][r] = unpack<T>(std::uint32_t(w.in[l][4] >> 32), e);
                D[r][c + e] = d[e];
                D[r + 8][c + e] = d[2 + e];
            }
        }
        for (int i = 0; i < 16; ++i)
            for (int j = 0; j < 8; ++j) {
                float s = 0;
                for (int k = 0; k < 16; ++k) s += A[i][k] * B[k][j];
                D[i][j] += s;
            }
        for (int l = 0; l < 32; ++l) {
            const int r = l / 4, c = l % 4 * 2;
            float d[4] = {D[r][c], D[r][c + 1], D[r + 8][c], D[r + 8][c + 1]};
            std::memcpy(w.out[l], d, 16);
        }
    });
    std::memcpy(d, out, 16);
}
template <bool kTrans>
void ldmatrix(std::uint32_t (&m)[4], std::uint32_t address) {
    std::uint64_t in = address, out[2];
    emu::collective(&in, 1, out, 2, [](emu::Warp& w) {
        for (int l = 0; l < 32; ++l) {
            std::uint32_t x[4];
            for (int i = 0; i < 4; ++i) {
                std::uint16_t e[2];
                for (int k = 0; k < 2; ++k) {
                    const int row = kTrans ? l % 4 * 2 + k : l / 4, col = kTrans ? l / 4 : l % 4 * 2 + k;
                    std::memcpy(&e[k], emu::shared_base + w.in[8 * i + row][0] + col * 2, 2);
                }
                x[i] = e[0] | std::uint32_t(e[1]) << 16;
            }
            std::memcpy(w.out[l], x, 16);
        }
    });
    std::memcpy(m, out, 16);
}
inline void ldmatrix_x4(std::uint32_t (&m)[4], std::uint32_t a) { ldmatrix<false>(m, a); }
inline void ldmatrix_x4_trans(std::uint32_t (&m)[4], std::uint32_t a) { ldmatrix<true>(m, a); }
inline void cp_async_16(std::uint32_t to, const void* from, bool valid) {
    // The destination is no longer what it was from now on.
    std::memset(emu::shared_base + to, 0xFF, 16);
    emu::current->groups.back().push_back({emu::shared_base + to, static_cast<const char*>(from), valid});
}
inline void cp_async_commit() { emu::current->groups.emplace_back(); }
template <int n>
void cp_async_wait() {
    emu::complete(n);
}
}  // namespace tessera::cuda::ptx
