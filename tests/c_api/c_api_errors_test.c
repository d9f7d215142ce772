/* SPDX-License-Identifier: Apache-2.0
 *
 * Makes every argument wrong in turn. Checks the status and the argument's name, and that no byte of an output changed.
 */
#include "fixture.h"

static Fixture f;

typedef tessera_status (*Call)(void);

static tessera_status call_forward(void) {
    return tessera_forward(&f.problem, &f.options, &f.forward, f.workspace, f.workspace_bytes, NULL);
}
static tessera_status check_forward(void) { return tessera_check_forward(&f.problem, &f.options, &f.forward); }
static tessera_status call_backward(void) {
    return tessera_backward(&f.problem, &f.options, &f.backward, f.workspace, f.workspace_bytes, NULL);
}

static void expect(const char* what, int line, Call call, tessera_status status, const char* argument) {
    static Outputs before;
    memset(&f.out, 0xA5, sizeof f.out);
    memcpy(&before, &f.out, sizeof before);
    const tessera_status got = call();
    if (got != status || strcmp(tessera_last_error_argument(), argument) != 0 || tessera_last_error()[0] == '\0') {
        printf("line %d: %s: expected status %d, argument \"%s\"; got %d, \"%s\" (%s)\n", line, what, status, argument,
               got, tessera_last_error_argument(), tessera_last_error());
        ++failures;
    }
    if (memcmp(&f.out, &before, sizeof before) != 0) {
        printf("line %d: %s: an output changed\n", line, what);
        ++failures;
    }
    free(f.workspace);
    setup(&f);
}

/* Makes one thing wrong, calls, and puts everything right again. */
#define BOTH(wrong, argument)                                                        \
    do {                                                                             \
        wrong;                                                                       \
        expect(#wrong, __LINE__, call_forward, TESSERA_INVALID_ARGUMENT, argument);  \
        wrong;                                                                       \
        expect(#wrong, __LINE__, check_forward, TESSERA_INVALID_ARGUMENT, argument); \
        wrong;                                                                       \
        expect(#wrong, __LINE__, call_backward, TESSERA_INVALID_ARGUMENT, argument); \
    } while (0)
#define FORWARD(wrong, status, argument)                          \
    do {                                                          \
        wrong;                                                    \
        expect(#wrong, __LINE__, call_forward, status, argument); \
    } while (0)
#define BACKWARD(wrong, status, argument)                          \
    do {                                                           \
        wrong;                                                     \
        expect(#wrong, __LINE__, call_backward, status, argument); \
    } while (0)

static void test_problem(void) {
    BOTH(f.problem.struct_size = offsetof(tessera_problem, page_size) - 1, "problem.struct_size");
    BOTH(f.problem.kv_lengths = 2, "kv_lengths");
    BOTH(f.problem.page_size = 16, "page_size");
    BOTH(f.problem.cache_batch_index = 1, "cache_batch_index");
    BOTH(f.problem.left_padding = 1, "left_padding");
    BOTH(f.problem.sinks = 2, "sinks");
    BOTH(f.problem.dtype = -1, "dtype");
    BOTH(f.problem.dtype = 6, "dtype");
    BOTH(f.problem.dtype = TESSERA_INT32, "dtype");
    BOTH(f.problem.ragged = 2, "ragged");
    BOTH(f.problem.batch = -1, "batch");
    BOTH(f.problem.len_q = -1, "len_q");
    BOTH(f.problem.len_kv = INT64_MAX, "len_kv");
    BOTH(f.problem.heads_q = 3, "heads_q");
    BOTH(f.problem.heads_kv = -2, "heads_kv");
    BOTH(f.problem.head_dim = 257, "head_dim");
    BOTH(f.problem.head_dim_v = 0, "head_dim_v");
    BOTH(f.problem.total_q = 10, "total_q");
    BOTH(f.problem.window_left = -1, "window_left");
    BOTH(f.problem.window_right = -2, "window_right");
    BOTH(f.problem.causal = 3, "causal");
    BOTH(f.problem.alibi = -1, "alibi");
    BOTH(f.problem.bias = 7, "bias");
    BOTH(f.problem.bias_gradient = 2, "bias_gradient");
    BOTH(f.problem.bias = 0, "bias_gradient");
    BOTH(f.problem.scale = (double)NAN, "scale");
    BOTH(f.problem.scale = HUGE_VAL, "scale");
    BOTH(f.problem.softcap = -1, "softcap");
    BOTH(f.problem.dropout_probability = 1, "dropout_probability");
    const char* const begin = "dropout_probability: expected a probability in [0, 1), got 1";
    if (strcmp(tessera_last_error(), begin) != 0) {
        printf("line %d: expected \"%s\", got \"%s\"\n", __LINE__, begin, tessera_last_error());
        ++failures;
    }
}

static void test_options(void) {
    BOTH(f.options.struct_size = 0, "options.struct_size");
    BOTH(f.options.backend = 4, "backend");
    BOTH(f.options.backend = -1, "backend");
    BOTH(f.options.schedule = 5, "schedule");
    BOTH(f.options.kernel = "no such kernel", "kernel");
    BOTH(f.options.block_q = 64, "block_kv");
    BOTH(f.options.block_kv = -1, "block_q");
    BOTH(f.options.threads = -1, "threads");
    BOTH(f.options.threads = 1025, "threads");
    BOTH(f.options.reserved = 1, "reserved");
    FORWARD(f.options.backend = TESSERA_BACKEND_CUDA, TESSERA_DEVICE_UNAVAILABLE, "backend");
    FORWARD(f.options.kernel = "reference.backward", TESSERA_UNSUPPORTED, "");
    FORWARD((f.options.kernel = "reference.forward", f.options.block_q = 16, f.options.block_kv = 16),
            TESSERA_UNSUPPORTED, "");
}

static void test_inputs(void) {
#define INPUT(tensor, wrong, argument)                                   \
    FORWARD(f.forward.tensor wrong, TESSERA_INVALID_ARGUMENT, argument); \
    BACKWARD(f.backward.tensor wrong, TESSERA_INVALID_ARGUMENT, argument)
#define EVERY_WAY(tensor, argument)                       \
    INPUT(tensor, .data = NULL, argument);                \
    INPUT(tensor, .dtype = TESSERA_INT64, argument);      \
    INPUT(tensor, .dtype = 77, argument);                 \
    INPUT(tensor, .rank = 2, argument);                   \
    INPUT(tensor, .rank = -1, argument);                  \
    INPUT(tensor, .rank = 5, argument);                   \
    INPUT(tensor, .shape[0] += 2, argument);              \
    INPUT(tensor, .shape[0] = -1, argument);              \
    INPUT(tensor, .device_type = TESSERA_CUDA, argument); \
    INPUT(tensor, .device_type = 9, argument)
    EVERY_WAY(q, "q");
    EVERY_WAY(k, "k");
    EVERY_WAY(v, "v");
    EVERY_WAY(o, "o");
    EVERY_WAY(lse, "lse");
    EVERY_WAY(bias, "bias");
    EVERY_WAY(alibi_slopes, "alibi_slopes");
    EVERY_WAY(sinks, "sinks");
    INPUT(q, .rank = 0, "q");
    INPUT(bias, .rank = 0, "bias");
    INPUT(alibi_slopes, .rank = 0, "alibi_slopes");
    INPUT(sinks, .rank = 0, "sinks");
    INPUT(cu_seqlens_q, = f.forward.q, "cu_seqlens_q");
    INPUT(cu_seqlens_kv, = f.forward.q, "cu_seqlens_kv");
    FORWARD(f.forward.o.strides[1] = 0, TESSERA_INVALID_ARGUMENT, "o");
    FORWARD(f.forward.o.data = f.q, TESSERA_INVALID_ARGUMENT, "o");
    BACKWARD(f.backward.lse.rank = 0, TESSERA_INVALID_ARGUMENT, "lse");
}

static void test_backward_tensors(void) {
#define GRADIENT(tensor, argument)                                                        \
    BACKWARD(f.backward.tensor.data = NULL, TESSERA_INVALID_ARGUMENT, argument);          \
    BACKWARD(f.backward.tensor.dtype = TESSERA_FP64, TESSERA_INVALID_ARGUMENT, argument); \
    BACKWARD(f.backward.tensor.rank = 1, TESSERA_INVALID_ARGUMENT, argument);             \
    BACKWARD(f.backward.tensor.rank = 12, TESSERA_INVALID_ARGUMENT, argument);            \
    BACKWARD(f.backward.tensor.shape[2] += 1, TESSERA_INVALID_ARGUMENT, argument)
    GRADIENT(d_o, "do");
    GRADIENT(dlse, "dlse");
    GRADIENT(dq, "dq");
    GRADIENT(dk, "dk");
    GRADIENT(dv, "dv");
    GRADIENT(dbias, "dbias");
    BACKWARD(f.backward.d_o.rank = 0, TESSERA_INVALID_ARGUMENT, "do");
    BACKWARD(f.backward.dbias.rank = 0, TESSERA_INVALID_ARGUMENT, "dbias");
    BACKWARD(f.problem.bias_gradient = 0, TESSERA_INVALID_ARGUMENT, "dbias");
    BACKWARD(f.backward.dsinks.data = NULL, TESSERA_INVALID_ARGUMENT, "dsinks");
    BACKWARD(f.backward.dsinks.dtype = TESSERA_FP64, TESSERA_INVALID_ARGUMENT, "dsinks");
    BACKWARD(f.backward.dsinks.rank = 2, TESSERA_INVALID_ARGUMENT, "dsinks");
    BACKWARD(f.backward.dsinks.shape[0] += 1, TESSERA_INVALID_ARGUMENT, "dsinks");
    BACKWARD(f.backward.dk.data = f.out.dq, TESSERA_INVALID_ARGUMENT, "dk");
    BACKWARD(f.backward.dq.data = f.d_o, TESSERA_INVALID_ARGUMENT, "dq");
}

static tessera_status ragged_forward(void) {
    static int64_t cu_q[3];
    static int64_t cu_kv[3];
    cu_q[1] = 3, cu_q[2] = kLenQ * kBatch;
    cu_kv[1] = kLenKv, cu_kv[2] = 6; /* falls */
    f.problem.ragged = 1;
    f.problem.len_q = f.problem.total_q = kLenQ * kBatch;
    f.problem.len_kv = f.problem.total_kv = kLenKv * kBatch;
    f.forward.bias = tensor(f.bias, 4, 1, 1, 1, 1);
    f.forward.q = tensor(f.q, 3, kLenQ * kBatch, kHeadsQ, kDim, 0);
    f.forward.k = tensor(f.k, 3, kLenKv * kBatch, kHeadsKv, kDim, 0);
    f.forward.v = tensor(f.v, 3, kLenKv * kBatch, kHeadsKv, kDimV, 0);
    f.forward.o = tensor(f.out.o, 3, kLenQ * kBatch, kHeadsQ, kDimV, 0);
    f.forward.lse = tensor(f.out.lse, 2, kHeadsQ, kLenQ * kBatch, 0, 0);
    f.forward.cu_seqlens_q = tensor(cu_q, 1, kBatch + 1, 0, 0, 0);
    f.forward.cu_seqlens_q.dtype = TESSERA_INT64;
    f.forward.cu_seqlens_kv = tensor(cu_kv, 1, kBatch + 1, 0, 0, 0);
    f.forward.cu_seqlens_kv.dtype = TESSERA_INT64;
    return call_forward();
}

static void test_ragged(void) {
    expect("cu_seqlens_kv that fall", __LINE__, ragged_forward, TESSERA_INVALID_ARGUMENT, "cu_seqlens_kv");
    CHECK(strstr(tessera_last_error(), "index 2") != NULL);
}

static tessera_status null_problem(void) {
    return tessera_forward(NULL, &f.options, &f.forward, f.workspace, f.workspace_bytes, NULL);
}
static tessera_status null_forward_args(void) {
    return tessera_forward(&f.problem, NULL, NULL, f.workspace, f.workspace_bytes, NULL);
}
static tessera_status null_backward_args(void) {
    return tessera_backward(&f.problem, NULL, NULL, f.workspace, f.workspace_bytes, NULL);
}
static tessera_status null_workspace(void) {
    return tessera_forward(&f.problem, NULL, &f.forward, NULL, f.workspace_bytes, NULL);
}
static tessera_status short_workspace(void) {
    return tessera_forward(&f.problem, NULL, &f.forward, f.workspace, 1, NULL);
}
static tessera_status crooked_workspace(void) {
    return tessera_backward(&f.problem, NULL, &f.backward, (char*)f.workspace + 8, f.workspace_bytes - 8, NULL);
}
static tessera_status init_null(void) { return tessera_problem_init(NULL, sizeof f.problem); }
static tessera_status init_short(void) {
    return tessera_problem_init(&f.problem, offsetof(tessera_problem, page_size) - 8);
}
static tessera_status bytes_null(void) { return tessera_workspace_bytes(&f.problem, NULL, TESSERA_FORWARD, NULL); }
static tessera_status bytes_pass(void) {
    size_t bytes = 42;
    const tessera_status status = tessera_workspace_bytes(&f.problem, NULL, 2, &bytes);
    CHECK(bytes == 42);
    return status;
}
static tessera_status describe_null(void) {
    return tessera_plan_describe(&f.problem, NULL, TESSERA_FORWARD, NULL, 10, NULL);
}
static tessera_status unknown_field(void) {
    struct {
        tessera_problem problem;
        int64_t later;
    } newer = {.problem = f.problem, .later = 1};
    newer.problem.struct_size = sizeof newer;
    return tessera_forward(&newer.problem, NULL, &f.forward, f.workspace, f.workspace_bytes, NULL);
}

/* struct_size was never set. Whatever it holds, nothing beyond the struct is read. */
static void test_garbage_sizes(void) {
    const size_t garbage[] = {TESSERA_MAX_STRUCT_SIZE + 1, 1 << 20, SIZE_MAX / 2, SIZE_MAX - 7, SIZE_MAX};
    for (size_t i = 0; i < sizeof garbage / sizeof garbage[0]; ++i) {
        BOTH(f.problem.struct_size = garbage[i], "problem.struct_size");
        BOTH(f.options.struct_size = garbage[i], "options.struct_size");
        FORWARD(f.forward.struct_size = garbage[i], TESSERA_INVALID_ARGUMENT, "args.struct_size");
        BACKWARD(f.backward.struct_size = garbage[i], TESSERA_INVALID_ARGUMENT, "args.struct_size");
        CHECK(tessera_problem_init(&f.problem, garbage[i]) == TESSERA_INVALID_ARGUMENT);
    }
}

static void test_calls(void) {
    expect("no problem", __LINE__, null_problem, TESSERA_INVALID_ARGUMENT, "problem");
    expect("no forward args", __LINE__, null_forward_args, TESSERA_INVALID_ARGUMENT, "args");
    expect("no backward args", __LINE__, null_backward_args, TESSERA_INVALID_ARGUMENT, "args");
    expect("no workspace", __LINE__, null_workspace, TESSERA_INVALID_ARGUMENT, "workspace");
    expect("short workspace", __LINE__, short_workspace, TESSERA_WORKSPACE_TOO_SMALL, "workspace");
    expect("crooked workspace", __LINE__, crooked_workspace, TESSERA_WORKSPACE_TOO_SMALL, "workspace");
    expect("init of nothing", __LINE__, init_null, TESSERA_INVALID_ARGUMENT, "problem");
    expect("init of a short struct", __LINE__, init_short, TESSERA_INVALID_ARGUMENT, "struct_size");
    expect("no place for bytes", __LINE__, bytes_null, TESSERA_INVALID_ARGUMENT, "bytes");
    expect("unknown pass", __LINE__, bytes_pass, TESSERA_INVALID_ARGUMENT, "pass");
    expect("no buffer", __LINE__, describe_null, TESSERA_INVALID_ARGUMENT, "buffer");
    expect("a field of a newer header", __LINE__, unknown_field, TESSERA_INVALID_ARGUMENT, "problem.struct_size");
    FORWARD(f.forward.struct_size = 8, TESSERA_INVALID_ARGUMENT, "args.struct_size");
    BACKWARD(f.backward.struct_size = 8, TESSERA_INVALID_ARGUMENT, "args.struct_size");
}

static void lazy(void* context, int64_t tasks, int32_t workers, tessera_task task, void* task_context) {
    (void)context, (void)tasks, (void)workers, (void)task, (void)task_context;
}
static void wrong_worker(void* context, int64_t tasks, int32_t workers, tessera_task task, void* task_context) {
    (void)context;
    for (int64_t t = 0; t < tasks; ++t) task(task_context, t, workers);
}

static void test_parallel_for(void) {
    FORWARD(f.options.parallel_for = lazy, TESSERA_INVALID_ARGUMENT, "parallel_for");
    BACKWARD(f.options.parallel_for = wrong_worker, TESSERA_INVALID_ARGUMENT, "parallel_for");
}

int main(void) {
    setup(&f);
    CHECK(call_forward() == TESSERA_OK);
    CHECK(call_backward() == TESSERA_OK);
    test_problem();
    test_options();
    test_inputs();
    test_backward_tensors();
    test_ragged();
    test_calls();
    test_garbage_sizes();
    test_parallel_for();
    free(f.workspace);
    printf("%d failures\n", failures);
    return failures == 0 ? 0 : 1;
}
