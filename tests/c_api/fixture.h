/* SPDX-License-Identifier: Apache-2.0
 *
 * A small dense problem with GQA and every feature: memory, tensors and the structs of both passes. */
#ifndef TESSERA_TESTS_C_API_FIXTURE_H
#define TESSERA_TESTS_C_API_FIXTURE_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tessera/tessera.h"

enum { kBatch = 2, kLenQ = 5, kLenKv = 7, kHeadsQ = 4, kHeadsKv = 2, kDim = 8, kDimV = 6 };
enum {
    kSizeQ = kBatch * kLenQ * kHeadsQ * kDim,
    kSizeK = kBatch * kLenKv * kHeadsKv * kDim,
    kSizeV = kBatch * kLenKv * kHeadsKv * kDimV,
    kSizeO = kBatch * kLenQ * kHeadsQ * kDimV,
    kSizeLse = kBatch * kHeadsQ * kLenQ,
    kSizeBias = kLenQ * kLenKv,
    kWorkspaceBytes = 1 << 20
};

typedef struct Outputs {
    float o[kSizeO];
    float lse[kSizeLse];
    float dq[kSizeQ];
    float dk[kSizeK];
    float dv[kSizeV];
    float dbias[kSizeBias];
    float dsinks[kHeadsQ];
} Outputs;

typedef struct Fixture {
    float q[kSizeQ];   /* [batch, len_q, heads_q, dim] */
    float k[kSizeK];   /* [batch, len_kv, heads_kv, dim] */
    float v[kSizeV];   /* [batch, heads_kv, len_kv, dim_v]: other strides than k */
    float d_o[kSizeO]; /* [batch, heads_q, len_q, dim_v]: other strides than o */
    float dlse[kSizeLse];
    float bias[kSizeBias]; /* [1, 1, len_q, len_kv] */
    float slopes[kHeadsQ];
    float sinks[kHeadsQ];
    Outputs out;
    tessera_problem problem;
    tessera_options options;
    tessera_forward_args forward;
    tessera_backward_args backward;
    void* workspace;
    size_t workspace_bytes;
} Fixture;

static inline tessera_tensor tensor(void* data, int rank, int64_t n0, int64_t n1, int64_t n2, int64_t n3) {
    tessera_tensor t = {.data = data, .dtype = TESSERA_FP32, .rank = rank, .shape = {n0, n1, n2, n3}};
    int64_t stride = 1;
    for (int d = rank; d-- > 0;) {
        t.strides[d] = stride;
        stride *= t.shape[d];
    }
    return t;
}

/* [batch, len, heads, dim] over memory that is [batch, heads, len, dim]. */
static inline tessera_tensor heads_first(void* data, int64_t len, int64_t heads, int64_t dim) {
    tessera_tensor t = tensor(data, 4, kBatch, len, heads, dim);
    t.strides[1] = dim;
    t.strides[2] = len * dim;
    return t;
}

/* Numbers in [-1, 1), the same on every machine. */
static inline void fill(float* to, size_t count, uint32_t seed) {
    uint32_t state = seed * 2654435761u + 1u;
    for (size_t i = 0; i < count; ++i) {
        state = state * 1664525u + 1013904223u;
        to[i] = (float)(state >> 8) / 8388608.0f - 1.0f;
    }
}

static inline void set_problem(Fixture* f) {
    if (tessera_problem_init(&f->problem, sizeof f->problem) != TESSERA_OK) abort();
    f->problem.batch = kBatch;
    f->problem.len_q = kLenQ;
    f->problem.len_kv = kLenKv;
    f->problem.heads_q = kHeadsQ;
    f->problem.heads_kv = kHeadsKv;
    f->problem.head_dim = kDim;
    f->problem.head_dim_v = kDimV;
    f->problem.causal = TESSERA_CAUSAL_BOTTOM_RIGHT;
    f->problem.window_left = 4;
    f->problem.softcap = 2.0;
    f->problem.alibi = 1;
    f->problem.bias = 1;
    f->problem.bias_gradient = 1;
    f->problem.sinks = 1;
}

static inline void set_args(Fixture* f) {
    f->forward = (tessera_forward_args){.struct_size = sizeof f->forward,
                                        .q = tensor(f->q, 4, kBatch, kLenQ, kHeadsQ, kDim),
                                        .k = tensor(f->k, 4, kBatch, kLenKv, kHeadsKv, kDim),
                                        .v = heads_first(f->v, kLenKv, kHeadsKv, kDimV),
                                        .bias = tensor(f->bias, 4, 1, 1, kLenQ, kLenKv),
                                        .alibi_slopes = tensor(f->slopes, 1, kHeadsQ, 0, 0, 0),
                                        .o = tensor(f->out.o, 4, kBatch, kLenQ, kHeadsQ, kDimV),
                                        .lse = tensor(f->out.lse, 3, kBatch, kHeadsQ, kLenQ, 0),
                                        .sinks = tensor(f->sinks, 1, kHeadsQ, 0, 0, 0)};
    f->backward = (tessera_backward_args){.struct_size = sizeof f->backward,
                                          .q = f->forward.q,
                                          .k = f->forward.k,
                                          .v = f->forward.v,
                                          .bias = f->forward.bias,
                                          .alibi_slopes = f->forward.alibi_slopes,
                                          .o = f->forward.o,
                                          .lse = f->forward.lse,
                                          .d_o = heads_first(f->d_o, kLenQ, kHeadsQ, kDimV),
                                          .dlse = tensor(f->dlse, 3, kBatch, kHeadsQ, kLenQ, 0),
                                          .dq = tensor(f->out.dq, 4, kBatch, kLenQ, kHeadsQ, kDim),
                                          .dk = tensor(f->out.dk, 4, kBatch, kLenKv, kHeadsKv, kDim),
                                          .dv = tensor(f->out.dv, 4, kBatch, kLenKv, kHeadsKv, kDimV),
                                          .dbias = tensor(f->out.dbias, 4, 1, 1, kLenQ, kLenKv),
                                          .sinks = f->forward.sinks,
                                          .dsinks = tensor(f->out.dsinks, 1, kHeadsQ, 0, 0, 0)};
}

/* Fills in a valid call. The fixture must not move afterwards, because its tensors point into it. */
static inline void setup(Fixture* f) {
    memset(f, 0, sizeof *f);
    fill(f->q, kSizeQ, 1);
    fill(f->k, kSizeK, 2);
    fill(f->v, kSizeV, 3);
    fill(f->d_o, kSizeO, 4);
    fill(f->dlse, kSizeLse, 5);
    fill(f->bias, kSizeBias, 6);
    fill(f->sinks, kHeadsQ, 7);
    for (int h = 0; h < kHeadsQ; ++h) f->slopes[h] = 0.25f / (float)(h + 1);
    f->options = (tessera_options){.struct_size = sizeof f->options, .threads = 2};
    f->workspace = aligned_alloc(TESSERA_WORKSPACE_ALIGNMENT, kWorkspaceBytes);
    f->workspace_bytes = kWorkspaceBytes;
    if (f->workspace == NULL) abort();
    set_problem(f);
    set_args(f);
}

static int failures = 0;

#define CHECK(condition)                                                                               \
    do {                                                                                               \
        if (!(condition)) {                                                                            \
            printf("%s:%d: %s is false (%s)\n", __FILE__, __LINE__, #condition, tessera_last_error()); \
            ++failures;                                                                                \
        }                                                                                              \
    } while (0)

#endif
