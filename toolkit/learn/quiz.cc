// SPDX-License-Identifier: Apache-2.0
#include "learn/quiz.hpp"

#include <fmt/format.h>

#include "learn/estimate.hpp"

namespace tessera::learn {
namespace {

constexpr Question kRecap1[] = {
    {"Which two tables does standard attention write to memory and read back?",
     "The scores S and the weights P, both N x N.", 1},
    {"What is arithmetic intensity, and what does the ridge of a GPU say?",
     "FLOP for each byte that is moved. Left of the ridge a program waits for memory, right of it for the tensor "
     "cores.",
     1},
    {"Which memory does a thread block have for itself, and why is it fast?",
     "Shared memory, SRAM on the chip. It is small and lies inside the multiprocessor.", 2},
    {"The text becomes twice as long. How many times as many scores does FlashAttention compute?",
     "Four times as many, so the time grows fourfold. The memory beside Q, K, V and O only doubles.", 3, 4, "4"},
    {"What is the same in all schedules, and what differs?",
     "Every score and every weight is the same number. The order in which they are made differs, and where they lie in "
     "between.",
     4},
};

constexpr Question kRecap2[] = {
    {"Three things are kept for each query while keys stream past. Which?",
     "m, the largest score so far; l, the sum of exp(s - m); O, the sum of exp(s - m) v.", 6},
    {"The weights are powers of two, and m rises from 3 to 5. By which number are l and O multiplied?",
     "Both are multiplied by 2^(3 - 5) = 1/4, and then the new tile is added.", 7, 0.25, "1/4"},
    {"Why does a larger tile of queries save traffic, and what stops it from growing?",
     "K and V are read once for each tile of queries. Shared memory and registers limit the tile.", 5},
    {"How does the backward get P back?",
     "P = exp(S - LSE), tile by tile: S again from Q and K, and the LSE from the forward.", 8},
    {"Which tiles of a causal mask are full, partial and skipped?",
     "Those below the diagonal are full, those that the diagonal cuts are partial, those above are skipped.", 10},
};

constexpr Question kRecap3[] = {
    {"Which loop is outside in FA1, and which in FA2?",
     "FA1: tiles of keys. FA2: tiles of queries, so that O is written once.", 11},
    {"Why does FA2 fill a GPU with few heads better than FA1?",
     "Tiles of queries are independent, so each can be a thread block of its own.", 11},
    {"What does \"ping-pong\" mean in FA3?",
     "Two warpgroups take turns: while one takes exponentials, the other's GEMMs run.", 12},
    {"A profiler shows a kernel's name. What can you read from it?",
     "The family, often the dtype, head_dim, tile and the generation of the GPU that it was compiled for.", 13},
    {"Why may PyTorch's SDPA not take FlashAttention although it is there?",
     "A mask tensor, a dtype, a head_dim or the GPU may rule it out, or another backend is asked first.", 14},
};

constexpr Question kRecap4[] = {
    {"What are the two roofs of a roofline, and what is each line made of?",
     "The slope is the memory's rate times the intensity, the flat roof is the peak of the tensor cores. An older "
     "instruction has a lower roof of its own.",
     15},
    {"How do you predict the win without running anything?",
     "The time of standard attention from its bytes, that of FlashAttention from its FLOP, each at the share of its "
     "roof that good kernels reach.",
     15},
    {"When is the win small?",
     "In short sequences, where the launch of a kernel takes as long as its work. In decoding too, where every "
     "schedule has to read the whole cache.",
     15},
    {"Attention takes a tenth of your step and becomes four times as fast. How many times as fast is the step?",
     "By Amdahl's law 1 / (0.9 + 0.1 / 4) = 1.08, which is little.", 15, 1 / (0.9 + 0.1 / 4), "1.08"},
    {"How do you know how far a prediction may be off?",
     "From its error on rows that no constant was fitted on, of the same kind of call and card.", 16},
};

constexpr Question kRecap5[] = {
    {"Why does decoding take the same time with every order of the work, and what helps?",
     "It reads the cache once, and that is its time. Splitting the keys over thread blocks lets all multiprocessors "
     "read.",
     17},
    {"Two workers return O and LSE. How do you merge them?",
     "Each O is weighted with exp(its LSE), divided by the sum of both exponentials.", 17},
    {"Which sizes of a model decide how large its cache is, and what do pages save?",
     "The number of layers, the number of heads of keys, and head_dim. Pages save the memory that would be reserved "
     "and stay empty.",
     18},
    {"Why does an outlier of q hurt in fp8 although it is itself rounded well?",
     "It multiplies the rounding errors of the keys, and an absolute error of a score is a factor of a weight.", 19},
    {"Why may FA4 leave m as it is when the maximum rises, and what does a sink add to l?",
     "m cancels in O / l, so any number near the maximum will do. A sink adds exp(sink - m) and has no value.", 20},
};

constexpr Question kExam[] = {
    {"Why is standard attention slow on a GPU?",
     "It is memory-bound. It writes the N x N scores and weights to HBM and reads them back, and the softmax between "
     "them does almost no arithmetic. Its arithmetic intensity lies left of the ridge of the roofline, so the tensor "
     "cores wait.",
     1},
    {"What does FlashAttention save, and what not?",
     "It saves memory traffic and the memory for N x N numbers, which becomes linear in N. It does not save FLOP: the "
     "time stays quadratic in N.",
     3},
    {"Derive the online softmax. Why is it exact?",
     "Keep m, l = the sum of exp(s - m), and O = the sum of exp(s - m) v. When m rises to m', multiply l and O by "
     "exp(m - m'). Numerator and denominator get the same factor, so O / l is the softmax of all scores seen.",
     6},
    {"Why subtract the maximum at all?",
     "exp of a large score overflows. Relative to the maximum every exponential is at most one, and the quotient is "
     "the same.",
     6},
    {"What is the IO complexity of FlashAttention?",
     "With a fast memory of M numbers it needs of the order of N^2 d^2 / M accesses of HBM, if M lies between d and "
     "N d. Standard attention needs N d + N^2. Larger tiles mean fewer passes over K and V.",
     5},
    {"What limits the size of a tile?",
     "Shared memory holds the tiles of Q, K and V, and registers hold the scores and O. Larger tiles also leave fewer "
     "thread blocks to fill the GPU, and waste more work at the edge of a mask.",
     5},
    {"What does the forward keep for the backward, and why is that enough?",
     "O and one number a row, LSE = m + ln l. A tile of S is made again from Q and K, and P = exp(S - LSE) needs no "
     "other tile. Recomputing a weight is cheaper than fetching it from HBM.",
     8},
    {"What is delta?",
     "dO . O, one number a row. The gradient of the softmax is dS = P (dP - the sum of P dP over the row), and that "
     "sum is dO . O, so it needs no pass over the keys.",
     9},
    {"Why can a backward give other bits in each run, and how is that avoided?",
     "Blocks of keys run at the same time and all add to dQ. With atomic adds the order of the sum is chance, and "
     "rounding depends on it. A fixed order (semaphores), or a kernel of its own for dQ, gives the same bits.",
     9},
    {"What did FlashAttention-2 change?",
     "The loops are swapped: a block of queries stays and keys stream past, so O is written once. Blocks of queries "
     "are independent, which gives parallelism over the sequence. Warps split queries and not keys (split-Q), so they "
     "need not exchange sums. There are also fewer FLOP outside of GEMMs.",
     11},
    {"What did FlashAttention-3 add on Hopper?",
     "Warp specialization: a producer loads by TMA, consumers compute by wgmma, and registers move from one to the "
     "other (setmaxnreg). Ping-pong: one warpgroup's softmax runs behind the other's GEMMs. Inside a warpgroup, the "
     "GEMM of the next tile overlaps with the softmax of this one.",
     12},
    {"What does a causal mask save?",
     "Tiles above the diagonal are skipped, which is nearly half of the work in long sequences. Only tiles on the "
     "diagonal run mask code. With unequal lengths one must say which corner the diagonal is aligned with.",
     10},
    {"Why does decoding gain little from FlashAttention, and what helps?",
     "One query reads all keys and values once: the time is that of reading the KV cache, whatever the kernel. With "
     "few sequences the blocks of queries don't fill the GPU, so kernels split the keys over thread blocks "
     "(Flash-Decoding, split-KV).",
     17},
    {"How are the parts of split keys merged?",
     "Each part gives its O and its LSE. The merged LSE is the log of the sum of exp(LSE) of the parts, and each O is "
     "weighted with exp(its LSE - the merged LSE). It is the online softmax again, with parts for tiles.",
     17},
    {"What does GQA change?",
     "Several query heads share one head of K and V. The cache becomes smaller by that ratio, and in decoding the "
     "queries of a group use the same bytes, so the arithmetic intensity rises. Kernels pack a group's queries into "
     "one tile (PackGQA).",
     18},
    {"What is a paged KV cache?",
     "Keys and values lie in pages of a fixed number of tokens, and each sequence has a table of pages that says "
     "where. Memory is not reserved for the longest sequence, and sequences share pages of a common prefix. The kernel "
     "looks up the pages of each tile of keys.",
     18},
    {"What is hard about attention in fp8?",
     "Numbers in e4m3 have three bits after the point. A channel with outliers in Q and K has products with large "
     "absolute errors, and errors of scores become factors of weights. FlashAttention-3 turns Q and K by a "
     "random orthogonal matrix (incoherent processing), which spreads outliers and leaves Q K^T as it is, and scales "
     "by block. The second GEMM wants V in another layout than that of bf16.",
     19},
    {"What is the bottleneck on Blackwell?",
     "Tensor cores do twice as much in a clock, and the units for exponentials do not. FlashAttention-4 computes a "
     "part of the exponentials by polynomials on the FMA units and rescales only when the maximum has risen by much. "
     "Accumulators lie in tensor memory and not in registers.",
     20},
    {"Windows, sinks, dropout: what does each need of a kernel?",
     "A sliding window skips tiles on both sides of the diagonal. An attention sink is a learned logit that joins the "
     "sum of the softmax and has no value, so some weight can go nowhere. Dropout draws its mask from a counter-based "
     "generator (Philox) by the index of the element, so that the backward draws it again and nothing is stored.",
     21},
    {"How much faster will your model be?",
     "Predict attention first: FLOP over the reached rate on one side, bytes over the reached bandwidth on the other. "
     "Then Amdahl: 1 / (1 - a + a / w), for attention's share a and its win w. If the share is small, attention is not "
     "the problem.",
     15},
};

constexpr Quiz kQuizzes[] = {
    {"recap 1", "Five questions after part 1", kRecap1},     {"recap 2", "Five questions after part 2", kRecap2},
    {"recap 3", "Five questions after part 3", kRecap3},     {"recap 4", "Five questions after part 4", kRecap4},
    {"recap 5", "Five questions after part 5", kRecap5},     {"exam", "Twenty questions of an interviewer", kExam},
    {"estimate", "FlashAttention's win for your model", {}},
};

}  // namespace

int Quiz::count() const { return estimates() ? kEstimates : static_cast<int>(questions.size()); }

std::span<const Quiz> quizzes() { return kQuizzes; }

Exercise exercise_of(const Question& question) {
    Exercise exercise{.kind = Kind::explain,
                      .task = question.task,
                      .answer = question.answer,
                      .hint = question.lesson > 0 ? fmt::format("Lesson {} has it.", question.lesson)
                                                  : "It goes beyond the lessons."};
    if (question.shown != nullptr) {
        exercise.kind = Kind::compute;
        exercise.value = question.value;
        exercise.tolerance = 0.005;
        exercise.answer = question.shown;
        exercise.why = question.answer;
    }
    return exercise;
}

}  // namespace tessera::learn
