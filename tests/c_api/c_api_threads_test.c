/* SPDX-License-Identifier: Apache-2.0
 *
 * Runs every kernel of the host on a parallel_for of plain POSIX threads. The bits are those of one thread, also in
 * calls at the same time from several threads. ThreadSanitizer sees these threads. It does not see those of oneTBB,
 * which is not compiled with it.
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tessera/tessera.h"

enum { kThreads = 4, kMaxHeads = 8, kDim = 12 };

static int failures = 0;

#define CHECK(condition)                                                                               \
    do {                                                                                               \
        if (!(condition)) {                                                                            \
            printf("%s:%d: %s is false (%s)\n", __FILE__, __LINE__, #condition, tessera_last_error()); \
            ++failures;                                                                                \
        }                                                                                              \
    } while (0)

/* ---- A parallel_for of POSIX threads ---- */

typedef struct Loop {
    pthread_mutex_t lock;
    int64_t next;
    int64_t tasks;
    tessera_task task;
    void* task_context;
} Loop;

typedef struct Worker {
    Loop* loop;
    int32_t index;
    pthread_t thread;
} Worker;

static void* work(void* argument) {
    Worker* worker = argument;
    Loop* loop = worker->loop;
    for (;;) {
        pthread_mutex_lock(&loop->lock);
        const int64_t task = loop->next++;
        pthread_mutex_unlock(&loop->lock);
        if (task >= loop->tasks) return NULL;
        loop->task(loop->task_context, task, worker->index);
    }
}

static void on_threads(void* context, int64_t tasks, int32_t workers, tessera_task task, void* task_context) {
    (void)context;
    Loop loop = {.tasks = tasks, .task = task, .task_context = task_context};
    Worker all[kThreads];
    pthread_mutex_init(&loop.lock, NULL);
    for (int32_t w = 0; w < workers; ++w) {
        all[w] = (Worker){.loop = &loop, .index = w};
        if (pthread_create(&all[w].thread, NULL, work, &all[w]) != 0) abort();
    }
    for (int32_t w = 0; w < workers; ++w) pthread_join(all[w].thread, NULL);
    pthread_mutex_destroy(&loop.lock);
}

/* ---- One forward and one backward ---- */

enum { kQ, kK, kV, kDo, kBias, kInputs };
enum { kO, kLse, kDq, kDk, kDv, kDbias, kOutputs };

typedef struct Case {
    tessera_problem problem;
    tessera_tensor in[kInputs];
    tessera_tensor out[kOutputs];
} Case;

static tessera_tensor tensor(int rank, int64_t n0, int64_t n1, int64_t n2, int64_t n3) {
    tessera_tensor t = {.dtype = TESSERA_FP32, .rank = rank, .shape = {n0, n1, n2, n3}};
    int64_t stride = 1;
    for (int d = rank; d-- > 0; stride *= t.shape[d]) t.strides[d] = stride;
    t.data = calloc((size_t)stride, sizeof(float));
    if (t.data == NULL) abort();
    return t;
}

static size_t bytes_of(const tessera_tensor* t) { return (size_t)(t->shape[0] * t->strides[0]) * sizeof(float); }

static Case make_case(int64_t len_q, int64_t len_kv, int64_t heads_q, int64_t heads_kv) {
    Case c;
    tessera_problem* p = &c.problem;
    tessera_problem_init(p, sizeof *p);
    p->len_q = len_q, p->len_kv = len_kv, p->heads_q = heads_q, p->heads_kv = heads_kv;
    p->head_dim = p->head_dim_v = kDim;
    p->causal = TESSERA_CAUSAL_BOTTOM_RIGHT;
    p->bias = p->bias_gradient = 1;
    p->dropout_probability = 0.125;
    c.in[kQ] = tensor(4, 1, len_q, heads_q, kDim), c.out[kDq] = tensor(4, 1, len_q, heads_q, kDim);
    c.in[kK] = tensor(4, 1, len_kv, heads_kv, kDim), c.out[kDk] = tensor(4, 1, len_kv, heads_kv, kDim);
    c.in[kV] = tensor(4, 1, len_kv, heads_kv, kDim), c.out[kDv] = tensor(4, 1, len_kv, heads_kv, kDim);
    c.in[kDo] = tensor(4, 1, len_q, heads_q, kDim), c.out[kO] = tensor(4, 1, len_q, heads_q, kDim);
    c.in[kBias] = tensor(4, 1, heads_q, 1, len_kv), c.out[kDbias] = tensor(4, 1, heads_q, 1, len_kv);
    c.out[kLse] = tensor(3, 1, heads_q, len_q, 0);
    uint32_t state = 1;
    for (int t = 0; t < kInputs; ++t) {
        for (size_t i = 0; i < bytes_of(&c.in[t]) / sizeof(float); ++i) {
            state = state * 1664525u + 1013904223u;
            ((float*)c.in[t].data)[i] = (float)(state >> 8) / 8388608.0f - 1.0f;
        }
    }
    return c;
}

static void free_case(Case* c) {
    for (int t = 0; t < kInputs; ++t) free(c->in[t].data);
    for (int t = 0; t < kOutputs; ++t) free(c->out[t].data);
}

static void run(const Case* c, const char* kernel, int backward, int threads, tessera_parallel_for loop) {
    const tessera_options options = {
        .struct_size = sizeof options, .kernel = kernel, .threads = threads, .parallel_for = loop};
    const int32_t pass = backward ? TESSERA_BACKWARD : TESSERA_FORWARD;
    size_t bytes = 0;
    CHECK(tessera_workspace_bytes(&c->problem, &options, pass, &bytes) == TESSERA_OK);
    const size_t aligned = (bytes / TESSERA_WORKSPACE_ALIGNMENT + 1) * TESSERA_WORKSPACE_ALIGNMENT;
    void* workspace = aligned_alloc(TESSERA_WORKSPACE_ALIGNMENT, aligned);
    const tessera_forward_args forward = {.struct_size = sizeof forward,
                                          .q = c->in[kQ],
                                          .k = c->in[kK],
                                          .v = c->in[kV],
                                          .bias = c->in[kBias],
                                          .o = c->out[kO],
                                          .lse = c->out[kLse]};
    const tessera_backward_args gradients = {.struct_size = sizeof gradients,
                                             .q = c->in[kQ],
                                             .k = c->in[kK],
                                             .v = c->in[kV],
                                             .bias = c->in[kBias],
                                             .o = c->out[kO],
                                             .lse = c->out[kLse],
                                             .d_o = c->in[kDo],
                                             .dq = c->out[kDq],
                                             .dk = c->out[kDk],
                                             .dv = c->out[kDv],
                                             .dbias = c->out[kDbias]};
    if (backward) CHECK(tessera_backward(&c->problem, &options, &gradients, workspace, bytes, NULL) == TESSERA_OK);
    else CHECK(tessera_forward(&c->problem, &options, &forward, workspace, bytes, NULL) == TESSERA_OK);
    free(workspace);
}

/* Runs the kernel on one thread, then on kThreads, and compares every bit of every output. */
static void test_kernel(const Case* c, const char* kernel) {
    const int backward = strstr(kernel, ".backward") != NULL;
    void* expected[kOutputs];
    run(c, kernel, backward, 1, NULL);
    for (int t = 0; t < kOutputs; ++t) {
        expected[t] = malloc(bytes_of(&c->out[t]));
        memcpy(expected[t], c->out[t].data, bytes_of(&c->out[t]));
        const int input_too = backward && (t == kO || t == kLse);
        if (!input_too) memset(c->out[t].data, 0xA5, bytes_of(&c->out[t]));
    }
    run(c, kernel, backward, kThreads, on_threads);
    for (int t = 0; t < kOutputs; ++t) {
        const int written = backward ? t != kO && t != kLse : t == kO || t == kLse;
        if (written && memcmp(expected[t], c->out[t].data, bytes_of(&c->out[t])) != 0) {
            printf("%s, heads %d/%d: output %d differs between 1 and %d threads\n", kernel, (int)c->problem.heads_q,
                   (int)c->problem.heads_kv, t, kThreads);
            ++failures;
        }
        free(expected[t]);
    }
}

static void* run_a_case(void* argument) {
    Case c = make_case(64, 64, 2, 1);
    run(&c, NULL, 0, 1, NULL);
    free_case(&c);
    return argument;
}

static void test_calls_at_the_same_time(void) {
    pthread_t threads[kThreads];
    for (int t = 0; t < kThreads; ++t) CHECK(pthread_create(&threads[t], NULL, run_a_case, NULL) == 0);
    for (int t = 0; t < kThreads; ++t) CHECK(pthread_join(threads[t], NULL) == 0);
}

int main(void) {
    test_calls_at_the_same_time(); /* first, so that they race for anything that the first call creates */
    Case few_heads = make_case(70, 1100, 1, 1);
    Case long_queries = make_case(600, 530, 2, 1);
    Case many_heads = make_case(40, 50, kMaxHeads, kMaxHeads / 2);
    for (size_t k = 0; k < tessera_kernel_count(); ++k) {
        const char* name = tessera_kernel_name(k);
        if (strncmp(name, "cuda.", 5) == 0) continue; /* takes no host memory and no threads */
        test_kernel(&few_heads, name);
        test_kernel(&long_queries, name);
        test_kernel(&many_heads, name);
    }
    free_case(&few_heads);
    free_case(&long_queries);
    free_case(&many_heads);
    printf("%d failures\n", failures);
    return failures == 0 ? 0 : 1;
}
