// SPDX-License-Identifier: Apache-2.0
// CUDA threads as fibers: what the kernels' headers need of a GPU, one thread block at a time.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <ucontext.h>
#include <vector_functions.h>
#include <vector_types.h>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <random>
#include <vector>
#undef __device__
#undef __host__
#undef __forceinline__
#undef __shared__
#undef __global__
#undef __align__
#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __shared__ static
#define __align__(x) alignas(x)
namespace emu {
struct Copy {
    char* to;
    const char* from;
    bool valid;
};
struct Fiber {
    ucontext_t context;
    std::vector<char> stack;
    int tid;
    bool done = false;
    int blocked = -1;
    std::deque<std::vector<Copy>> groups{1};
};
struct Warp {
    int arrived = 0;
    long generation = 0;
    std::uint64_t in[32][8];
    std::uint64_t out[32][4];
};
struct Barrier {
    int arrived = 0;
    long generation = 0;
    int value = 0;
    int result = 0;
};
inline std::vector<Fiber> fibers;
inline std::vector<Warp> warps;
inline Barrier barriers[16];
inline ucontext_t main_context;
inline Fiber* current;
inline std::function<void()> body;
inline std::mt19937 random_;
inline int policy = 0;
inline long collectives = 0;
inline char* shared_base;
inline void yield() { swapcontext(&current->context, &main_context); }
template <class Op>
void collective(const std::uint64_t* in, int count, std::uint64_t* out, int outs, const Op& op) {
    Warp& w = warps[current->tid / 32];
    const int lane = current->tid % 32;
    std::memcpy(w.in[lane], in, count * 8);
    const long g = w.generation;
    if (++w.arrived == 32) {
        op(w);
        w.arrived = 0;
        ++w.generation;
        ++collectives;
    } else
        while (w.generation == g) yield();
    std::memcpy(out, w.out[lane], outs * 8);
}
inline int barrier(int id, int threads, int value, bool waits) {
    Barrier& b = barriers[id];
    const long g = b.generation;
    b.value |= value;
    if (++b.arrived == threads) {
        b.result = b.value;
        b.value = 0;
        b.arrived = 0;
        ++b.generation;
        return b.result;
    }
    if (!waits) return 0;
    while (b.generation == g) {
        current->blocked = id;
        yield();
    }
    current->blocked = -1;
    return b.result;
}
inline void entry() {
    body();
    current->done = true;
    yield();
}
inline void run(int threads, std::function<void()> f) {
    body = std::move(f);
    fibers.clear();
    fibers.resize(threads);
    warps.assign(threads / 32, {});
    for (auto& b : barriers) b = {};
    for (int i = 0; i < threads; ++i) {
        Fiber& x = fibers[i];
        x.tid = i;
        x.stack.resize(1 << 18);
        getcontext(&x.context);
        x.context.uc_stack.ss_sp = x.stack.data();
        x.context.uc_stack.ss_size = x.stack.size();
        x.context.uc_link = &main_context;
        makecontext(&x.context, entry, 0);
    }
    const int n = threads / 32;
    long idle = 0;
    int at = 0;
    for (;;) {
        bool all = true, progress = false;
        // policy 0: warps in turn; 1: at random; 2: the last one as far as it gets; 3: the first one
        int w = policy == 0   ? at++ % n
                : policy == 1 ? int(random_() % n)
                : policy == 2 ? n - 1 - int(idle % n)
                              : int(idle % n);
        for (int i = w * 32; i < w * 32 + 32; ++i) {
            Fiber& x = fibers[i];
            if (x.done) continue;
            all = false;
            if (x.blocked >= 0) { /* may be free now */
            }
            const long g0 = warps[w].generation;
            const int a0 = warps[w].arrived;
            const int b0 = x.blocked;
            const bool d0 = x.done;
            current = &x;
            swapcontext(&main_context, &x.context);
            if (warps[w].generation != g0 || warps[w].arrived != a0 || x.blocked != b0 || x.done != d0) progress = true;
        }
        idle = progress ? 0 : idle + 1;
        if (idle > 4000) {
            std::printf("deadlock\n");
            std::exit(1);
        }
        if (all) {
            bool every = true;
            for (auto& x : fibers) every &= x.done;
            if (every) return;
            if (!progress && policy >= 2) {
            }
        }
    }
}
struct Index {
    operator unsigned() const { return unsigned(current->tid); }
};
struct Dim {
    Index x;
};
inline void complete(std::size_t pending) {
    auto& g = current->groups;
    while (g.size() - 1 > pending) {
        for (const Copy& c : g.front()) {
            if (c.valid) std::memcpy(c.to, c.from, 16);
            else std::memset(c.to, 0, 16);
        }
        g.pop_front();
    }
}
}  // namespace emu
inline emu::Dim threadIdx;
struct BlockIdx {
    unsigned x = 0;
};
inline BlockIdx blockIdx;
template <class A, class B>
constexpr auto min(A a, B b) {
    using C = std::common_type_t<A, B>;
    return C(b) < C(a) ? C(b) : C(a);
}
template <class A, class B>
constexpr auto max(A a, B b) {
    using C = std::common_type_t<A, B>;
    return C(a) < C(b) ? C(b) : C(a);
}
inline void __syncthreads() { emu::barrier(0, 256, 0, true); }
inline int __syncthreads_or(int x) { return emu::barrier(0, 256, x != 0, true); }
inline void __syncwarp() {
    std::uint64_t in = 0, out;
    emu::collective(&in, 1, &out, 0, [](emu::Warp&) {});
}
inline int __any_sync(unsigned, int x) {
    std::uint64_t in = x != 0, out;
    emu::collective(&in, 1, &out, 1, [](emu::Warp& w) {
        std::uint64_t any = 0;
        for (auto& i : w.in) any |= i[0];
        for (auto& o : w.out) o[0] = any;
    });
    return int(out);
}
template <class T>
T __shfl_xor_sync(unsigned, T x, int by) {
    std::uint64_t in[2] = {0, std::uint64_t(by)}, out = 0;
    std::memcpy(in, &x, sizeof(T));
    emu::collective(in, 2, &out, 1, [](emu::Warp& w) {
        for (int l = 0; l < 32; ++l) w.out[l][0] = w.in[l ^ int(w.in[l][1])][0];
    });
    T y;
    std::memcpy(&y, &out, sizeof(T));
    return y;
}
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline int __float_as_int(float x) {
    int y;
    std::memcpy(&y, &x, 4);
    return y;
}
inline float __int_as_float(int x) {
    float y;
    std::memcpy(&y, &x, 4);
    return y;
}
template <class T>
T __ldcg(const T* p) {
    return *p;
}
template <class T>
void __stcg(T* p, T x) {
    *p = x;
}
inline int atomicAdd(int* p, int x) {
    int y = *p;
    *p += x;
    return y;
}
inline int atomicMax(int* p, int x) {
    int y = *p;
    *p = y > x ? y : x;
    return y;
}
template <class T>
std::size_t __cvta_generic_to_global(T* p) {
    return reinterpret_cast<std::size_t>(p);
}
using std::isfinite;
