// SPDX-License-Identifier: Apache-2.0
//
// Lessons 10 to 14: FA2, FA3, names, libraries, and the prediction.
#include <fmt/format.h>

#include "diagnose/name.hpp"
#include "diagnose/rules.hpp"
#include "learn/lesson.hpp"
#include "learn/pictures.hpp"
#include "learn/setting.hpp"
#include "measure/sweep.hpp"

namespace tessera::learn {

using schedule::Operation;

Exercise loops_exercise() {
    const auto workload = workload_of(problem_of(1024, 1, 64), Schedule::fa1, {64, 64});
    // The schedule writes a state back once per tile of keys and reads it as often.
    const double written = bytes_of(workload, {Operation::store_state});
    return {
        .task =
            "fa1, one head, N = 1024, head_dim 64, tiles of 64 keys. For every tile of keys, O of all queries (64 "
            "elements of 4 bytes), m and l (4 bytes each) come from memory and go back. How many MiB are these "
            "reads and writes, over all tiles of keys?",
        .unit = "MiB",
        .value = 2 * written / kMiB,
        .tolerance = 0.005,
        .answer = fmt::format("{:g} MiB", 2 * written / kMiB),
        .why = fmt::format(
            "64 * 4 + 8 = 264 bytes a query, read and written: 528. Times 1024 queries, times 1024 / 64 = 16 tiles: "
            "{:g} MiB. fa2 keeps O, m and l near until they are done, and moves 0 of this.",
            2 * written / kMiB),
        .mistakes = {{written / kMiB, "That counts one direction only: they are read and written."},
                     {2 * written / kMiB / 16, "That is one tile of keys; there are 16."},
                     {8, "m and l are missing: 8 bytes a query."}}};
}

Exercise overlap_exercise() {
    const OverlapClocks narrow = overlap_clocks(64), wide = overlap_clocks(128);
    const double win = (narrow.gemms + narrow.exponentials) / narrow.gemms;
    return {
        .task = fmt::format(
            "The page's tile is 128 queries x 176 keys with head_dim 128: {:g} clocks of multiplications, {:g} of "
            "exponentials. With head_dim 64 the multiplications are half, the exponentials the same. How many times as "
            "fast is perfect overlap as one after the other?",
            wide.gemms, wide.exponentials),
        .unit = "times",
        .value = win,
        .tolerance = 0.01,
        .answer = fmt::format("{:g} times", win),
        .why = fmt::format(
            "One after the other {:g} + {:g} = {:g} clocks, side by side the longer of both: {:g}. With head_dim "
            "128 it is {:g} / {:g} = {:g}.",
            narrow.gemms, narrow.exponentials, narrow.gemms + narrow.exponentials, narrow.gemms,
            wide.gemms + wide.exponentials, wide.gemms, (wide.gemms + wide.exponentials) / wide.gemms),
        .mistakes = {{(wide.gemms + wide.exponentials) / wide.gemms, "That is head_dim 128."}}};
}

Exercise kernel_name_exercise() {
    const char* name =
        "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4, false, false, "
        "cutlass::bfloat16_t>>";
    const diagnose::NameReading reading = diagnose::read_name(name);
    const std::string version = diagnose::name_of(reading.family);  // "fa2"
    return {
        .task = fmt::format(
            "A profile of a PyTorch run on an H100 shows this kernel. Which FlashAttention is it: fa1, fa2, fa3, or "
            "none?\n\n    {}",
            name),
        .words = {version, version.substr(2), diagnose::title_of(reading.family), "flash-attn 2", "flash 2", "v2"},
        .answer = version,
        .why = fmt::format(
            "flash_fwd_kernel and its traits are {}'s, and the namespace is {}. It is written for sm{}: a Hopper "
            "runs it, without what Hopper has. head_dim is {}, the tile {} x {}.",
            reading.algorithm, reading.library, reading.arch, reading.head_dim, reading.tile_q, reading.tile_kv),
        .mistakes = {
            {.text = "FlashAttention-3's names say FlashAttnFwdSm90; a Hopper runs older kernels too.", .word = "fa3"},
            {.text = "FlashAttention-1's forward is called fmha_fwd_loop_kernel.", .word = "fa1"},
            {.text = "flash_fwd_kernel is one: look at the table of names.", .word = "none"}}};
}

Exercise family_exercise() {
    using namespace diagnose;
    const Operand operand{.element = Element::bf16, .shape = Sizes{2, 32, 4096, 128}, .requires_grad = false};
    Call call;
    call.torch = Version{2, 11, 0};
    call.gpu.name = "NVIDIA A100";
    call.gpu.capability = 80;
    call.gpu.rocm = false;
    call.q = call.k = call.v = operand;
    call.mask_kind = MaskKind::boolean;
    call.is_causal = false;
    call.enable_gqa = false;
    call.mask.shape = Sizes{4096, 4096};
    call.mask.requires_grad = false;
    call.deterministic = false;
    std::vector<std::string> assumed;
    const Explanation explanation = explain(assume_defaults(call, assumed));
    const std::string taken = explanation.taken ? name_of(*explanation.taken) : "none";
    std::string because;
    for (const Verdict& verdict : explanation.verdicts) {
        if (verdict.backend == SdpBackend::flash && !verdict.refusals.empty())
            because = verdict.refusals.front()->meaning;
    }
    return {
        .task =
            "PyTorch 2.11 on an A100: scaled_dot_product_attention in bf16, q, k and v of 2 x 32 x 4096 x 128, with "
            "a boolean mask of 4096 x 4096. Which of its backends runs: flash, efficient, math or cudnn?",
        .words = {taken, "efficient", "efficient attention", "mem-efficient"},
        .answer = taken,
        .why = fmt::format("flash comes first on an A100, but: {}. The next in the order takes it.", because),
        .mistakes = {{.text = "Look at what it asks for: may there be a mask tensor?", .word = "flash"},
                     {.text = "It takes everything, but one that comes before it takes this too.", .word = "math"},
                     {.text = "On an A100 it is not the first in the order.", .word = "cudnn"},
                     {.text = "It came from there; what does PyTorch call it?", .word = "xformers"}}};
}

Exercise prediction_exercise() {
    const measure::SweepQuestion question{
        h200(), {Schedule::standard, Schedule::fa3}, {Pass::forward}, {.by = "published"}};
    const measure::SweepRow row = measure::sweep_one(problem_of(4096, 16, 128), question);
    const double win = row.win(row.of(Schedule::fa3));
    const double whole = measure::amdahl_speedup(0.4, win);
    return {
        .task = fmt::format(
            "On an H200, 16 heads of 128, N = 4096, the model gives {:.2f} as fa3's win over standard attention. In "
            "a model of which attention takes 40 % of the time, how many times as fast does the whole become?",
            win),
        .unit = "times",
        .value = whole,
        .tolerance = 0.01,
        .answer = fmt::format("{:.2f} times", whole),
        .why = fmt::format(
            "60 % stays, 40 % becomes 40 / {:.2f} = {:.1f} %: 1 / (0.6 + {:.3f}) = {:.2f}. Were attention free, it "
            "would be 1 / 0.6 = {:.2f}.",
            win, 40 / win, 0.4 / win, whole, 1 / 0.6),
        .mistakes = {{win, "That is attention alone; the other 60 % stays as it is."},
                     {1 / 0.6, "That is the limit, when attention takes no time at all."}}};
}

}  // namespace tessera::learn
