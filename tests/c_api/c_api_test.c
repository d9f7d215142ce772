/* SPDX-License-Identifier: Apache-2.0
 *
 * Compares forward and backward of the C ABI with loops in C that follow docs/numerics.md, and tests the calls that
 * return information. */
#include "fixture.h"

typedef struct Expected {
    double o[kSizeO]; /* [batch, len_q, heads_q, dim_v] */
    double lse[kSizeLse];
    double dq[kSizeQ];
    double dk[kSizeK];
    double dv[kSizeV]; /* [batch, len_kv, heads_kv, dim_v] */
    double dbias[kSizeBias];
    double dsinks[kHeadsQ];
} Expected;

static int visible(int i, int j) {
    const int diagonal = i + kLenKv - kLenQ;
    return j <= diagonal && j >= diagonal - 4;
}

/* P, the derivative of the softcap, and the LSE of one row. */
static double softmax_row(const Fixture* f, int b, int h, int i, double* p, double* slope) {
    const int g = h / (kHeadsQ / kHeadsKv);
    double sum = exp((double)f->sinks[h]);
    for (int j = 0; j < kLenKv; ++j) {
        double x = 0;
        for (int c = 0; c < kDim; ++c) {
            x += (double)f->q[((b * kLenQ + i) * kHeadsQ + h) * kDim + c] *
                 (double)f->k[((b * kLenKv + j) * kHeadsKv + g) * kDim + c];
        }
        const double t = tanh(x / sqrt((double)kDim) / f->problem.softcap);
        double s = f->problem.softcap * t;
        s -= (double)f->slopes[h] * fabs((double)(i + kLenKv - kLenQ - j));
        s += (double)f->bias[i * kLenKv + j];
        p[j] = visible(i, j) ? exp(s) : 0;
        slope[j] = (1 - t * t) / sqrt((double)kDim);
        sum += p[j];
    }
    for (int j = 0; j < kLenKv; ++j) p[j] /= sum;
    return log(sum);
}

static void expected_row(const Fixture* f, int b, int h, int i, Expected* e) {
    const int g = h / (kHeadsQ / kHeadsKv);
    const int lse_at = (b * kHeadsQ + h) * kLenQ + i;
    const int row = (b * kLenQ + i) * kHeadsQ + h;
    double p[kLenKv], slope[kLenKv], dp[kLenKv];
    e->lse[lse_at] = softmax_row(f, b, h, i, p, slope);
    double delta = -(double)f->dlse[lse_at];
    for (int j = 0; j < kLenKv; ++j) {
        dp[j] = 0;
        for (int c = 0; c < kDimV; ++c) {
            const double v = (double)f->v[((b * kHeadsKv + g) * kLenKv + j) * kDimV + c];
            const double d_o = (double)f->d_o[((b * kHeadsQ + h) * kLenQ + i) * kDimV + c];
            e->o[row * kDimV + c] += p[j] * v;
            e->dv[((b * kLenKv + j) * kHeadsKv + g) * kDimV + c] += p[j] * d_o;
            dp[j] += d_o * v;
        }
        delta += p[j] * dp[j];
    }
    e->dsinks[h] -= exp((double)f->sinks[h] - e->lse[lse_at]) * delta;
    for (int j = 0; j < kLenKv; ++j) {
        const double ds = p[j] * (dp[j] - delta);
        e->dbias[i * kLenKv + j] += ds;
        for (int c = 0; c < kDim; ++c) {
            const int key = ((b * kLenKv + j) * kHeadsKv + g) * kDim + c;
            e->dq[row * kDim + c] += ds * slope[j] * (double)f->k[key];
            e->dk[key] += ds * slope[j] * (double)f->q[row * kDim + c];
        }
    }
}

static void check_close(const char* name, const float* got, const double* expected, size_t count, double limit) {
    double error = 0, norm = 0;
    for (size_t i = 0; i < count; ++i) {
        error += ((double)got[i] - expected[i]) * ((double)got[i] - expected[i]);
        norm += expected[i] * expected[i];
    }
    const double relative = sqrt(error / norm);
    if (!(relative <= limit)) {
        printf("%s: relative RMSE %.3g, expected at most %.1g\n", name, relative, limit);
        ++failures;
    }
}

/* Gradients that are not wanted have rank 0: nothing is written there. */
static void check_left_out(Fixture* f, const tessera_options* options, const Expected* e) {
    memset(f->out.dq, 0xA5, sizeof f->out.dq);
    memset(f->out.dk, 0xA5, sizeof f->out.dk);
    memset(f->out.dv, 0xA5, sizeof f->out.dv);
    tessera_backward_args only_dq = f->backward;
    only_dq.dk.rank = only_dq.dv.rank = 0;
    CHECK(tessera_backward(&f->problem, options, &only_dq, f->workspace, f->workspace_bytes, NULL) == TESSERA_OK);
    check_close("dq alone", f->out.dq, e->dq, kSizeQ, 1e-5);
    const unsigned char* const left_out[] = {(const unsigned char*)f->out.dk, (const unsigned char*)f->out.dv};
    for (int i = 0; i < 2; ++i) CHECK(left_out[i][0] == 0xA5 && left_out[i][7] == 0xA5);
}

static void run_and_check(Fixture* f, const tessera_options* options, const Expected* e) {
    memset(&f->out, 0xA5, sizeof f->out);
    size_t bytes = 0;
    CHECK(tessera_workspace_bytes(&f->problem, options, TESSERA_FORWARD, &bytes) == TESSERA_OK);
    CHECK(bytes <= f->workspace_bytes);
    CHECK(tessera_forward(&f->problem, options, &f->forward, f->workspace, bytes, NULL) == TESSERA_OK);
    check_close("o", f->out.o, e->o, kSizeO, 2e-6);
    check_close("lse", f->out.lse, e->lse, kSizeLse, 2e-6);
    CHECK(tessera_workspace_bytes(&f->problem, options, TESSERA_BACKWARD, &bytes) == TESSERA_OK);
    CHECK(bytes <= f->workspace_bytes);
    CHECK(tessera_backward(&f->problem, options, &f->backward, f->workspace, bytes, NULL) == TESSERA_OK);
    check_close("dq", f->out.dq, e->dq, kSizeQ, 1e-5);
    check_close("dk", f->out.dk, e->dk, kSizeK, 1e-5);
    check_close("dv", f->out.dv, e->dv, kSizeV, 1e-5);
    check_close("dbias", f->out.dbias, e->dbias, kSizeBias, 1e-5);
    check_close("dsinks", f->out.dsinks, e->dsinks, kHeadsQ, 1e-5);
    check_left_out(f, options, e);
}

/* A parallel_for of the caller: one thread, last task first, and it counts. */
static void backwards(void* context, int64_t tasks, int32_t workers, tessera_task task, void* task_context) {
    for (int64_t t = tasks; t-- > 0;) task(task_context, t, (int32_t)(t % workers));
    *(int64_t*)context += tasks;
}

static void test_results(Fixture* f) {
    static Expected e;
    for (int b = 0; b < kBatch; ++b) {
        for (int h = 0; h < kHeadsQ; ++h) {
            for (int i = 0; i < kLenQ; ++i) expected_row(f, b, h, i, &e);
        }
    }
    run_and_check(f, NULL, &e);
    run_and_check(f, &f->options, &e);
    tessera_options reference = f->options;
    reference.backend = TESSERA_BACKEND_REFERENCE;
    run_and_check(f, &reference, &e);
    int64_t tasks = 0;
    tessera_options own_loop = f->options;
    own_loop.parallel_for = backwards;
    own_loop.parallel_for_context = &tasks;
    run_and_check(f, &own_loop, &e);
    CHECK(tasks > 0);
}

static void test_inputs_untouched(Fixture* f) {
    static Fixture before;
    memcpy(&before, f, sizeof before);
    CHECK(tessera_forward(&f->problem, NULL, &f->forward, f->workspace, f->workspace_bytes, NULL) == TESSERA_OK);
    CHECK(tessera_backward(&f->problem, NULL, &f->backward, f->workspace, f->workspace_bytes, NULL) == TESSERA_OK);
    CHECK(memcmp(f, &before, offsetof(Fixture, out)) == 0);
}

static void test_defaults(void) {
    tessera_problem p;
    memset(&p, 0xFF, sizeof p);
    CHECK(tessera_problem_init(&p, sizeof p) == TESSERA_OK);
    CHECK(p.struct_size == sizeof p && p.dtype == TESSERA_FP32 && p.batch == 1 && p.heads_q == 1 && p.heads_kv == 1);
    CHECK(p.len_q == 0 && p.len_kv == 0 && p.head_dim == 64 && p.head_dim_v == 64 && p.total_q == 0 && p.total_kv == 0);
    CHECK(p.window_left == TESSERA_UNBOUNDED && p.window_right == TESSERA_UNBOUNDED && p.causal == TESSERA_CAUSAL_NONE);
    CHECK(!p.ragged && !p.alibi && !p.bias && !p.bias_gradient && p.scale == TESSERA_DEFAULT_SCALE);
    CHECK(!(p.softcap > 0) && !(p.dropout_probability > 0) && p.dropout_seed == 0 && !p.sinks && p.page_size == 0);
    CHECK(!p.kv_lengths && !p.cache_batch_index && !p.left_padding);
}

/* A caller with a newer header: more fields, all 0. */
static void test_newer_caller(Fixture* f) {
    struct {
        tessera_problem problem;
        int64_t later;
    } newer = {.later = -1};
    CHECK(tessera_problem_init(&newer.problem, sizeof newer) == TESSERA_OK);
    CHECK(newer.later == 0 && newer.problem.struct_size == sizeof newer);
    size_t bytes = 0;
    CHECK(tessera_workspace_bytes(&newer.problem, &f->options, TESSERA_FORWARD, &bytes) == TESSERA_OK);
}

/* A caller with the first header, whose structs end before o_residual and page_size. Nothing after them is read. */
static void test_older_caller(const Fixture* f) {
    tessera_problem problem = f->problem;
    problem.sinks = problem.kv_lengths = 77;
    CHECK(tessera_problem_init(&problem, offsetof(tessera_problem, page_size)) == TESSERA_OK);
    CHECK(problem.sinks == 77 && problem.kv_lengths == 77);
    problem = f->problem;
    problem.sinks = problem.kv_lengths = 77;
    problem.struct_size = offsetof(tessera_problem, page_size);
    tessera_forward_args forward = f->forward;
    tessera_backward_args backward = f->backward;
    memset(&forward.o_residual, 0xA5, sizeof forward.o_residual);
    memset(&backward.o_residual, 0xA5, sizeof backward.o_residual);
    CHECK(tessera_forward(&problem, NULL, &forward, f->workspace, f->workspace_bytes, NULL) != TESSERA_OK);
    forward.struct_size = offsetof(tessera_forward_args, o_residual);
    backward.struct_size = offsetof(tessera_backward_args, o_residual);
    CHECK(tessera_forward(&problem, NULL, &forward, f->workspace, f->workspace_bytes, NULL) == TESSERA_OK);
    CHECK(tessera_backward(&problem, NULL, &backward, f->workspace, f->workspace_bytes, NULL) == TESSERA_OK);
    tessera_plan_info info = {.struct_size = offsetof(tessera_plan_info, o_residual), .o_residual = 42};
    CHECK(tessera_plan_query(&problem, NULL, TESSERA_FORWARD, &info) == TESSERA_OK);
    CHECK(info.kernel != NULL && info.o_residual == 42);
    info.struct_size = sizeof info;
    CHECK(tessera_plan_query(&problem, NULL, TESSERA_FORWARD, &info) == TESSERA_OK);
    CHECK(info.o_residual == 0);
}

static void test_describe(Fixture* f) {
    size_t needed = 0;
    CHECK(tessera_plan_describe(&f->problem, NULL, TESSERA_FORWARD, NULL, 0, &needed) == TESSERA_OK);
    CHECK(needed > 1);
    char* text = malloc(needed);
    CHECK(tessera_plan_describe(&f->problem, NULL, TESSERA_FORWARD, text, needed, NULL) == TESSERA_OK);
    CHECK(strlen(text) + 1 == needed);
    CHECK(strstr(text, "heads 4/2") != NULL);
    char start[9];
    CHECK(tessera_plan_describe(&f->problem, NULL, TESSERA_FORWARD, start, sizeof start, &needed) == TESSERA_OK);
    CHECK(strncmp(start, text, 8) == 0 && start[8] == '\0' && needed == strlen(text) + 1);
    free(text);
}

static void test_names(void) {
    CHECK(strcmp(tessera_version(), TESSERA_VERSION) == 0);
    const size_t count = tessera_kernel_count();
    CHECK(count >= 2);
    CHECK(strcmp(tessera_kernel_name(count - 1), "reference.backward") == 0);
    CHECK(tessera_kernel_name(count) == NULL);
}

/* The fields that the library names are those of the header, in this order. */
static void test_struct_fields(void) {
    CHECK(
        strcmp(tessera_struct_fields("tessera_problem"),
               "struct_size:size_t dtype:int32 ragged:int32 batch:int64 len_q:int64 len_kv:int64 heads_q:int64 "
               "heads_kv:int64 head_dim:int64 head_dim_v:int64 total_q:int64 total_kv:int64 window_left:int64 "
               "window_right:int64 causal:int32 alibi:int32 bias:int32 bias_gradient:int32 scale:double softcap:double "
               "dropout_probability:double dropout_seed:uint64 page_size:int64 kv_lengths:int32 "
               "cache_batch_index:int32 left_padding:int32 sinks:int32") == 0);
    CHECK(strcmp(tessera_struct_fields("tessera_forward_args"),
                 "struct_size:size_t q:tensor k:tensor v:tensor bias:tensor alibi_slopes:tensor cu_seqlens_q:tensor "
                 "cu_seqlens_kv:tensor o:tensor lse:tensor o_residual:tensor sinks:tensor kv_lengths:tensor "
                 "page_table:tensor "
                 "cache_batch_index:tensor left_padding:tensor") == 0);
    CHECK(strncmp(tessera_struct_fields("tessera_backward_args"), "struct_size:size_t q:tensor", 27) == 0);
    CHECK(strcmp(tessera_struct_fields("tessera_append_args"),
                 "struct_size:size_t rotary_interleaved:int32 reserved:int32 norm_eps:double k:tensor v:tensor "
                 "k_cache:tensor v_cache:tensor slot_mapping:tensor kv_lengths:tensor page_table:tensor "
                 "cache_batch_index:tensor cu_seqlens_k:tensor rotary_cos:tensor rotary_sin:tensor positions:tensor "
                 "q:tensor q_positions:tensor q_out:tensor k_norm:tensor q_norm:tensor") == 0);
    CHECK(tessera_struct_fields("tessera_options") == NULL && tessera_struct_fields(NULL) == NULL);
}

/* A tensor of rank 0 is not given: nothing else of it is read, and nothing is written where it points. */
static void test_rank_0(const Fixture* f) {
    static Outputs before;
    const tessera_tensor nothing = {.data = (void*)65, .dtype = 99, .device_type = 7, .device_index = -3};
    tessera_forward_args forward = f->forward;
    forward.lse = forward.o_residual = nothing;
    CHECK(tessera_forward(&f->problem, NULL, &forward, f->workspace, f->workspace_bytes, NULL) == TESSERA_OK);
    tessera_backward_args backward = f->backward;
    memset(&backward.dlse, 0, sizeof backward.dlse);
    memset(&backward.o_residual, 0, sizeof backward.o_residual);
    CHECK(tessera_backward(&f->problem, NULL, &backward, f->workspace, f->workspace_bytes, NULL) == TESSERA_OK);
    memcpy(&before, &f->out, sizeof before);
    backward.dlse = backward.o_residual = nothing;
    CHECK(tessera_backward(&f->problem, NULL, &backward, f->workspace, f->workspace_bytes, NULL) == TESSERA_OK);
    CHECK(memcmp(&f->out, &before, sizeof before) == 0);
}

/* New rows go to their slots, a row with slot -1 goes nowhere, and an error names its argument. */
static void test_append(void) {
    float k[3] = {1, 2, 3}, v[3] = {4, 5, 6}, k_cache[4] = {0}, v_cache[4] = {0};
    int64_t slots[3] = {3, -1, 0};
    tessera_append_args args = {.struct_size = sizeof args,
                                .k = tensor(k, 3, 3, 1, 1, 0),
                                .v = tensor(v, 3, 3, 1, 1, 0),
                                .k_cache = tensor(k_cache, 4, 2, 2, 1, 1),
                                .v_cache = tensor(v_cache, 4, 2, 2, 1, 1),
                                .slot_mapping = tensor(slots, 1, 3, 0, 0, 0)};
    CHECK(tessera_append(&args, NULL, NULL) == TESSERA_INVALID_ARGUMENT);
    CHECK(strcmp(tessera_last_error_argument(), "slot_mapping") == 0);
    CHECK(k_cache[3] == 0);
    args.slot_mapping.dtype = TESSERA_INT64;
    CHECK(tessera_append(&args, NULL, NULL) == TESSERA_OK);
    CHECK(k_cache[0] == 3 && k_cache[1] == 0 && k_cache[2] == 0 && k_cache[3] == 1);
    CHECK(v_cache[0] == 6 && v_cache[1] == 0 && v_cache[2] == 0 && v_cache[3] == 4);
    CHECK(tessera_append(NULL, NULL, NULL) == TESSERA_INVALID_ARGUMENT);
    args.rotary_interleaved = 2;
    CHECK(tessera_append(&args, NULL, NULL) == TESSERA_INVALID_ARGUMENT);
    CHECK(strcmp(tessera_last_error_argument(), "rotary_interleaved") == 0);
}

int main(void) {
    static Fixture f;
    CHECK(strcmp(tessera_last_error(), "") == 0 && strcmp(tessera_last_error_argument(), "") == 0);
    setup(&f);
    test_results(&f);
    test_inputs_untouched(&f);
    test_defaults();
    test_newer_caller(&f);
    test_older_caller(&f);
    test_struct_fields();
    test_append();
    test_rank_0(&f);
    test_describe(&f);
    test_names();
    free(f.workspace);
    printf("%d failures\n", failures);
    return failures == 0 ? 0 : 1;
}
