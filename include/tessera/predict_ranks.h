/* SPDX-License-Identifier: Apache-2.0
 *
 * The C ABI of predictions for one sequence on several GPUs. Its conventions are those of tessera.h. */
#ifndef TESSERA_PREDICT_RANKS_H
#define TESSERA_PREDICT_RANKS_H

#include "tessera/tessera.h"

#ifdef __GNUC__
#pragma GCC visibility push(default)
#endif
#ifdef __cplusplus
extern "C" {
#endif

/* How the rows of one sequence are spread over GPUs that NVLink joins. */
typedef struct tessera_ranks {
    size_t struct_size;
    int32_t ranks;          /* GPUs, from 1 on */
    int32_t nccl;           /* 0: GPUs of one host copy from each other; 1: they exchange by NCCL */
    int32_t steps;          /* groups of key heads; 0: as many as tessera.torch takes on CUDA */
    int32_t o_residual;     /* 1: the forward writes the residual of O, and the backward reads it */
    const int64_t* lengths; /* of the packed documents of a ragged problem; else null */
    int64_t documents;      /* how many lengths there are */
} tessera_ranks;

typedef struct tessera_ranks_prediction {
    size_t struct_size;
    int32_t schedule; /* TESSERA_SCHEDULE_FA3 where the machine and the problem have it in both passes, else fa2 */
    int32_t steps;
    double ms;              /* until the last GPU is done */
    double error;           /* as in tessera_prediction */
    double one_gpu_ms;      /* the whole sequence on one GPU */
    double kernel_ms;       /* the kernels of all steps, alone */
    double exchange_ms;     /* what crosses GPUs, alone */
    double hidden_ms;       /* the part of exchange_ms in which kernels run */
    int64_t bytes_received; /* bytes that a GPU receives, at most */
    int64_t memory;         /* bytes beside the tensors of the call, at most */
} tessera_ranks_prediction;

/* Predicts attention of one sequence whose rows are spread over GPUs (tessera/predict_context_parallel.hpp), as
 * `tessera roofline --gpus` does. `problem` is that of the whole sequence. `machine` is the name of a GPU.
 * TESSERA_UNSUPPORTED with the reason when there is no prediction. */
tessera_status tessera_predict_ranks(const tessera_problem* problem, const tessera_ranks* ranks, int32_t pass,
                                     const char* machine, tessera_ranks_prediction* prediction);

#ifdef __cplusplus
}
#endif
#ifdef __GNUC__
#pragma GCC visibility pop
#endif

#endif
