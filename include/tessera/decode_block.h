/* SPDX-License-Identifier: Apache-2.0
 *
 * The C ABI of the attention block of a decode step. Its conventions are those of tessera.h. */
#ifndef TESSERA_DECODE_BLOCK_H
#define TESSERA_DECODE_BLOCK_H

#include "tessera/tessera.h"

#ifdef __GNUC__
#pragma GCC visibility push(default)
#endif
#ifdef __cplusplus
extern "C" {
#endif

/* How a block is computed. */
enum { TESSERA_ANY_WAY = 0, TESSERA_ONE_LAUNCH = 1, TESSERA_CHAIN = 2 };

/* The attention block of a decode step: what to compute. The fields are those of tessera::DecodeBlockProblem
 * (decode_block.hpp). tessera_decode_block_problem_init sets them to their defaults. */
typedef struct tessera_decode_block_problem {
    size_t struct_size;
    int32_t dtype;              /* TESSERA_BF16; of x, the cache, o and out: bf16 or fp32 (CUDA: bf16) */
    int32_t weights_dtype;      /* TESSERA_BF16; of w_qkv, b_qkv, w_o and b_o: bf16, or fp32 with fp32 */
    int64_t batch;              /* 1; sequences with one new token each */
    int64_t hidden;             /* 0 */
    int64_t heads_q;            /* 1; a multiple of heads_kv */
    int64_t heads_kv;           /* 1 */
    int64_t head_dim;           /* 64; 1..256 */
    int64_t capacity;           /* 0; keys that a sequence can have, a multiple of page_size */
    int64_t page_size;          /* 0: the cache is [slots, capacity, ...]; else [pages, page_size, ...] */
    int64_t window_left;        /* TESSERA_UNBOUNDED; keys before the new one that its query sees */
    int64_t rotary_dim;         /* 0: no rotary embedding */
    double scale;               /* TESSERA_DEFAULT_SCALE */
    double softcap;             /* 0: none */
    double norm_eps;            /* 1e-6 */
    int32_t rotary_interleaved; /* 0: pairs are i and i + rotary_dim / 2 (GPT-NeoX); 1: neighbours (GPT-J) */
    int32_t cache_batch_index;  /* 0; 1: without pages, the slot of each sequence is given */
    int32_t left_padding;       /* 0; 1: the first key of each sequence that counts is given */
    int32_t sinks;              /* 0; 1: they are given */
    int32_t qkv_bias;           /* 0; 1: b_qkv is given */
    int32_t out_bias;           /* 0; 1: b_o is given */
    int32_t qk_norm;            /* 0; 1: q_norm and k_norm are given */
    int32_t way;                /* TESSERA_ANY_WAY */
    int32_t early_weights; /* 0; 1: on CUDA w_qkv is read before the kernel in front in the stream has ended. Neither
                            * that one nor one that it may run beside writes it (tessera::DecodeBlockOptions) */
    int32_t reserved;      /* 0 */
} tessera_decode_block_problem;

/* Tensors of a decode block; shapes and dtypes as in tessera::DecodeBlockArgs. */
typedef struct tessera_decode_block_args {
    size_t struct_size;
    tessera_tensor x;      /* [batch, hidden] */
    tessera_tensor norm;   /* [hidden] */
    tessera_tensor w_qkv;  /* [(heads_q + 2 * heads_kv) * head_dim, hidden] */
    tessera_tensor b_qkv;  /* when problem.qkv_bias: [(heads_q + 2 * heads_kv) * head_dim] */
    tessera_tensor q_norm; /* when problem.qk_norm: [head_dim] */
    tessera_tensor k_norm;
    tessera_tensor rotary_cos; /* when problem.rotary_dim > 0: [positions, rotary_dim / 2] */
    tessera_tensor rotary_sin;
    tessera_tensor positions; /* optional: int32 or int64 [batch]; else kv_lengths */
    tessera_tensor k_cache;   /* in and out */
    tessera_tensor v_cache;
    tessera_tensor kv_lengths;        /* int32 [batch]: keys before the call */
    tessera_tensor page_table;        /* int32 [batch, capacity / page_size] */
    tessera_tensor cache_batch_index; /* int32 [batch] */
    tessera_tensor left_padding;      /* int32 [batch] */
    tessera_tensor sinks;             /* fp32 [heads_q] */
    tessera_tensor w_o;               /* [hidden, heads_q * head_dim] */
    tessera_tensor b_o;               /* when problem.out_bias: [hidden] */
    tessera_tensor residual;          /* optional: [batch, hidden]; else x */
    tessera_tensor out;               /* out: [batch, hidden]; it may be x or residual itself */
    tessera_tensor o;                 /* out, optional: [batch, heads_q, head_dim], packed */
    tessera_tensor lse;               /* out, optional: fp32 [batch, heads_q] */
} tessera_decode_block_args;

/* Sets the defaults that stand beside the fields. struct_size is sizeof(tessera_decode_block_problem) in the caller's
 * header. */
tessera_status tessera_decode_block_problem_init(tessera_decode_block_problem* problem, size_t struct_size);

/* How a decode block would run on a device. A text that is longer than its array is cut off. */
typedef struct tessera_decode_block_info {
    size_t struct_size;
    size_t workspace_bytes; /* aligned to TESSERA_WORKSPACE_ALIGNMENT */
    size_t counter_bytes;   /* the first bytes of a workspace, which are 0 before its first call and the library's from
                             * then on. 0 for the chain, which may not share a workspace with one launch: it writes
                             * over these bytes */
    const char* attention;  /* the kernel of the chain's attention; lives as long as the library */
    int32_t way;            /* TESSERA_ONE_LAUNCH or TESSERA_CHAIN */
    int32_t threads;        /* on the CPU */
    char refused[500];      /* why one launch does not run it; "" if it does, or if a way was asked for */
} tessera_decode_block_info;

/* Fills in `info`, whose struct_size the caller sets. `options` says how many threads. device_type and device_index are
 * those of the tensors. */
tessera_status tessera_decode_block_query(const tessera_decode_block_problem* problem, const tessera_options* options,
                                          int32_t device_type, int32_t device_index, tessera_decode_block_info* info);

/* Computes the attention block of a decode step: RMS norm, GEMM to Q, K and V, QK norm, rotary embedding, append to
 * the cache, attention, output GEMM and residual (docs/decode-block.md). All tensors and the workspace are on the
 * device of x. On a CUDA device the work is queued on `stream`. Calls that may run at the same time need workspaces of
 * their own. */
tessera_status tessera_decode_block(const tessera_decode_block_problem* problem, const tessera_options* options,
                                    const tessera_decode_block_args* args, void* workspace, size_t workspace_bytes,
                                    void* stream);

#ifdef __cplusplus
}
#endif
#ifdef __GNUC__
#pragma GCC visibility pop
#endif

#endif
