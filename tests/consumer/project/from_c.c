/* SPDX-License-Identifier: Apache-2.0
 *
 * Does what from_cpp.cc does, by the C ABI. */
#include <stdio.h>
#include <stdlib.h>

#include "tessera/tessera.h"

static tessera_tensor view(float* data) {
    return (tessera_tensor){
        .data = data, .dtype = TESSERA_FP32, .rank = 4, .shape = {1, 4, 1, 8}, .strides = {32, 8, 8, 1}};
}

int main(void) {
    float q[32] = {0}, k[32], v[32], o[32];
    for (int i = 0; i < 32; ++i) {
        k[i] = 1.0f;
        v[i] = (float)(i / 8);
    }
    tessera_problem problem;
    tessera_problem_init(&problem, sizeof problem);
    problem.len_q = problem.len_kv = 4;
    problem.head_dim = problem.head_dim_v = 8;
    problem.causal = TESSERA_CAUSAL_TOP_LEFT;
    size_t bytes = 0;
    tessera_workspace_bytes(&problem, NULL, TESSERA_FORWARD, &bytes);
    const size_t rounded = (bytes / TESSERA_WORKSPACE_ALIGNMENT + 1) * TESSERA_WORKSPACE_ALIGNMENT;
    void* workspace = aligned_alloc(TESSERA_WORKSPACE_ALIGNMENT, rounded);
    const tessera_forward_args args = {
        .struct_size = sizeof args, .q = view(q), .k = view(k), .v = view(v), .o = view(o)};
    if (tessera_forward(&problem, NULL, &args, workspace, bytes, NULL) != TESSERA_OK) puts(tessera_last_error());
    printf("C %.4f %.4f %.4f %.4f\n", (double)o[0], (double)o[8], (double)o[16], (double)o[24]);
    tessera_problem on_gpu;
    tessera_problem_init(&on_gpu, sizeof on_gpu);
    on_gpu.dtype = TESSERA_BF16;
    on_gpu.len_q = on_gpu.len_kv = 4096;
    on_gpu.heads_q = on_gpu.heads_kv = 16;
    on_gpu.head_dim = on_gpu.head_dim_v = 128;
    tessera_machine machine = {.struct_size = sizeof machine};
    tessera_prediction once = {.struct_size = sizeof once}, twice = {.struct_size = sizeof twice};
    if (tessera_machine_named("h200", &machine) != TESSERA_OK) puts(tessera_last_error());
    tessera_predict_on(&on_gpu, NULL, TESSERA_FORWARD, &machine, &once);
    machine.cores *= 2;
    if (tessera_predict_on(&on_gpu, NULL, TESSERA_FORWARD, &machine, &twice) != TESSERA_OK) puts(tessera_last_error());
    printf("twice the cores %s\n", twice.ms < once.ms ? "win" : "lose");
    problem.head_dim = 0;
    const int status = tessera_forward(&problem, NULL, &args, workspace, bytes, NULL);
    printf("error %d %s\n", status, tessera_last_error_argument());
    free(workspace);
    return 0;
}
