/* SPDX-License-Identifier: Apache-2.0
 *
 * The C ABI of tessera, plain C11. It has no handles: a call takes a problem, options and tensors, and gives a status.
 *
 *     tessera_problem problem;
 *     tessera_problem_init(&problem, sizeof problem);
 *     problem.batch = 1; problem.len_q = problem.len_kv = 1024; problem.heads_q = problem.heads_kv = 8;
 *     size_t bytes;
 *     tessera_workspace_bytes(&problem, NULL, TESSERA_FORWARD, &bytes);
 *     void* workspace = aligned_alloc(TESSERA_WORKSPACE_ALIGNMENT, bytes rounded up to the alignment);
 *     tessera_forward_args args = {.struct_size = sizeof args, .q = ..., .k = ..., .v = ..., .o = ..., .lse = ...};
 *     if (tessera_forward(&problem, NULL, &args, workspace, bytes, NULL) != TESSERA_OK) puts(tessera_last_error());
 *
 * Nothing is allocated for the caller, no C++ exception leaves a call, and a call that fails has written nothing but
 * the message of tessera_last_error (one exception: a parallel_for that doesn't run its tasks, see there).
 * Every function may be called from any thread, at the same time.
 */
#ifndef TESSERA_TESSERA_H
#define TESSERA_TESSERA_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __GNUC__
#pragma GCC visibility push(default)
#endif
#ifdef __cplusplus
extern "C" {
#endif

#define TESSERA_VERSION "0.1.0"

/* Status codes: the numbers of tessera::ErrorCode. They never change their meaning. */
typedef int tessera_status;
enum {
    TESSERA_OK = 0,
    TESSERA_INVALID_ARGUMENT = 1,    /* tessera_last_error_argument() names it */
    TESSERA_UNSUPPORTED = 2,         /* a legal call that the asked-for kernel, schedule or backend does not take */
    TESSERA_WORKSPACE_TOO_SMALL = 3, /* too short, or not aligned to TESSERA_WORKSPACE_ALIGNMENT */
    TESSERA_OUT_OF_MEMORY = 4,
    TESSERA_CANNOT_OPEN = 5,
    TESSERA_BAD_DATA = 6,
    TESSERA_CANNOT_WRITE = 7,
    TESSERA_DEVICE_UNAVAILABLE = 8,
    TESSERA_CANCELLED = 9,
    TESSERA_INTERNAL = 10 /* a bug in tessera */
};

/* Values of the int32_t fields below. */
enum {
    TESSERA_FP64 = 0,
    TESSERA_FP32 = 1,
    TESSERA_FP16 = 2,
    TESSERA_BF16 = 3,
    TESSERA_INT32 = 4,
    TESSERA_INT64 = 5,
    TESSERA_INT8 = 6
};
enum { TESSERA_CPU = 0, TESSERA_CUDA = 1 }; /* where memory lives */
enum { TESSERA_FORWARD = 0, TESSERA_BACKWARD = 1 };
enum {
    TESSERA_CAUSAL_NONE = 0,
    TESSERA_CAUSAL_BOTTOM_RIGHT = 1, /* the last query sees the last key: key <= query + len_kv - len_q */
    TESSERA_CAUSAL_TOP_LEFT = 2      /* the first query sees the first key only: key <= query */
};
enum { TESSERA_ANY_BACKEND = 0, TESSERA_BACKEND_CPU = 1, TESSERA_BACKEND_CUDA = 2, TESSERA_BACKEND_REFERENCE = 3 };
enum {
    TESSERA_ANY_SCHEDULE = 0,
    TESSERA_SCHEDULE_STANDARD = 1,
    TESSERA_SCHEDULE_FA1 = 2,
    TESSERA_SCHEDULE_FA2 = 3,
    TESSERA_SCHEDULE_FA3 = 4
};

#define TESSERA_MAX_RANK 4
#define TESSERA_WORKSPACE_ALIGNMENT 64
#define TESSERA_UNBOUNDED INT64_MAX       /* a window side without limit */
#define TESSERA_DEFAULT_SCALE (-HUGE_VAL) /* scale = 1 / sqrt(head_dim) */

/* A borrowed, strided array. Inputs are never written. Strides are in elements; those of inputs may be 0 or negative.
 * rank 0 (a zeroed struct) stands for an optional tensor that is not given. This struct never grows. */
typedef struct tessera_tensor {
    void* data;    /* address of element (0, ..., 0); may be null when the tensor has no elements */
    int32_t dtype; /* TESSERA_FP32, ... */
    int32_t rank;
    int64_t shape[TESSERA_MAX_RANK];
    int64_t strides[TESSERA_MAX_RANK];
    int32_t device_type;  /* TESSERA_CPU */
    int32_t device_index; /* number of the CUDA device */
} tessera_tensor;

/* Structs that may grow begin with struct_size = sizeof of the struct as the caller's header has it. Fields that are
 * added later mean their default when they are 0 or beyond struct_size; set bytes that this library doesn't know are
 * TESSERA_INVALID_ARGUMENT, and so is a struct_size over TESSERA_MAX_STRUCT_SIZE. */
#define TESSERA_MAX_STRUCT_SIZE 4096

/* A problem: what to compute. The fields are those of tessera::Problem (problem.hpp). tessera_problem_init sets them
 * to their defaults. */
typedef struct tessera_problem {
    size_t struct_size;
    int32_t dtype;              /* TESSERA_FP32; of q, k, v, o and their gradients */
    int32_t ragged;             /* 0; 1: sequences have their own lengths, given by cu_seqlens */
    int64_t batch;              /* 1 */
    int64_t len_q;              /* 0; when ragged, an upper bound over the sequences */
    int64_t len_kv;             /* 0 */
    int64_t heads_q;            /* 1; a multiple of heads_kv */
    int64_t heads_kv;           /* 1 */
    int64_t head_dim;           /* 64; 1..256 */
    int64_t head_dim_v;         /* 64; 1..256 */
    int64_t total_q;            /* 0; ragged only: rows of q over all sequences */
    int64_t total_kv;           /* 0 */
    int64_t window_left;        /* TESSERA_UNBOUNDED; inclusive, relative to the bottom-right diagonal */
    int64_t window_right;       /* TESSERA_UNBOUNDED */
    int32_t causal;             /* TESSERA_CAUSAL_NONE */
    int32_t alibi;              /* 0; 1: alibi_slopes are given */
    int32_t bias;               /* 0; 1: an additive bias is given */
    int32_t bias_gradient;      /* 0; 1: the backward computes dbias too */
    double scale;               /* TESSERA_DEFAULT_SCALE */
    double softcap;             /* 0: none */
    double dropout_probability; /* 0; 0 <= p < 1 */
    uint64_t dropout_seed;      /* 0 */
    /* Not in the first version of this struct, which is taken too. The first four are a cache of keys, for the
     * forward: */
    int64_t page_size;         /* 0: [slots, len_kv, ...]; else k and v are [pages, page_size, ...], by page_table */
    int32_t kv_lengths;        /* 0; 1: k and v are a cache of len_kv keys at most, and kv_lengths are given */
    int32_t cache_batch_index; /* 0; 1: the slot of each sequence is given */
    int32_t left_padding;      /* 0; 1: the first key of each sequence that counts is given */
    int32_t sinks;             /* 0; 1: sinks are given */
} tessera_problem;

/* Runs one task of a parallel loop. */
typedef void (*tessera_task)(void* task_context, int64_t task, int32_t worker);

/* Calls task(task_context, t, worker) once for every t in [0, tasks), in any order, on at most `workers` threads, with
 * `worker` in [0, workers) and never the same at the same time on two threads; returns when all are done. A call whose
 * parallel_for leaves tasks out or names a worker outside the range fails with TESSERA_INVALID_ARGUMENT
 * ("parallel_for"), and its outputs are then undefined. */
typedef void (*tessera_parallel_for)(void* context, int64_t tasks, int32_t workers, tessera_task task,
                                     void* task_context);

/* How to run a problem. tessera chooses everything that is zero; a null pointer instead of options means all zero. */
typedef struct tessera_options {
    size_t struct_size;
    int32_t backend;    /* TESSERA_ANY_BACKEND */
    int32_t schedule;   /* TESSERA_ANY_SCHEDULE */
    const char* kernel; /* null: any; else a name that tessera_kernel_name gives */
    int64_t block_q;    /* tile; both 0: the kernel's own */
    int64_t block_kv;
    int32_t threads;                   /* 0: one per core that this process may use; 1..1024 */
    int32_t reserved;                  /* 0 */
    tessera_parallel_for parallel_for; /* null: tessera's own threads */
    void* parallel_for_context;
} tessera_options;

/* Tensors of a forward call; shapes as in tessera::ForwardArgs ([...] dense | [...] ragged). */
typedef struct tessera_forward_args {
    size_t struct_size;
    tessera_tensor q;            /* [batch, len_q, heads_q, head_dim]     | [total_q, heads_q, head_dim] */
    tessera_tensor k;            /* [batch, len_kv, heads_kv, head_dim]   | [total_kv, heads_kv, head_dim] */
    tessera_tensor v;            /* [batch, len_kv, heads_kv, head_dim_v] | [total_kv, heads_kv, head_dim_v] */
    tessera_tensor bias;         /* [batch or 1, heads_q or 1, len_q or 1, len_kv or 1]; fp32 or the problem's dtype */
    tessera_tensor alibi_slopes; /* fp32 [heads_q] or [batch, heads_q] */
    tessera_tensor cu_seqlens_q; /* ragged: int32 or int64 [batch + 1], from 0 to total_q, non-decreasing */
    tessera_tensor cu_seqlens_kv;
    tessera_tensor o;   /* out: [batch, len_q, heads_q, head_dim_v] | [total_q, heads_q, head_dim_v] */
    tessera_tensor lse; /* out, optional: fp32 [batch, heads_q, len_q] | [heads_q, total_q] */
    /* Not in the first version of this struct, which is taken too: */
    tessera_tensor o_residual; /* out, optional, when tessera_plan_info.o_residual is 1: int8, shape of o; what rounding
                                * to 16 bits took off O, in 256ths of its last place. The backward can take it. */
    tessera_tensor sinks;      /* when problem.sinks: fp32 [heads_q], a logit of each query head in the softmax's sum */
    /* A cache of keys, int32 each: */
    tessera_tensor kv_lengths;        /* [batch]: keys of each sequence, its left padding included */
    tessera_tensor page_table;        /* [batch, len_kv / page_size]; entries past the length may be anything */
    tessera_tensor cache_batch_index; /* [batch]: slots */
    tessera_tensor left_padding;      /* [batch]: keys before this one do not count */
} tessera_forward_args;

/* Tensors of a backward call. */
typedef struct tessera_backward_args {
    size_t struct_size;
    tessera_tensor q;
    tessera_tensor k;
    tessera_tensor v;
    tessera_tensor bias;
    tessera_tensor alibi_slopes;
    tessera_tensor cu_seqlens_q;
    tessera_tensor cu_seqlens_kv;
    tessera_tensor o;     /* as the forward gave it */
    tessera_tensor lse;   /* as the forward gave it */
    tessera_tensor d_o;   /* gradient of O, strides of its own; "do" in messages */
    tessera_tensor dlse;  /* gradient of LSE, optional */
    tessera_tensor dq;    /* out, shape of q; as dk and dv, of rank 0 when it is not wanted */
    tessera_tensor dk;    /* out, shape of k */
    tessera_tensor dv;    /* out, shape of v */
    tessera_tensor dbias; /* out, when problem.bias_gradient: shape of bias */
    /* Not in the first version of this struct, which is taken too: */
    tessera_tensor o_residual; /* as the forward gave it, optional; not read when tessera_plan_info.o_residual is 0 */
    tessera_tensor sinks;      /* as the forward had them */
    tessera_tensor dsinks;     /* out, optional, only when problem.sinks: fp32 [heads_q] */
} tessera_backward_args;

/* Tensors of tessera_append, as in tessera::AppendArgs (append.hpp). */
typedef struct tessera_append_args {
    size_t struct_size;
    int32_t rotary_interleaved; /* 0: pairs are i and i + rotary_dim / 2 (GPT-NeoX); 1: neighbours (GPT-J) */
    int32_t reserved;           /* 0 */
    double norm_eps;            /* 0: 1e-6 */
    tessera_tensor k;           /* [batch, len, heads_kv, head_dim] | [total, heads_kv, head_dim]: new rows */
    tessera_tensor v;
    tessera_tensor k_cache; /* out: [slots, capacity, heads_kv, head_dim] or [pages, page_size, heads_kv, head_dim] */
    tessera_tensor v_cache;
    tessera_tensor slot_mapping;      /* int32 or int64, one for each row of k; or kv_lengths: */
    tessera_tensor kv_lengths;        /* int32 [batch]: keys before the call */
    tessera_tensor page_table;        /* int32 [batch, pages of a sequence] */
    tessera_tensor cache_batch_index; /* int32 [batch] */
    tessera_tensor cu_seqlens_k;      /* int32 or int64 [batch + 1], if k is [total, heads_kv, head_dim] */
    tessera_tensor rotary_cos;        /* optional: [positions, rotary_dim / 2], fp32 or the dtype of k */
    tessera_tensor rotary_sin;
    tessera_tensor positions;   /* int32 or int64, one for each row of k; at lengths optional */
    tessera_tensor q;           /* optional: queries, turned as k is */
    tessera_tensor q_positions; /* int32 or int64, one for each row of q */
    tessera_tensor q_out;       /* out: shape of q; it may be q itself */
    tessera_tensor k_norm;      /* optional: weights of an RMS norm of each row, [head_dim] */
    tessera_tensor q_norm;
} tessera_append_args;

/* The version of the running library, such as "0.1.0"; TESSERA_VERSION is that of the header. */
const char* tessera_version(void);

/* The message of the last call that failed on this thread ("" before the first), and the argument to blame as the
 * structs above spell it ("" when there is no single one). Valid until the next failing call on this thread. */
const char* tessera_last_error(void);
const char* tessera_last_error_argument(void);

/* The fields of tessera_problem, of the args of forward, backward or append ("tessera_append_args"), or of a struct of
 * decode_block.h, in their order, for callers that build the struct at run time:
 * "struct_size:size_t dtype:int32 ...". A type is size_t, int32, int64, uint64, double or tensor (a tessera_tensor).
 * Null for any other name. */
const char* tessera_struct_fields(const char* name);

/* Every kernel of this build in order of preference. The name is null when index >= tessera_kernel_count(). */
size_t tessera_kernel_count(void);
const char* tessera_kernel_name(size_t index);

/* Sets the defaults that stand beside the fields. struct_size is sizeof(tessera_problem) in the caller's header. */
tessera_status tessera_problem_init(tessera_problem* problem, size_t struct_size);

/* The bytes of workspace, aligned to TESSERA_WORKSPACE_ALIGNMENT, that the call with this problem and options needs. */
tessera_status tessera_workspace_bytes(const tessera_problem* problem, const tessera_options* options, int32_t pass,
                                       size_t* bytes);

/* Which kernel would run the problem, how, and why no other: several lines of text, as snprintf would write them:
 * at most `size` bytes with the closing zero, cut off if there are more. *needed is what the whole text takes with its
 * closing zero; `needed` may be null, and `buffer` when size is 0. */
tessera_status tessera_plan_describe(const tessera_problem* problem, const tessera_options* options, int32_t pass,
                                     char* buffer, size_t size, size_t* needed);

/* The choice of a kernel as data. Texts that are longer than their arrays are cut off. */
typedef struct tessera_plan_info {
    size_t struct_size;
    const char* kernel; /* name of the chosen kernel; lives as long as the library */
    int64_t block_q;
    int64_t block_kv;
    size_t workspace_bytes;
    int32_t threads;
    int32_t refused;      /* kernels of this pass that were not chosen: tessera_plan_refusal tells why */
    char target[128];     /* instruction set or device: "AVX3", "sm_90 (NVIDIA H200)" */
    char matrix_unit[32]; /* "AMX"; "": the kernel uses none */
    /* Not in the first version of this struct, which is taken too: */
    int32_t o_residual; /* 1: the forward can write o_residual; with it the backward saves two of seven GEMMs.
                         * Else 0. */
    int32_t reserved;
} tessera_plan_info;

typedef struct tessera_refusal {
    size_t struct_size;
    const char* kernel; /* lives as long as the library */
    int32_t capable;    /* 1: it could run the problem, but another kernel comes first or was asked for */
    char reason[500];
} tessera_refusal;

/* Gives as data what tessera_plan_describe gives as text. The caller sets `info->struct_size`. */
tessera_status tessera_plan_query(const tessera_problem* problem, const tessera_options* options, int32_t pass,
                                  tessera_plan_info* info);

/* Why a kernel was not chosen; `index` from 0 to under tessera_plan_info.refused, in order of preference. */
tessera_status tessera_plan_refusal(const tessera_problem* problem, const tessera_options* options, int32_t pass,
                                    int32_t index, tessera_refusal* refusal);

typedef struct tessera_prediction {
    size_t struct_size;
    int32_t schedule; /* TESSERA_SCHEDULE_FA2 */
    int32_t reserved;
    double ms;               /* predicted time of one call */
    double tflops;           /* counts visible pairs only */
    double percent_of_bound; /* the nearest roof in percent of `ms` */
    char bound[64];          /* that roof, or what takes most of the time */
    char machine[64];        /* name of the machine */
    double error; /* nine of ten measured times lie between ms / (1 + error) and ms * (1 + error) (docs/model.md) */
} tessera_prediction;

/* Predicts by the cost model (docs/model.md) how long a call takes on a machine; nothing is run. `machine` is one that
 * `tessera roofline --help` lists, such as "h200", or null for the one that the problem would run on. If `options`
 * leave several schedules, the fastest one counts, and on a cache of a GPU the kernel that plan() would choose;
 * `backend` is that of the machine. TESSERA_UNSUPPORTED when the model does not know the machine or the machine can't
 * run the problem. Sequences of a ragged batch are taken to be as long as their upper bounds. */
tessera_status tessera_predict(const tessera_problem* problem, const tessera_options* options, int32_t pass,
                               const char* machine, tessera_prediction* prediction);

enum { TESSERA_MACHINE_GPU = 0, TESSERA_MACHINE_CPU = 1 };

/* A machine as the model sees it; tessera/machine.hpp gives the source of each number. A core is a
 * multiprocessor of a GPU, a hardware thread of a CPU; clk is a clock of it. Shares lie in (0, 1], all else in [1e-6,
 * 1e9]. */
typedef struct tessera_machine {
    size_t struct_size;
    int32_t kind; /* TESSERA_MACHINE_GPU */
    int32_t reserved;
    char name[64];            /* "h200" */
    char title[128];          /* "NVIDIA H200 SXM, 141 GB" */
    double capability;        /* GPU: 9.0; CPU: 0 */
    double cores;             /* multiprocessors; hardware threads */
    double clock_ghz;         /* highest clock, under light load */
    double rated_clock_ghz;   /* the clock at which the maker states peak rates */
    double loaded_clock_ghz;  /* clock with all matrix units busy */
    double matrix_flop;       /* FLOP/clk/core of 16-bit products with fp32 sums */
    double warp_matrix_share; /* share of matrix_flop that mma.sync reaches */
    double fma_flop;          /* FLOP/clk/core of fp32 multiply-adds */
    double exp_rate;          /* exponentials/clk/core */
    double shared_bytes;      /* bytes/clk/core of shared memory; CPU: of the core's second-level cache */
    double shared_kib;        /* KiB of that memory for one core */
    double l2_bytes;          /* bytes/clk/core of the L2 cache; CPU: of the last-level cache */
    double l2_mib;            /* MiB of that cache */
    double reduce_bytes;      /* bytes/clk/core of fp32 reductions into L2 with all cores busy; CPU: 0 */
    double dram_gbs;          /* GB/s, peak */
    double dram_read_share;   /* share of dram_gbs that reading reaches */
    double dram_copy_share;   /* share of dram_gbs that reading and writing at once reach */
    double memory_gib;        /* GiB */
    double launch_us;         /* microseconds from one kernel to the next; CPU: to start a parallel loop */
} tessera_machine;

/* The number of machines that are known by name. */
int32_t tessera_machine_count(void);

/* Fills in the machine of this index, from 0 to under tessera_machine_count(). The caller sets
 * `machine->struct_size`. */
tessera_status tessera_machine_at(int32_t index, tessera_machine* machine);

/* Fills in the machine of this name. TESSERA_INVALID_ARGUMENT, with the names that are known, when there is none. */
tessera_status tessera_machine_named(const char* name, tessera_machine* machine);

/* tessera_predict() on a machine of the caller's own. TESSERA_BAD_DATA names a number that no machine can have. */
tessera_status tessera_predict_on(const tessera_problem* problem, const tessera_options* options, int32_t pass,
                                  const tessera_machine* machine, tessera_prediction* prediction);

/* Writes new rows of K and V into a cache in place, at slots or at lengths, with rotary embedding and RMS norm of k and
 * q where they are wanted (tessera/append.hpp says where each row goes). A row without a place is not written.
 * `options` says on how many threads of whose; `stream` is the cudaStream_t of tensors on a CUDA device. */
tessera_status tessera_append(const tessera_append_args* args, const tessera_options* options, void* stream);

/* Checks what tessera_forward() checks, the workspace aside, and runs nothing: for callers that write to a tensor
 * before the call, such as a cache of keys. Same errors. */
tessera_status tessera_check_forward(const tessera_problem* problem, const tessera_options* options,
                                     const tessera_forward_args* args);

/* Computes O = attention(Q, K, V), and LSE. `workspace` may be null when workspace_bytes is 0 and nothing is needed;
 * what the call needs of it (tessera_workspace_bytes) may not overlap a tensor. With TESSERA_BACKEND_CUDA all tensors
 * and the workspace must be on the CUDA device of q, and the work is queued on `stream` (a cudaStream_t; null: the
 * default one). Otherwise they are in host memory and `stream` is unused. */
tessera_status tessera_forward(const tessera_problem* problem, const tessera_options* options,
                               const tessera_forward_args* args, void* workspace, size_t workspace_bytes, void* stream);

/* Computes dQ, dK, dV (and dbias). */
tessera_status tessera_backward(const tessera_problem* problem, const tessera_options* options,
                                const tessera_backward_args* args, void* workspace, size_t workspace_bytes,
                                void* stream);

#ifdef __cplusplus
}
#endif
#ifdef __GNUC__
#pragma GCC visibility pop
#endif

#endif
