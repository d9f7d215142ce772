// SPDX-License-Identifier: Apache-2.0
#include "diagnose/by_hand.hpp"

#include <algorithm>
#include <map>
#include <optional>

#include "diagnose/diagnosis.hpp"

namespace tessera::diagnose {
namespace {

// The most elementwise kernels between a GEMM and the softmax. A model that fuses nothing runs one kernel each for
// scale, mask, softcap and changes of dtype.
constexpr std::size_t kMostBetween = 8;
// The most kernels of any kind between a GEMM and the softmax. PyTorch's FlexAttention without a compiler runs 22.
constexpr std::size_t kFarthest = 64;
constexpr std::size_t kGemmsOfBias = 4;  // GEMMs of a learned position bias
// The most kernels from the first GEMM to the softmax.
constexpr std::size_t kWidest = 2 * (kFarthest + kMostBetween + 2);

using Order = std::vector<std::uint32_t>;  // runs of one stream, by start

/// Finds the next GEMM from `at` in steps of `step`, across elementwise kernels only. If shapes are known, the GEMM
/// must be batched: a plain one belongs to a layer that chooses experts, words or clusters by a softmax.
std::optional<std::size_t> gemm_beside(const Order& order, std::size_t at, int step, const RunFacts& facts,
                                       bool has_shapes) {
    for (std::size_t between = 0; between <= kMostBetween; ++between) {
        if (step < 0 ? at == 0 : at + 1 >= order.size()) return std::nullopt;
        at = step < 0 ? at - 1 : at + 1;
        if (facts.taken(order[at])) return std::nullopt;
        const Role role = facts.role(order[at]);
        if (role == Role::gemm) return has_shapes && !facts.batched(order[at]) ? std::nullopt : std::optional(at);
        if (role != Role::elementwise) return std::nullopt;
    }
    return std::nullopt;
}

/// Finds the next GEMM from `at` that `fits`, across kernels of any kind except another softmax. It skips up to
/// `others` GEMMs that do not fit, because a learned position bias has its own (Swin V2).
std::optional<std::size_t> gemm_with(const Order& order, std::size_t at, int step, const RunFacts& facts,
                                     std::size_t others, const std::function<bool(std::uint32_t)>& fits) {
    for (std::size_t between = 0; between <= kFarthest; ++between) {
        if (step < 0 ? at == 0 : at + 1 >= order.size()) return std::nullopt;
        at = step < 0 ? at - 1 : at + 1;
        const Role role = facts.role(order[at]);
        if (facts.taken(order[at]) || role == Role::softmax || role == Role::softmax_backward) return std::nullopt;
        if (role != Role::gemm) continue;
        if (fits(order[at])) return at;
        if (others == 0) return std::nullopt;
        --others;
    }
    return std::nullopt;
}

/// The last kernel of one softmax. A compiler splits a softmax if its rows are long or it computes another sum as well.
std::size_t last_piece(const Order& order, std::size_t softmax, const RunFacts& facts) {
    const Role role = facts.role(order[softmax]);
    while (softmax + 1 < order.size() && facts.compiled(order[softmax]) && facts.compiled(order[softmax + 1]) &&
           facts.role(order[softmax + 1]) == role && !facts.taken(order[softmax + 1]))
        ++softmax;
    return softmax;
}

/// Finds the attention around a softmax. Runs before index `free_from` belong to another attention; recomputing a
/// forward for its backward puts the GEMMs of both in sequence.
std::optional<ByHand> around(const Order& order, std::size_t softmax, std::size_t free_from, const RunFacts& facts) {
    const bool backward = facts.role(order[softmax]) == Role::softmax_backward;
    const Sizes scores = facts.softmax_input(order[softmax]);
    const bool has_shapes = !scores.empty();
    const auto writes = [&](std::uint32_t run) { return facts.writes(run, scores); };
    const auto reads = [&](std::uint32_t run) { return facts.reads(run, scores); };
    auto first = gemm_beside(order, softmax, -1, facts, has_shapes);
    if (!first) first = gemm_with(order, softmax, -1, facts, kGemmsOfBias, writes);
    const std::size_t end = last_piece(order, softmax, facts);
    auto last = gemm_beside(order, end, 1, facts, has_shapes);
    if (!last) last = gemm_with(order, end, 1, facts, backward ? kGemmsOfBias : 0, reads);
    if (!first || !last || *first < free_from) return std::nullopt;
    if (backward) {  // dP and dV come before it, dQ and dK after it
        const auto earlier = gemm_beside(order, *first, -1, facts, has_shapes);
        const auto later = gemm_beside(order, *last, 1, facts, has_shapes);
        if (earlier && *earlier >= free_from) first = earlier;
        if (later) last = later;
    }
    ByHand found;
    found.pass = backward ? KernelPass::backward : KernelPass::forward;
    found.first_gemm = order[*first];
    found.softmax = order[softmax];
    for (std::size_t at = *first; at <= *last; ++at) found.runs.push_back(order[at]);
    return found;
}

}  // namespace

NameReading standard_attention(Family family, KernelPass pass, Confidence confidence) {
    NameReading reading;
    reading.family = family;
    reading.role = Role::attention;
    reading.pass = pass;
    reading.confidence = confidence;
    reading.exactness = Exactness::exact;
    reading.algorithm = "standard: the N x N matrix goes through memory";
    return reading;
}

NameReading ByHandReader::read(KernelPass pass, const SoftmaxSigns& signs) {
    constexpr std::size_t kMostShapes = 4096;
    NameReading reading = standard_attention(Family::eager, pass, Confidence::likely);
    reading.library = "the model's own code";
    reading.evidence.emplace_back("a GEMM, a softmax and a GEMM follow each other on one stream");
    if (signs.scores.size() >= 3)
        reading.evidence.emplace_back("the softmax is over a tensor of rank 3 or 4, like scores");
    if (signs.twice) return of_second_order(std::move(reading), signs.scores);
    if (signs.safe) {
        reading.evidence.emplace_back("its softmax is PyTorch's for rows without a key, _safe_softmax");
        if (pass == KernelPass::backward) reading.family = Family::math;
        reading.library = pass == KernelPass::backward ? "PyTorch" : kFlexUncompiled;
    }
    if (pass == KernelPass::backward && !signs.scores.empty() && backwards_.size() < kMostShapes)
        backwards_.insert_or_assign(signs.scores, reading);
    return reading;
}

NameReading ByHandReader::of_second_order(NameReading reading, const Sizes& scores) const {
    reading.features.emplace_back("gradient of a gradient");
    reading.evidence.emplace_back("its softmax is within SoftmaxBackwardDataBackward0");
    const auto of_same_scores = backwards_.find(scores);
    if (of_same_scores == backwards_.end()) {
        reading.confidence = Confidence::unsure;
        return reading;
    }
    reading.family = of_same_scores->second.family;
    reading.library = of_same_scores->second.library;
    reading.evidence.emplace_back("an earlier backward has scores of the same shape");
    return reading;
}

std::vector<ByHand> find_by_hand(const Trace& trace, const RunFacts& facts) {
    std::map<std::uint32_t, Order> streams;
    for (std::uint32_t i = 0; i < trace.runs.size(); ++i) {
        if (trace.runs[i].count == 1) streams[trace.runs[i].stream].push_back(i);
    }
    std::vector<ByHand> found;
    for (auto& [stream, order] : streams) {
        std::sort(order.begin(), order.end(),
                  [&](std::uint32_t a, std::uint32_t b) { return trace.runs[a].start_us < trace.runs[b].start_us; });
        std::size_t free_from = 0;  // a run belongs to one attention only
        for (std::size_t at = 0; at < order.size(); ++at) {
            const Role role = facts.role(order[at]);
            if ((role != Role::softmax && role != Role::softmax_backward) || facts.taken(order[at])) continue;
            const std::size_t rank = facts.softmax_input(order[at]).size();
            if (rank != 0 && rank < 3) continue;
            auto attention = around(order, at, free_from, facts);
            if (!attention) continue;
            const auto begin = std::find(order.begin() + static_cast<std::ptrdiff_t>(at >= kWidest ? at - kWidest : 0),
                                         order.end(), attention->runs.front());
            free_from = static_cast<std::size_t>(begin - order.begin()) + attention->runs.size();
            found.push_back(std::move(*attention));
        }
    }
    return found;
}

}  // namespace tessera::diagnose
