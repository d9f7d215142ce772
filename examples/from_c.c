/* SPDX-License-Identifier: Apache-2.0
 *
 * The C ABI: what a call would take on an H200 that is not here, which kernel runs it here, and the call itself. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "tessera/tessera.h"

enum { LEN = 256, HEADS = 4, DIM = 64, SIZE = LEN * HEADS * DIM };

static void expect_ok(tessera_status status) {
    if (status == TESSERA_OK) return;
    fprintf(stderr, "%s\n", tessera_last_error());
    exit(1);
}

/* [1, LEN, HEADS, DIM] */
static tessera_tensor view(float* data) {
    return (tessera_tensor){.data = data,
                            .dtype = TESSERA_FP32,
                            .rank = 4,
                            .shape = {1, LEN, HEADS, DIM},
                            .strides = {SIZE, HEADS * DIM, DIM, 1}};
}

int main(void) {
    tessera_problem problem;
    expect_ok(tessera_problem_init(&problem, sizeof problem));
    problem.len_q = problem.len_kv = LEN;
    problem.heads_q = problem.heads_kv = HEADS;
    problem.head_dim = problem.head_dim_v = DIM;
    problem.causal = TESSERA_CAUSAL_BOTTOM_RIGHT;

    tessera_prediction there = {.struct_size = sizeof there};
    expect_ok(tessera_predict(&problem, NULL, TESSERA_FORWARD, "h200", &there));
    printf("on an H200: %.3g ms, bound by %s\n", there.ms, there.bound);
    char text[4096];
    expect_ok(tessera_plan_describe(&problem, NULL, TESSERA_FORWARD, text, sizeof text, NULL));
    puts(text);

    /* V of key j is j in every column, and all scores are equal: row i of O is the mean of 0 .. i. */
    float* const q = calloc(4 * SIZE, sizeof(float));
    if (q == NULL) return 1;
    float *const k = q + SIZE, *const v = k + SIZE, *const o = v + SIZE;
    for (int i = 0; i < SIZE; ++i) k[i] = 1.0F, v[i] = (float)(i / (HEADS * DIM));
    size_t bytes = 0;
    expect_ok(tessera_workspace_bytes(&problem, NULL, TESSERA_FORWARD, &bytes));
    const size_t unit = TESSERA_WORKSPACE_ALIGNMENT;
    void* const workspace = aligned_alloc(unit, (bytes / unit + 1) * unit);
    const tessera_forward_args args = {
        .struct_size = sizeof args, .q = view(q), .k = view(k), .v = view(v), .o = view(o)};
    expect_ok(tessera_forward(&problem, NULL, &args, workspace, bytes, NULL));
    double worst = 0;
    for (int i = 0; i < SIZE; ++i) worst = fmax(worst, fabs((double)o[i] - 0.5 * (i / (HEADS * DIM))));
    printf("worst error %.1e\n", worst);
    free(workspace);
    free(q);
    return worst < 1e-4 ? 0 : 1;
}
