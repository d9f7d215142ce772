/* SPDX-License-Identifier: Apache-2.0
 *
 * Checks that the plan as data says what its text says, predictions for machines by name, and every wrong argument. */
#include "fixture.h"
#include "tessera/predict_ranks.h"

static Fixture f;

static void test_query(void) {
    tessera_plan_info info = {.struct_size = sizeof info, .threads = -1};
    CHECK(tessera_plan_query(&f.problem, &f.options, TESSERA_FORWARD, &info) == TESSERA_OK);
    size_t bytes = 0, needed = 0;
    CHECK(tessera_workspace_bytes(&f.problem, &f.options, TESSERA_FORWARD, &bytes) == TESSERA_OK);
    CHECK(info.workspace_bytes == bytes && info.threads == 2 && info.block_q > 0 && info.block_kv > 0);
    char text[8192], line[200];
    CHECK(tessera_plan_describe(&f.problem, &f.options, TESSERA_FORWARD, text, sizeof text, &needed) == TESSERA_OK);
    CHECK(needed <= sizeof text);
    snprintf(line, sizeof line, "%s (%s", info.kernel, info.target);
    CHECK(strstr(text, line) != NULL);
    /* All kernels of the pass but the chosen one, each with a reason that the text has too (its first word: lines
     * wrap). */
    size_t of_pass = 0;
    for (size_t i = 0; i < tessera_kernel_count(); ++i)
        if (strstr(tessera_kernel_name(i), ".forward") != NULL) ++of_pass;
    CHECK((size_t)info.refused + 1 == of_pass);
    for (int32_t i = 0; i < info.refused; ++i) {
        tessera_refusal refusal = {.struct_size = sizeof refusal};
        CHECK(tessera_plan_refusal(&f.problem, &f.options, TESSERA_FORWARD, i, &refusal) == TESSERA_OK);
        CHECK(refusal.reason[0] != '\0' && strcmp(refusal.kernel, info.kernel) != 0);
        snprintf(line, sizeof line, "%s: %.5s", refusal.kernel, refusal.reason);
        CHECK(strstr(text, line) != NULL);
        CHECK(refusal.capable == (strncmp(refusal.reason, "could run it", 12) == 0));
    }
}

static void test_kernel_asked_for(void) {
    f.options.kernel = "reference.backward";
    tessera_plan_info info = {.struct_size = sizeof info};
    CHECK(tessera_plan_query(&f.problem, &f.options, TESSERA_BACKWARD, &info) == TESSERA_OK);
    CHECK(strcmp(info.kernel, "reference.backward") == 0);
    CHECK(tessera_plan_query(&f.problem, &f.options, TESSERA_FORWARD, &info) == TESSERA_UNSUPPORTED);
    CHECK(strcmp(info.kernel, "reference.backward") == 0); /* a call that fails writes nothing */
    f.options.kernel = NULL;
}

static tessera_problem sequence(int64_t rows) {
    tessera_problem p;
    CHECK(tessera_problem_init(&p, sizeof p) == TESSERA_OK);
    p.dtype = TESSERA_BF16;
    p.batch = 1;
    p.len_q = p.len_kv = rows;
    p.heads_q = 32;
    p.heads_kv = 8;
    p.head_dim = p.head_dim_v = 128;
    p.causal = TESSERA_CAUSAL_BOTTOM_RIGHT;
    return p;
}

static void test_ranks(void) {
    tessera_problem p = sequence(16384);
    tessera_ranks ranks = {.struct_size = sizeof ranks, .ranks = 2, .o_residual = 1}, nccl = ranks, wrong = ranks;
    nccl.nccl = 1;
    tessera_ranks_prediction copied = {.struct_size = sizeof copied}, by_nccl = copied, whole = copied;
    CHECK(tessera_predict_ranks(&p, &ranks, TESSERA_FORWARD, "h200", &copied) == TESSERA_OK);
    CHECK(tessera_predict_ranks(&p, &nccl, TESSERA_FORWARD, "h200", &by_nccl) == TESSERA_OK);
    CHECK(copied.schedule == TESSERA_SCHEDULE_FA3 && copied.ms > 0 && copied.ms < copied.one_gpu_ms);
    CHECK(copied.bytes_received > 0 && copied.memory > 0 && copied.steps > 0 && copied.error > 0);
    CHECK(by_nccl.ms > copied.ms && by_nccl.one_gpu_ms == copied.one_gpu_ms && by_nccl.memory != copied.memory);
    wrong.ranks = 1;
    CHECK(tessera_predict_ranks(&p, &wrong, TESSERA_FORWARD, "h200", &whole) == TESSERA_OK);
    CHECK(whole.ms == copied.one_gpu_ms);

    const int64_t lengths[] = {1000, 8000, 7384};
    tessera_problem packed = p;
    packed.ragged = 1;
    packed.batch = 3;
    packed.len_q = packed.len_kv = 8000;
    packed.total_q = packed.total_kv = 16384;
    CHECK(tessera_predict_ranks(&packed, &ranks, TESSERA_BACKWARD, "h200", &whole) == TESSERA_INVALID_ARGUMENT);
    CHECK(strcmp(tessera_last_error_argument(), "lengths") == 0);
    ranks.lengths = lengths;
    ranks.documents = 3;
    CHECK(tessera_predict_ranks(&packed, &ranks, TESSERA_FORWARD, "h200", &whole) == TESSERA_OK);
    CHECK(whole.ms > 0 && whole.ms < copied.ms);
    CHECK(tessera_predict_ranks(&p, &ranks, TESSERA_FORWARD, "h200", &whole) == TESSERA_INVALID_ARGUMENT);

    const struct {
        const char* argument;
        int32_t ranks, nccl, steps;
    } cases[] = {{"ranks", 0, 0, 0}, {"nccl", 2, 2, 0}, {"steps", 2, 0, -1}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; ++i) {
        tessera_ranks other = {
            .struct_size = sizeof other, .ranks = cases[i].ranks, .nccl = cases[i].nccl, .steps = cases[i].steps};
        CHECK(tessera_predict_ranks(&p, &other, TESSERA_FORWARD, "h200", &whole) == TESSERA_INVALID_ARGUMENT);
        CHECK(strcmp(tessera_last_error_argument(), cases[i].argument) == 0);
    }
    CHECK(tessera_predict_ranks(&p, &nccl, 2, "h200", &whole) == TESSERA_INVALID_ARGUMENT);
    CHECK(tessera_predict_ranks(&p, &nccl, TESSERA_FORWARD, "h900", &whole) == TESSERA_INVALID_ARGUMENT);
    CHECK(tessera_predict_ranks(&p, &nccl, TESSERA_FORWARD, NULL, &whole) == TESSERA_INVALID_ARGUMENT);
    CHECK(tessera_predict_ranks(&p, NULL, TESSERA_FORWARD, "h200", &whole) == TESSERA_INVALID_ARGUMENT);
    CHECK(tessera_predict_ranks(&p, &nccl, TESSERA_FORWARD, "h200", NULL) == TESSERA_INVALID_ARGUMENT);
    p.alibi = 1;
    CHECK(tessera_predict_ranks(&p, &nccl, TESSERA_FORWARD, "h200", &whole) == TESSERA_UNSUPPORTED);
}

static void test_machines(void) {
    tessera_machine h200 = {.struct_size = sizeof h200}, other = {.struct_size = sizeof other};
    CHECK(tessera_machine_named("h200", &h200) == TESSERA_OK);
    CHECK(h200.kind == TESSERA_MACHINE_GPU && h200.cores == 132 && h200.capability == 9 && h200.launch_us > 0);
    CHECK(strcmp(h200.name, "h200") == 0 && strstr(h200.title, "H200") != NULL);
    int32_t found = 0;
    for (int32_t i = 0; i < tessera_machine_count(); ++i) {
        CHECK(tessera_machine_at(i, &other) == TESSERA_OK);
        if (memcmp(&other, &h200, sizeof other) == 0) ++found;
    }
    CHECK(found == 1);
    CHECK(tessera_machine_at(-1, &other) == TESSERA_INVALID_ARGUMENT);
    CHECK(tessera_machine_at(tessera_machine_count(), &other) == TESSERA_INVALID_ARGUMENT);
    CHECK(tessera_machine_named("h900", &other) == TESSERA_INVALID_ARGUMENT);
    CHECK(strstr(tessera_last_error(), "expected one of v100, ") != NULL);
    tessera_problem p;
    CHECK(tessera_problem_init(&p, sizeof p) == TESSERA_OK);
    p.dtype = TESSERA_BF16;
    p.len_q = p.len_kv = 4096;
    tessera_prediction by_name = {.struct_size = sizeof by_name}, on_data = {.struct_size = sizeof on_data};
    CHECK(tessera_predict(&p, NULL, TESSERA_FORWARD, "h200", &by_name) == TESSERA_OK);
    CHECK(tessera_predict_on(&p, NULL, TESSERA_FORWARD, &h200, &on_data) == TESSERA_OK);
    CHECK(memcmp(&by_name, &on_data, sizeof by_name) == 0);
    h200.dram_gbs = -1;
    CHECK(tessera_predict_on(&p, NULL, TESSERA_FORWARD, &h200, &on_data) == TESSERA_BAD_DATA);
    CHECK(strstr(tessera_last_error(), "dram_gbs") != NULL);
    memset(h200.name, 'x', sizeof h200.name);
    CHECK(tessera_predict_on(&p, NULL, TESSERA_FORWARD, &h200, &on_data) == TESSERA_INVALID_ARGUMENT);
    CHECK(tessera_predict_on(&p, NULL, TESSERA_FORWARD, NULL, &on_data) == TESSERA_INVALID_ARGUMENT);
}

static void test_predict(void) {
    tessera_problem p;
    CHECK(tessera_problem_init(&p, sizeof p) == TESSERA_OK);
    p.dtype = TESSERA_BF16;
    p.len_q = p.len_kv = 4096;
    p.heads_q = p.heads_kv = 16;
    p.head_dim = p.head_dim_v = 128;
    tessera_prediction best = {.struct_size = sizeof best}, one = {.struct_size = sizeof one};
    CHECK(tessera_predict(&p, NULL, TESSERA_FORWARD, "h200", &best) == TESSERA_OK);
    CHECK(best.schedule == TESSERA_SCHEDULE_FA3 && strcmp(best.machine, "h200") == 0 && best.bound[0] != '\0');
    /* 4 * 16 * 4096^2 * 128 FLOP in that time. */
    CHECK(fabs(best.tflops * best.ms / (4e-9 * 16 * 4096 * 4096 * 128) - 1) < 1e-6);
    CHECK(best.tflops < 989.5);
    CHECK(best.error > 0 && best.error < 0.5);
    /* A caller whose header has no `error` yet. */
    tessera_prediction older = {.struct_size = offsetof(tessera_prediction, error)};
    older.error = -1;
    CHECK(tessera_predict(&p, NULL, TESSERA_FORWARD, "h200", &older) == TESSERA_OK && older.ms == best.ms);
    CHECK(older.error == -1);
    tessera_options options = {.struct_size = sizeof options, .schedule = TESSERA_SCHEDULE_STANDARD};
    CHECK(tessera_predict(&p, &options, TESSERA_FORWARD, "h200", &one) == TESSERA_OK);
    CHECK(one.schedule == TESSERA_SCHEDULE_STANDARD && one.ms > best.ms);
    CHECK(tessera_predict(&p, NULL, TESSERA_BACKWARD, "h200", &one) == TESSERA_OK && one.ms > best.ms);
    options.schedule = TESSERA_SCHEDULE_FA3; /* an A100 has no wgmma */
    CHECK(tessera_predict(&p, &options, TESSERA_FORWARD, "a100", &one) == TESSERA_UNSUPPORTED);
    /* On a cache the kernel that plan() would choose counts, though fa3's, which runs where it is named, is faster. */
    p.kv_lengths = 1;
    p.causal = TESSERA_CAUSAL_BOTTOM_RIGHT;
    tessera_prediction cached = {.struct_size = sizeof cached};
    CHECK(tessera_predict(&p, NULL, TESSERA_FORWARD, "h200", &cached) == TESSERA_OK);
    CHECK(tessera_predict(&p, &options, TESSERA_FORWARD, "h200", &one) == TESSERA_OK);
    CHECK(cached.schedule == TESSERA_SCHEDULE_FA2 && one.schedule == TESSERA_SCHEDULE_FA3 && cached.ms > one.ms);
    p.kv_lengths = 0;
    p.causal = 0;
    /* A kernel by its name: the prediction is that of its schedule, on a machine that has such kernels. */
    tessera_options named = {.struct_size = sizeof named, .kernel = "cpu.fa1.forward"};
    CHECK(tessera_predict(&p, &named, TESSERA_FORWARD, "xeon-16", &one) == TESSERA_OK);
    CHECK(one.schedule == TESSERA_SCHEDULE_FA1);
    CHECK(tessera_predict(&p, &named, TESSERA_BACKWARD, "xeon-16", &one) == TESSERA_UNSUPPORTED);
    CHECK(tessera_predict(&p, &named, TESSERA_FORWARD, "h200", &one) == TESSERA_UNSUPPORTED);
    CHECK(strcmp(tessera_last_error_argument(), "kernel") == 0);
    p.len_q = -1;
    CHECK(tessera_predict(&p, NULL, TESSERA_FORWARD, "h200", &one) == TESSERA_INVALID_ARGUMENT);
    CHECK(strcmp(tessera_last_error_argument(), "len_q") == 0);
}

static void expect_invalid(int line, tessera_status status, const char* argument) {
    if (status == TESSERA_INVALID_ARGUMENT && strcmp(tessera_last_error_argument(), argument) == 0) return;
    printf("line %d: expected argument \"%s\" to be blamed; got status %d, \"%s\" (%s)\n", line, argument, status,
           tessera_last_error_argument(), tessera_last_error());
    ++failures;
}

static void test_errors(void) {
    const tessera_problem* p = &f.problem;
    tessera_plan_info info = {.struct_size = sizeof info};
    tessera_refusal refusal = {.struct_size = sizeof refusal};
    tessera_prediction prediction = {.struct_size = sizeof prediction};
    expect_invalid(__LINE__, tessera_plan_query(NULL, NULL, TESSERA_FORWARD, &info), "problem");
    expect_invalid(__LINE__, tessera_plan_query(p, NULL, 2, &info), "pass");
    expect_invalid(__LINE__, tessera_plan_query(p, NULL, TESSERA_FORWARD, NULL), "info");
    expect_invalid(__LINE__, tessera_plan_refusal(p, NULL, TESSERA_FORWARD, -1, &refusal), "index");
    expect_invalid(__LINE__, tessera_plan_refusal(p, NULL, TESSERA_FORWARD, 1000, &refusal), "index");
    expect_invalid(__LINE__, tessera_plan_refusal(p, NULL, TESSERA_FORWARD, 0, NULL), "refusal");
    expect_invalid(__LINE__, tessera_predict(p, NULL, -1, "h200", &prediction), "pass");
    expect_invalid(__LINE__, tessera_predict(p, NULL, TESSERA_FORWARD, "h300", &prediction), "machine");
    expect_invalid(__LINE__, tessera_predict(p, NULL, TESSERA_FORWARD, "h200", NULL), "prediction");
    tessera_options options = {.struct_size = sizeof options, .schedule = 77};
    expect_invalid(__LINE__, tessera_predict(p, &options, TESSERA_FORWARD, "h200", &prediction), "schedule");
    options.schedule = TESSERA_ANY_SCHEDULE, options.kernel = "cpu.fa9.forward";
    expect_invalid(__LINE__, tessera_predict(p, &options, TESSERA_FORWARD, "h200", &prediction), "kernel");
    info.struct_size = refusal.struct_size = prediction.struct_size = 8;
    expect_invalid(__LINE__, tessera_plan_query(p, NULL, TESSERA_FORWARD, &info), "info.struct_size");
    expect_invalid(__LINE__, tessera_plan_refusal(p, NULL, TESSERA_FORWARD, 0, &refusal), "refusal.struct_size");
    expect_invalid(__LINE__, tessera_predict(p, NULL, TESSERA_FORWARD, "h200", &prediction), "prediction.struct_size");
}

int main(void) {
    setup(&f);
    test_query();
    test_kernel_asked_for();
    test_predict();
    test_ranks();
    test_machines();
    test_errors();
    free(f.workspace);
    printf("%d failures\n", failures);
    return failures == 0 ? 0 : 1;
}
