// SPDX-License-Identifier: Apache-2.0
#include <cstdlib>
#include "cuda/fa2/backward.cuh"
using namespace tessera::cuda;
#ifndef HD
#define HD 0
#endif
extern "C" __attribute__((visibility("default"))) int variant_start(const gradient::Launch* of, cudaStream_t s,
                                                                    int dim) {
    gradient::Launch l = *of;
#ifdef TESS_TILES64
    if (dim == 64) l.key_blocks = (l.params.forward.len_kv + 64 * TESS_TILES64 - 1) / (64 * TESS_TILES64);
#endif
#ifdef TESS_HEADS
    l.heads_together = (132 + l.key_blocks - 1) / l.key_blocks;
#endif
#ifdef HAS_PARTS
    const char* parts = std::getenv("TESSERA_PARTS");
    const bool in_parts = !l.params.forward.mask.trivial() && l.params.forward.heads_kv * l.key_blocks >= gradient::kFewestInParts;
    l.parts = in_parts && !(parts && *parts == '0') ? gradient::kParts : 1;
#endif
#if HD == 0 || HD == 64
    if (dim == 64) return (int)fa2::start_backward<__nv_bfloat16, fa2::BackwardHeadDim64>(l, s);
#endif
#if HD == 0 || HD == 128
    if (dim == 128) return (int)fa2::start_backward<__nv_bfloat16, fa2::BackwardHeadDim128>(l, s);
#endif
#if HD == 0 || HD == 256
    if (dim == 256) return (int)fa2::start_backward<__nv_bfloat16, fa2::BackwardHeadDim256>(l, s);
#endif
    return -1;
}
