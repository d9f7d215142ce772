// SPDX-License-Identifier: Apache-2.0
//
// Starts the forward kernels of fa3 without the library: one shared object for each variant (build.sh), called by bench.py.
#include <cudaTypedefs.h>
#include <algorithm>
#include <cstdio>
#ifdef STAMPS
__device__ unsigned* g_stamps = nullptr;
#define STAMP_DECL unsigned stamp_n = 0;
struct Stamper {
    unsigned n = 0, base = 0;
    __device__ __forceinline__ void operator()(unsigned role, unsigned id) {
        if (g_stamps == nullptr) return;
        unsigned c; asm volatile("mov.u32 %0, %%clock;" : "=r"(c) :: "memory");
        if (n < 512) g_stamps[(blockIdx.x * 4 + role) * 512 + n] = (c & 0x07FFFFFF) | id << 27;
        ++n;
    }
};
#define STAMP(role, id) stamp(role, id)
#else
#define STAMP(role, id)
#endif
#include "cuda/fa3/forward.cuh"
#include "cuda/fa3/instances/reset.cu"
using namespace tessera;
using namespace tessera::cuda;
using namespace tessera::cuda::fa3;
#if defined(ONLY64)
#define SHAPE_LIST X(0, HeadDim64Short)
#elif defined(ONLY128)
#define SHAPE_LIST X(2, HeadDim128)
#elif defined(ONLY256)
#define SHAPE_LIST X(3, HeadDim256)
#elif defined(NO192)
#define SHAPE_LIST X(0, HeadDim64Short) X(2, HeadDim128) X(3, HeadDim256)
#else
#define SHAPE_LIST X(0, HeadDim64Short) X(1, HeadDim64) X(2, HeadDim128) X(3, HeadDim256)
#endif

static CUtensorMap encode(void* data, const long* sizes, const long* strides, const int* box) {
    static PFN_cuTensorMapEncodeTiled_v12000 f = [] {
        void* a = nullptr; cudaDriverEntryPointQueryResult r{};
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &a, 12000, cudaEnableDefault, &r);
        return (PFN_cuTensorMapEncodeTiled_v12000)a;
    }();
    cuuint64_t s[4]; cuuint64_t st[3]; cuuint32_t b[4], steps[4] = {1, 1, 1, 1};
    for (int i = 0; i < 4; ++i) { s[i] = sizes[i]; b[i] = box[i]; }
    for (int i = 0; i < 3; ++i) st[i] = strides[i] * 2;
    CUtensorMap m{};
    CUresult e = f(&m, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, data, s, st, b, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
      CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (e != CUDA_SUCCESS) std::fprintf(stderr, "map failed %d\n", (int)e);
    return m;
}

template <class Shape>
static int call(char* q, char* k, char* v, char* o, float* lse, long batch, int hq, int hkv, int lq, int lkv, int causal,
                long window, int shift, unsigned* counter, cudaStream_t stream, int together) {
    constexpr Config c = Shape::kConfig;
    const long D = c.head_dim;
    Launch launch{};
    ForwardParams& p = launch.params;
    const auto rows = [&](char* d, long len, long h) { return Rows{d, len * h * D, h * D, D, 1}; };
    p.q = rows(q, lq, hq); p.k = rows(k, lkv, hkv); p.v = rows(v, lkv, hkv); p.o = rows(o, lq, hq);
    p.lse = Rows{(char*)lse, (long)hq * lq, 1, lq, 1};
    p.batch = batch; p.len_q = lq; p.len_kv = lkv; p.heads_q = hq; p.heads_kv = hkv; p.group = hq / hkv;
    p.head_dim = p.head_dim_v = D; p.scale = 1.0F / std::sqrt((float)D);
    if (causal) p.mask.causal = Causal::bottom_right;
    if (window >= 0) p.mask.window_left = window;
    launch.scale_log2 = p.scale * kLog2E; launch.unscale = 1 / launch.scale_log2;
    launch.stack.shift = shift;
    const int st = 1 << shift;
    { long s[4] = {D, hq, lq, batch}, t[3] = {D, hq * D, lq * hq * D}; int b[4] = {64, st, 64 / st, 1}; launch.q = encode(q, s, t, b);
      b[2] = 16 / st;
#ifdef O_BOX
      b[2] = O_BOX / st;
#endif
      launch.o = encode(o, s, t, b); }
    { long s[4] = {D, lkv, hkv, batch}, t[3] = {hkv * D, D, lkv * hkv * D}; int b[4] = {64, c.block_kv, 1, 1};
      launch.k = encode(k, s, t, b); launch.v = encode(v, s, t, b); }
    launch.store_by_copy_engine = true;
    const int bq = c.block_q() / st;
    const int q_blocks = (lq + bq - 1) / bq;
    if (together <= 0) together = std::max(1, (int)std::min<long>(batch * hq, (32l << 20) / (lkv * D * 2 * 2) * (hq / hkv)));
    launch.order = TileOrder(batch * hq / st, q_blocks, std::max(together / st, 1));
    launch.stacks = Divider(hq / st); launch.group = Divider(p.group);
    const Band band = p.mask.bind(lq, lkv);
    launch.low = band.low; launch.high = band.high;
#ifndef CTAS
#define CTAS 1
#endif
    const int tiles = launch.order.tiles();
    if (!p.mask.trivial() && tiles > 132 * CTAS) {
        launch.next_tile = counter;
        if (auto e = start_reset(counter, stream)) return e;
    }
    return start_forward<__nv_bfloat16, Shape>(launch, std::min(132 * CTAS, tiles), stream);
}

extern "C" int fwd(int shape, void* q, void* k, void* v, void* o, void* lse, long batch, int hq, int hkv, int lq, int lkv,
                   int causal, long window, int shift, void* counter, void* stream, int together) {
    switch (shape) {
#define X(i, S) case i: return call<S>((char*)q, (char*)k, (char*)v, (char*)o, (float*)lse, batch, hq, hkv, lq, lkv, causal, window, shift, (unsigned*)counter, (cudaStream_t)stream, together);
        SHAPE_LIST
#undef X
    }
    return -1;
}
extern "C" int set_stamps(void* p) {
#ifdef STAMPS
    return cudaMemcpyToSymbol(g_stamps, &p, sizeof p);
#else
    return -1;
#endif
}
__global__ void floor_kernel(const uint4* q, const uint4* k, const uint4* v, uint4* o, long nq, long nkv) {
    const long step = (long)gridDim.x * blockDim.x;
    for (long i = (long)blockIdx.x * blockDim.x + threadIdx.x; i < nq; i += step) {
        uint4 a = q[i], b = k[i % nkv], c = v[i % nkv];
        o[i] = uint4{a.x ^ b.x ^ c.x, a.y ^ b.y ^ c.y, a.z ^ b.z ^ c.z, a.w ^ b.w ^ c.w};
    }
}
extern "C" int floor_of(void* q, void* k, void* v, void* o, long bytes_q, long bytes_kv, void* stream) {
    floor_kernel<<<132 * 8, 256, 0, (cudaStream_t)stream>>>((uint4*)q, (uint4*)k, (uint4*)v, (uint4*)o, bytes_q / 16, bytes_kv / 16);
    return cudaGetLastError();
}
