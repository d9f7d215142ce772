/* SPDX-License-Identifier: Apache-2.0
 *
 * The C ABI of a decode block: results against loops in C, what a query says, and errors that name their argument. */
#include <math.h>

#include "fixture.h"
#include "tessera/decode_block.h"

enum { kRows = 2, kHidden = 6, kHeads = 2, kHeadDim = 4, kCapacity = 3, kQkvRows = (kHeads + 2) * kHeadDim };

typedef struct Block {
    float x[kRows * kHidden], norm[kHidden], w_qkv[kQkvRows * kHidden], w_o[kHidden * kHeads * kHeadDim];
    float k_cache[kRows * kCapacity * kHeadDim], v_cache[kRows * kCapacity * kHeadDim];
    float out[kRows * kHidden], o[kRows * kHeads * kHeadDim], lse[kRows * kHeads];
    int32_t lengths[kRows];
    tessera_decode_block_problem problem;
    tessera_decode_block_args args;
} Block;

static void make(Block* b) {
    memset(b, 0, sizeof *b);
    fill(b->x, kRows * kHidden, 1);
    fill(b->norm, kHidden, 2);
    fill(b->w_qkv, kQkvRows * kHidden, 3);
    fill(b->w_o, kHidden * kHeads * kHeadDim, 4);
    fill(b->k_cache, kRows * kCapacity * kHeadDim, 5);
    fill(b->v_cache, kRows * kCapacity * kHeadDim, 6);
    b->lengths[0] = 2; /* and 0 */
    CHECK(tessera_decode_block_problem_init(&b->problem, sizeof b->problem) == TESSERA_OK);
    b->problem.dtype = b->problem.weights_dtype = TESSERA_FP32;
    b->problem.batch = kRows;
    b->problem.hidden = kHidden;
    b->problem.heads_q = kHeads;
    b->problem.head_dim = kHeadDim;
    b->problem.capacity = kCapacity;
    b->args = (tessera_decode_block_args){.struct_size = sizeof b->args,
                                          .x = tensor(b->x, 2, kRows, kHidden, 0, 0),
                                          .norm = tensor(b->norm, 1, kHidden, 0, 0, 0),
                                          .w_qkv = tensor(b->w_qkv, 2, kQkvRows, kHidden, 0, 0),
                                          .k_cache = tensor(b->k_cache, 4, kRows, kCapacity, 1, kHeadDim),
                                          .v_cache = tensor(b->v_cache, 4, kRows, kCapacity, 1, kHeadDim),
                                          .kv_lengths = tensor(b->lengths, 1, kRows, 0, 0, 0),
                                          .w_o = tensor(b->w_o, 2, kHidden, kHeads * kHeadDim, 0, 0),
                                          .out = tensor(b->out, 2, kRows, kHidden, 0, 0),
                                          .o = tensor(b->o, 3, kRows, kHeads, kHeadDim, 0),
                                          .lse = tensor(b->lse, 2, kRows, kHeads, 0, 0)};
    b->args.kv_lengths.dtype = TESSERA_INT32;
}

static int near(double a, double b) { return fabs(a - b) <= 1e-5 * (1 + fabs(b)); }

/* The block of one row by its definition; the new key and value stand in the cache. */
static void expect_row(const Block* b, int row) {
    double squares = 0, qkv[kQkvRows], out[kHidden];
    for (int i = 0; i < kHidden; ++i) squares += (double)b->x[row * kHidden + i] * b->x[row * kHidden + i];
    for (int r = 0; r < kQkvRows; ++r) {
        qkv[r] = 0;
        for (int i = 0; i < kHidden; ++i)
            qkv[r] +=
                b->w_qkv[r * kHidden + i] * (b->x[row * kHidden + i] * b->norm[i] / sqrt(squares / kHidden + 1e-6));
    }
    const float* k = b->k_cache + row * kCapacity * kHeadDim;
    const float* v = b->v_cache + row * kCapacity * kHeadDim;
    for (int c = 0; c < kHeadDim; ++c) {
        CHECK(near(k[b->lengths[row] * kHeadDim + c], qkv[kHeads * kHeadDim + c]));
        CHECK(near(v[b->lengths[row] * kHeadDim + c], qkv[(kHeads + 1) * kHeadDim + c]));
    }
    for (int i = 0; i < kHidden; ++i) out[i] = b->x[row * kHidden + i];
    for (int h = 0; h < kHeads; ++h) {
        double sum = 0, o[kHeadDim] = {0};
        for (int j = 0; j <= b->lengths[row]; ++j) {
            double score = 0;
            for (int c = 0; c < kHeadDim; ++c) score += qkv[h * kHeadDim + c] * k[j * kHeadDim + c] / sqrt(kHeadDim);
            sum += exp(score);
            for (int c = 0; c < kHeadDim; ++c) o[c] += exp(score) * v[j * kHeadDim + c];
        }
        CHECK(near(b->lse[row * kHeads + h], log(sum)));
        for (int c = 0; c < kHeadDim; ++c) {
            CHECK(near(b->o[(row * kHeads + h) * kHeadDim + c], o[c] / sum));
            for (int i = 0; i < kHidden; ++i) out[i] += b->w_o[(i * kHeads + h) * kHeadDim + c] * o[c] / sum;
        }
    }
    for (int i = 0; i < kHidden; ++i) CHECK(near(b->out[row * kHidden + i], out[i]));
}

static void expect_error(tessera_status status, tessera_status expected, const char* argument) {
    CHECK(status == expected);
    CHECK(strcmp(tessera_last_error_argument(), argument) == 0);
}

int main(void) {
    static Block b;
    make(&b);
    tessera_decode_block_info info = {.struct_size = sizeof info};
    CHECK(tessera_decode_block_query(&b.problem, NULL, TESSERA_CPU, 0, &info) == TESSERA_OK);
    CHECK(info.way == TESSERA_CHAIN && info.counter_bytes == 0 && info.workspace_bytes > 0 && info.threads >= 1);
    CHECK(strstr(info.refused, "CUDA") != NULL && strcmp(info.attention, "cpu.fa2.forward") == 0);
    const size_t bytes = info.workspace_bytes;
    void* workspace = aligned_alloc(TESSERA_WORKSPACE_ALIGNMENT, (bytes / 64 + 1) * 64);
    if (workspace == NULL) abort();
    CHECK(tessera_decode_block(&b.problem, NULL, &b.args, workspace, bytes, NULL) == TESSERA_OK);
    for (int row = 0; row < kRows; ++row) expect_row(&b, row);

    static Block before;
    make(&b);
    memcpy(&before, &b, sizeof b);
    tessera_status status = tessera_decode_block(&b.problem, NULL, &b.args, workspace, bytes - 1, NULL);
    expect_error(status, TESSERA_WORKSPACE_TOO_SMALL, "workspace");
    expect_error(tessera_decode_block(&b.problem, NULL, &b.args, NULL, bytes, NULL), TESSERA_INVALID_ARGUMENT,
                 "workspace");
    expect_error(tessera_decode_block(&b.problem, NULL, NULL, workspace, bytes, NULL), TESSERA_INVALID_ARGUMENT,
                 "args");
    b.args.w_o.strides[1] = 2;
    status = tessera_decode_block(&b.problem, NULL, &b.args, workspace, bytes, NULL);
    expect_error(status, TESSERA_INVALID_ARGUMENT, "w_o");
    b.args = before.args;
    b.problem.qk_norm = 1;
    status = tessera_decode_block(&b.problem, NULL, &b.args, workspace, bytes, NULL);
    expect_error(status, TESSERA_INVALID_ARGUMENT, "q_norm");
    b.problem.qk_norm = 2;
    status = tessera_decode_block(&b.problem, NULL, &b.args, workspace, bytes, NULL);
    expect_error(status, TESSERA_INVALID_ARGUMENT, "qk_norm");
    b.problem = before.problem;
    b.problem.way = TESSERA_ONE_LAUNCH;
    status = tessera_decode_block(&b.problem, NULL, &b.args, workspace, bytes, NULL);
    expect_error(status, TESSERA_UNSUPPORTED, "way");
    b.problem.way = 3;
    status = tessera_decode_block_query(&b.problem, NULL, TESSERA_CPU, 0, &info);
    expect_error(status, TESSERA_INVALID_ARGUMENT, "way");
    b.problem = before.problem;
    CHECK(memcmp(b.k_cache, before.k_cache, sizeof b.k_cache) == 0 && memcmp(b.out, before.out, sizeof b.out) == 0);
    expect_error(tessera_decode_block_query(&b.problem, NULL, 2, 0, &info), TESSERA_INVALID_ARGUMENT, "device_type");
    expect_error(tessera_decode_block_query(&b.problem, NULL, TESSERA_CPU, 0, NULL), TESSERA_INVALID_ARGUMENT, "info");
    expect_error(tessera_decode_block_problem_init(NULL, sizeof b.problem), TESSERA_INVALID_ARGUMENT, "problem");
    CHECK(strncmp(tessera_struct_fields("tessera_decode_block_problem"),
                  "struct_size:size_t dtype:int32 weights_dtype:int32 batch:int64 ", 62) == 0);
    CHECK(strncmp(tessera_struct_fields("tessera_decode_block_args"),
                  "struct_size:size_t x:tensor norm:tensor w_qkv:tensor b_qkv:tensor ", 66) == 0);
    free(workspace);
    return failures == 0 ? 0 : 1;
}
