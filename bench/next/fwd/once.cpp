// SPDX-License-Identifier: Apache-2.0
//
// One shape of one variant, twice, to be run under ncu:
// once SO SHAPE DIM BATCH HQ HKV LQ LKV CAUSAL WINDOW
#include <cuda_runtime.h>
#include <dlfcn.h>
#include <cstdio>
#include <cstdlib>
#include <vector>
int main(int c, char** a) {
    auto h = dlopen(a[1], RTLD_NOW); if (!h) { std::puts(dlerror()); return 1; }
    auto f = (int (*)(int, void*, void*, void*, void*, void*, long, int, int, int, int, int, long, int, void*, void*, int))dlsym(h, "fwd");
    int n[10]; for (int i = 0; i < 9; ++i) n[i] = atoi(a[2 + i]);
    long q = (long)n[1 + 1] * n[3] * n[5] * n[1], k = (long)n[2] * n[4] * n[6] * n[1];
    std::vector<unsigned short> host(q > k ? q : k);
    unsigned s = 1; for (auto& x : host) { float v = 0; for (int i = 0; i < 4; ++i) { s = s * 1664525u + 1013904223u; v += (float)(s >> 8) / (1 << 24) - 0.5F; } v *= 1.7F; unsigned b; __builtin_memcpy(&b, &v, 4); x = b >> 16; }
    void *dq, *dk, *dv, *o, *lse, *ctr;
    cudaMalloc(&dq, q * 2); cudaMalloc(&dk, k * 2); cudaMalloc(&dv, k * 2); cudaMalloc(&o, q * 2); cudaMalloc(&lse, q / n[1] * 4); cudaMalloc(&ctr, 64);
    cudaMemcpy(dq, host.data(), q * 2, cudaMemcpyHostToDevice); cudaMemcpy(dk, host.data() , k * 2, cudaMemcpyHostToDevice); cudaMemcpy(dv, host.data(), k * 2, cudaMemcpyHostToDevice);
    for (int i = 0; i < 2; ++i) std::printf("%d\n", f(n[0], dq, dk, dv, o, lse, n[2], n[3], n[4], n[5], n[6], n[7], n[8], 0, ctr, nullptr, 0));
    std::printf("%d\n", (int)cudaDeviceSynchronize());
}
