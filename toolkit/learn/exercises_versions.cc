// SPDX-License-Identifier: Apache-2.0
//
// Lessons 11 to 16: FA2, FA3, names, libraries, and the prediction.
#include <fmt/format.h>

#include <cmath>

#include "diagnose/name.hpp"
#include "diagnose/rules.hpp"
#include "learn/lesson.hpp"
#include "learn/setting.hpp"

namespace tessera::learn {

using schedule::Operation;

Exercise loops_exercise() {
    const auto workload = workload_of(problem_of(2048, 1, 128), Schedule::fa1, {128, 128});
    // The schedule writes a state back once per tile of keys and reads it as often.
    const double written = bytes_of(workload, {Operation::store_state});
    return {
        .task =
            "fa1, one head, N = 2048, head_dim 128, tiles of 128 keys. For every tile of keys, O of all queries (128 "
            "elements of 4 bytes), m and l (4 bytes each) come from memory and go back. How many MiB are these "
            "reads and writes, over all tiles of keys?",
        .unit = "MiB",
        .value = 2 * written / kMiB,
        .tolerance = 0.005,
        .answer = fmt::format("{:g} MiB", 2 * written / kMiB),
        .why = fmt::format(
            "128 * 4 + 8 = 520 bytes a query, read and written: 1040. Times 2048 queries, times 2048 / 128 = 16 tiles: "
            "{:g} MiB. fa2 keeps O, m and l near until they are done, and moves 0 of this.",
            2 * written / kMiB),
        .mistakes = {{written / kMiB, "That counts one direction only: they are read and written."},
                     {2 * written / kMiB / 16, "That is one tile of keys; there are 16."},
                     {32, "m and l are missing: 8 bytes a query."}},
        .hint = "Bytes of one query in both directions; then queries; then tiles of keys."};
}

Exercise larger_tile_exercise() {
    const double kib = walked_bytes(Schedule::fa1, {64, 128}) / kKiB;
    return {.kind = Kind::predict,
            .task =
                "fa1's tile of 64 queries moved 865.2 KiB with tiles of 64 keys: 16 times 51, and 49.2 at the "
                "beginning and "
                "the end. With tiles of 128 keys there are 8 of them, and K and V of one count 4 KiB instead of 2. How "
                "many KiB does it move?",
            .unit = "KiB",
            .value = kib,
            .tolerance = 5e-3,
            .answer = fmt::format("{:.1f} KiB", kib),
            .why = fmt::format("One tile of keys moves 16 + 33 + 4 = 53 KiB; 8 * 53 + 49.2 = {:.1f} KiB. Half as many "
                               "round trips of O are nearly half the bytes.",
                               kib),
            .mistakes = {{8 * 53, "The beginning and the end are missing."},
                         {8 * 51 + 49.25, "K and V of one tile count twice as much."}},
            .hint = "Q is 16 KiB and O, m and l are 33 KiB for each tile of keys, as on the page.",
            .command = "build/tessera walk --len 1024 --schedule fa1 --tile 64,128"};
}

Exercise idle_sms_exercise() {
    return {
        .kind = Kind::explain,
        .task =
            "fa2 gives each tile of queries of each head to a thread block. For which calls does that leave most SMs "
            "idle, and what could one split instead?",
        .answer =
            "Calls with few queries and few heads: a model that writes one token has one tile of queries for each "
            "head. Then one splits the keys over thread blocks and merges their parts of O (Flash-Decoding).",
        .hint = "Count the thread blocks of one query with 8 heads."};
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
        .mistakes = {{(wide.gemms + wide.exponentials) / wide.gemms, "That is head_dim 128."}},
        .hint = "Add the two for one after the other; take the longer of the two for side by side."};
}

Exercise slower_memory_exercise() {
    const model::Machine& slower = *model::find_machine("h100");
    const Problem problem = problem_of(4096, 16, 128);
    const double ratio = predicted_ms(slower, problem, Schedule::fa3) / predicted_ms(h200(), problem, Schedule::fa3);
    const double standard =
        predicted_ms(slower, problem, Schedule::standard) / predicted_ms(h200(), problem, Schedule::standard);
    return {
        .kind = Kind::predict,
        .task = fmt::format(
            "An H100 has the tensor cores of an H200, but {:g} GB/s instead of {:g}. fa3, 16 heads of 128, N = 4096: "
            "how many times as long as on the H200 does it take?",
            slower.dram_gbs.value, h200().dram_gbs.value),
        .unit = "times",
        .value = ratio,
        .tolerance = 0.05,
        .answer = fmt::format("{:.2f} times", ratio),
        .why = fmt::format("fa3 is compute-bound, so the rate of the memory hardly matters. standard attention takes "
                           "{:.2f} times as long there.",
                           standard),
        .mistakes = {{h200().dram_gbs / slower.dram_gbs, "That is for a program that waits for memory alone."}},
        .hint = "Which part of the GPU bounds fa3?",
        .command = "build/tessera roofline --device h100 --len 4096 --heads 16 --head-dim 128 --schedule fa3"};
}

Exercise producer_exercise() {
    return {
        .kind = Kind::explain,
        .task =
            "FA3's producer warp only loads, and computes nothing. What do the other warps gain from giving a warp "
            "away?",
        .answer =
            "They never stop to issue loads or to compute addresses: they wait at a barrier until a tile is there. "
            "The producer needs few registers, so the consumers get its share and can hold larger tiles of S and O.",
        .hint = "Which two things does setmaxnreg and the TMA take off the consumers?"};
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
        .mistakes = {{.text = "FlashAttention-3's names say FlashAttnFwdSm90; a Hopper runs older kernels too.",
                      .word = "fa3"},
                     {.text = "FlashAttention-1's forward is called fmha_fwd_loop_kernel.", .word = "fa1"},
                     {.text = "flash_fwd_kernel is one: look at the table of names.", .word = "none"}},
        .hint = "Look for the name of the function before the first <, and for it in the table."};
}

Exercise tile_of_name_exercise() {
    const char* name =
        "void flash::flash_fwd_kernel<Flash_fwd_kernel_traits<256, 64, 32, 4, false, false, cutlass::half_t>>";
    const diagnose::NameReading reading = diagnose::read_name(name);
    return {
        .task = fmt::format("How many keys has a tile of this kernel?\n\n    {}", name),
        .unit = "keys",
        .value = static_cast<double>(reading.tile_kv),
        .answer = fmt::format("{} keys", reading.tile_kv),
        .why = fmt::format("The traits begin with head_dim {}, then {} queries and {} keys. A larger head_dim leaves "
                           "room for smaller tiles.",
                           reading.head_dim, reading.tile_q, reading.tile_kv),
        .mistakes = {{static_cast<double>(reading.tile_q), "Those are the queries."},
                     {static_cast<double>(reading.head_dim), "That is head_dim."}},
        .hint = "The picture takes such a name apart."};
}

Exercise profile_exercise() {
    return {.kind = Kind::explain,
            .task =
                "A profile shows a GEMM, a softmax kernel and a GEMM in each layer, and no name with flash. What runs, "
                "and which three things of the call would you look at first?",
            .answer =
                "Attention written out: eager code, or PyTorch's math backend. Look at whether the model calls SDPA at "
                "all (attn_implementation), at the dtype (fp32 is refused by flash), and at mask and head_dim.",
            .hint = "Who may decide against a fused kernel: the model's code, or the library?"};
}

namespace {

/// A call of PyTorch 2.11's scaled_dot_product_attention on an A100, q, k and v of 2 x 32 x 4096 x 128.
diagnose::Call call_on_a100(diagnose::Element element) {
    using namespace diagnose;
    const Operand operand{.element = element, .shape = Sizes{2, 32, 4096, 128}, .requires_grad = false};
    Call call;
    call.torch = Version{2, 11, 0};
    call.gpu.name = "NVIDIA A100";
    call.gpu.capability = 80;
    call.gpu.rocm = false;
    call.q = call.k = call.v = operand;
    call.mask_kind = MaskKind::none;
    call.is_causal = false;
    call.enable_gqa = false;
    call.deterministic = false;
    return call;
}

/// The backend that takes a call, and why flash does not.
struct Taken {
    std::string backend;
    std::string because;
};

Taken taken_of(const diagnose::Call& call) {
    std::vector<std::string> assumed;
    const diagnose::Explanation explanation = explain(assume_defaults(call, assumed));
    Taken result{.backend = explanation.taken ? name_of(*explanation.taken) : "none", .because = {}};
    for (const diagnose::Verdict& verdict : explanation.verdicts) {
        if (verdict.backend == diagnose::SdpBackend::flash && !verdict.refusals.empty())
            result.because = verdict.refusals.front()->meaning;
    }
    return result;
}

}  // namespace

Exercise family_exercise() {
    diagnose::Call call = call_on_a100(diagnose::Element::fp32);
    call.is_causal = true;
    const Taken taken = taken_of(call);
    return {
        .task =
            "PyTorch 2.11 on an A100: scaled_dot_product_attention in fp32, q, k and v of 2 x 32 x 4096 x 128, with "
            "is_causal=True and no mask tensor. Which of its backends runs: flash, efficient, math or cudnn?",
        .words = {taken.backend, "efficient", "efficient attention", "mem-efficient"},
        .answer = taken.backend,
        .why = fmt::format("flash comes first on an A100, but: {}. The next in the order takes it.", taken.because),
        .mistakes = {{.text = "Look at what it asks for: which numbers does it take?", .word = "flash"},
                     {.text = "It takes everything, but one that comes before it takes this too.", .word = "math"},
                     {.text = "On an A100 it is not the first in the order.", .word = "cudnn"},
                     {.text = "It came from there; what does PyTorch call it?", .word = "xformers"}},
        .hint = "Go through the list in its order, and look at the dtype."};
}

Exercise mask_tensor_exercise() {
    diagnose::Call call = call_on_a100(diagnose::Element::bf16);
    call.mask_kind = diagnose::MaskKind::boolean;
    call.mask.shape = diagnose::Sizes{4096, 4096};
    call.mask.requires_grad = false;
    const Taken taken = taken_of(call);
    return {
        .kind = Kind::predict,
        .task =
            "PyTorch 2.11 again, whose cuDNN took the mask tensor on an H200. The same call on an A100, in bf16 with a "
            "boolean mask of 4096 x 4096: flash, efficient, math or cudnn?",
        .words = {taken.backend, "efficient", "efficient attention", "mem-efficient"},
        .answer = taken.backend,
        .why = fmt::format("cuDNN comes first on Hopper only. On an A100 flash comes first, but: {}. The next in the "
                           "order takes it.",
                           taken.because),
        .mistakes = {{.text = "Look at what it asks for: may there be a mask tensor?", .word = "flash"},
                     {.text = "It takes everything, but one that comes before it takes this too.", .word = "math"},
                     {.text = "It comes first on Hopper; an A100 is older.", .word = "cudnn"}},
        .hint = "Which of the sentences about the list depend on the GPU?",
        .command = "build/tessera which --torch 2.11 --gpu a100 --shape 2,32,4096,128 --dtype bf16 --mask bool"};
}

Exercise receptionist_exercise() {
    return {
        .kind = Kind::explain,
        .task =
            "The same script runs on two machines of the same GPU, and attention is slower on one. The code and the "
            "data are equal. Name two things that may have sent SDPA to another kernel.",
        .answer =
            "Another release of PyTorch, or of cuDNN: order and conditions of the backends change. A backend that "
            "was switched off (an environment variable, sdpa_kernel). `tessera which` on a trace of each tells.",
        .hint = "Which of the receptionist's inputs are neither code nor data?"};
}

Exercise amdahl_exercise() {
    const measure::SweepRow row = predicted(h200(), problem_of(4096, 16, 128), {Schedule::standard, Schedule::fa3});
    const double win = row.win(row.of(Schedule::fa3));
    const double whole = measure::amdahl_speedup(0.25, win);
    return {
        .task = fmt::format(
            "On an H200, 16 heads of 128, N = 4096, the model gives {:.2f} as fa3's win over standard attention. In "
            "a model of which attention takes 25 % of the time, how many times as fast does the whole become?",
            win),
        .unit = "times",
        .value = whole,
        .tolerance = 0.01,
        .answer = fmt::format("{:.2f} times", whole),
        .why = fmt::format(
            "75 % stays, 25 % becomes 25 / {:.2f} = {:.1f} %: 1 / (0.75 + {:.3f}) = {:.2f}. Were attention free, it "
            "would be 1 / 0.75 = {:.2f}.",
            win, 25 / win, 0.25 / win, whole, 1 / 0.75),
        .mistakes = {{win, "That is attention alone; the other 75 % stays as it is."},
                     {1 / 0.75, "That is the limit, when attention takes no time at all."}},
        .hint = "How much of the old time stays, and what becomes of the rest?"};
}

Exercise a100_win_exercise() {
    const model::Machine& m = *model::find_machine("a100");
    const measure::SweepRow row = predicted(m, problem_of(4096, 16, 128), {Schedule::standard, Schedule::fa2});
    const double win = row.win(row.of(Schedule::fa2));
    const double standard = 0.7 * 43 * m.dram_gbs / 1000, fa2 = 0.6 * m.peak_tflops(DType::bf16);
    return {
        .kind = Kind::predict,
        .task = fmt::format(
            "An A100 has {:.0f} TFLOP/s and {:g} GB/s. standard reaches 0.7 of its place on the slope (43 FLOP per "
            "byte), fa2 0.6 of the roof. Predict fa2's win at N = 4096, within a fifth.",
            m.peak_tflops(DType::bf16), m.dram_gbs.value),
        .unit = "times",
        .value = win,
        .tolerance = 0.2,
        .answer = fmt::format("about {:.1f} times", win),
        .why = fmt::format("By pencil: 0.7 * 43 * {:.3f} = {:.1f} TFLOP/s and 0.6 * {:.0f} = {:.0f}, so {:.1f}. The "
                           "model says {:.2f}.",
                           m.dram_gbs / 1000, standard, m.peak_tflops(DType::bf16), fa2, fa2 / standard, win),
        .mistakes = {{1, "Which of the two waits for the memory?"}},
        .hint = "TFLOP/s of each, then the quotient.",
        .command = "build/tessera roofline --device a100 --len 4096 --heads 16 --head-dim 128 --schedule standard,fa2"};
}

Exercise no_win_exercise() {
    return {
        .kind = Kind::explain,
        .task =
            "A colleague measures FlashAttention at N = 128 with one head, finds the same time as standard "
            "attention, and says that the claims are wrong. What do you answer?",
        .answer =
            "At this size both times are that of starting kernels. S has 64 KiB and stays in the L2, and one tile of "
            "queries leaves nearly all SMs idle. The win comes with long rows and enough heads to fill the GPU.",
        .hint = "How large is S here, and how many thread blocks are there?"};
}

Exercise waves_exercise() {
    const double sms = h200().cores, blocks = 10 * 4096 / 128.0, waves = std::ceil(blocks / sms);
    const double idle = 100 * (1 - blocks / (waves * sms));
    return {
        .task = fmt::format(
            "fa3, 10 heads, N = 4096, tiles of 128 queries, {:g} SMs. Each SM works on one tile at a time, and all "
            "tiles take equally long. What percent of the places in the waves stay empty?",
            sms),
        .unit = "%",
        .value = idle,
        .tolerance = 5e-3,
        .answer = fmt::format("{:.1f} %", idle),
        .why = fmt::format("10 * 4096 / 128 = {:g} tiles, {:g} waves, {:g} places: 1 - {:g} / {:g} = {:.1f} %. With "
                           "16 heads it was 3 %.",
                           blocks, waves, waves * sms, blocks, waves * sms, idle),
        .mistakes = {{100 - idle, "Those are the places that are taken."}},
        .hint = "Count the tiles, divide by the SMs, and round up: those are the waves."};
}

Exercise fewer_heads_exercise() {
    const double ms = predicted_ms(h200(), problem_of(4096, 16, 128), Schedule::fa3);
    const double other = predicted_ms(h200(), problem_of(8192, 8, 128), Schedule::fa3);
    return {
        .kind = Kind::predict,
        .task = fmt::format(
            "The worksheet has {:.3f} ms for 16 heads at N = 4096. How many ms do you expect for 8 heads at N = 8192?",
            ms),
        .unit = "ms",
        .value = other,
        .tolerance = 0.05,
        .answer = fmt::format("{:.3f} ms", other),
        .why = fmt::format(
            "Half the heads and 4 times the scores of each are twice the work: 2 * {:.3f} = {:.3f} "
            "ms. The model says {:.3f} ms, because the launch, the last wave and the bytes of Q, K, V and O do not "
            "double.",
            ms, 2 * ms, other),
        .mistakes = {{ms, "N counts twice, the heads once."}, {4 * ms, "There are half as many heads."}},
        .hint = "Count the scores of all heads.",
        .command = "build/tessera roofline --device h200 --len 8192 --heads 8 --head-dim 128 --schedule fa3"};
}

Exercise blind_exercise() {
    return {
        .kind = Kind::explain,
        .task =
            "A model is off by 3.8 % in the median on rows that its constants were fitted on, and by more on blind "
            "ones. Which figure do you tell somebody who plans to buy GPUs, and why?",
        .answer =
            "The blind one, and its spread. Constants bend towards the rows that they are fitted on, so those errors "
            "say how well it can repeat what it has seen. Only rows that nobody had seen say how well it predicts.",
        .hint = "What would the error on the fitted rows be if there were one constant for each row?"};
}

}  // namespace tessera::learn
