// SPDX-License-Identifier: Apache-2.0
#include "which_step.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <optional>

#include "diagnose/advice.hpp"
#include "diagnose/slowed_clock.hpp"
#include "table.hpp"

namespace tessera::cli {
namespace {

using diagnose::AttentionKind;
using diagnose::Diagnosis;
using diagnose::Spread;

std::string ms_text(double us) { return milliseconds_text(us / 1000); }

std::string percent_of(double part, double whole) {
    return fmt::format("{:.1f} %", whole > 0 ? 100 * part / whole : 0);
}

/// The runs of equal calls that spread the most: those of a shape, or of the kind if no shape is known.
const Spread& widest_spread(const AttentionKind& kind) {
    const Spread* found = &kind.spread;
    for (const diagnose::ShapeSum& shape : kind.shapes) {
        if (shape.spread.outliers_us > found->outliers_us) found = &shape.spread;
    }
    return *found;
}

/// True if a few runs took so much longer than the others that a sum or an average misleads.
bool sum_misleads(const Spread& spread) {
    constexpr std::int64_t kEnoughRuns = 5;
    constexpr double kMuch = 0.1;  // of the time of all runs at the median
    const double usual = spread.median_us * static_cast<double>(spread.runs);
    return spread.runs >= kEnoughRuns && spread.outliers > 0 && spread.outliers * 4 < spread.runs &&
           spread.outliers_us > kMuch * usual;
}

/// True if the CPU took far longer in some calls than in the others, as in first calls and when a plan is built.
bool host_builds(const Spread& host) {
    constexpr double kLong = 5000;  // us
    constexpr double kFarLonger = 10;
    if (host.runs < 1 || host.worst_us < kLong) return false;
    return host.runs == 1 || host.worst_us > kFarLonger * host.median_us || host.median_us > kLong;
}

std::string spread_text(const Spread& spread) {
    return fmt::format("{} at the median, {} at worst; {} of {} took over three times the median, {} together",
                       ms_text(spread.median_us), ms_text(spread.worst_us), count_text(spread.outliers),
                       count_text(spread.runs), ms_text(spread.outliers_us));
}

bool is_by_hand(const AttentionKind& kind) {
    return kind.reading.family == diagnose::Family::eager || kind.reading.family == diagnose::Family::math;
}

std::string clock_sentence(const Diagnosis& d) {
    const diagnose::StepClock& clock = d.clock;
    if (!clock.host_bound()) return "";
    const std::string gpus =
        clock.gpus > 1 ? fmt::format("the {} GPUs were (in the mean) busy", clock.gpus) : "the GPU was busy";
    const std::string busy = fmt::format(
        "{} for {} of {} ({}), and with attention for {}", gpus, ms_text(clock.busy_us), ms_text(clock.clock_us),
        percent_of(clock.busy_us, clock.clock_us), percent_of(clock.attention_us, clock.clock_us));
    if (clock.paused()) {
        const std::string pauses =
            clock.pauses == 1 ? fmt::format("one pause of {}", ms_text(clock.longest_pause_us))
                              : fmt::format("{} pauses of up to {}", clock.pauses, ms_text(clock.longest_pause_us));
        return fmt::format(
            " The GPU stood still: between the first kernel and the last one {}. Most of the rest is {}; without it "
            "the "
            "GPU was busy {} of the time. So look at what the host did then (input pipeline, checkpoint, compilation) "
            "before any kernel.",
            busy, pauses, percent_of(clock.busy_between_pauses(), 1));
    }
    const bool by_hand = std::any_of(d.kinds.begin(), d.kinds.end(), is_by_hand);
    return fmt::format(
        " The step waits for the host: between the first kernel and the last one {}. So faster kernels of attention "
        "save "
        "at most {} of the clock. Fewer launches save more: CUDA graphs, torch.compile(mode=\"reduce-overhead\"), "
        "larger "
        "batches{}; or the input pipeline is slow.",
        busy, percent_of(clock.attention_us, clock.clock_us),
        by_hand ? ", and one kernel in place of attention's many" : "");
}

std::string steps_sentence(const Diagnosis& d) {
    const diagnose::MarkedSteps& steps = d.steps;
    if (steps.outliers == 0 || steps.outliers * 2 >= steps.count) return "";
    return fmt::format(
        " {} of the {} steps took over three times the median of {}: the longest one is ProfilerStep#{}, with {}. In "
        "the "
        "others the GPU was busy for {} of the time.",
        count_text(steps.outliers), count_text(steps.count), ms_text(steps.median_us), steps.longest,
        ms_text(steps.longest_us), percent_of(steps.usual_busy_us, steps.usual_us));
}

std::string elsewhere_sentence(const Diagnosis& d) {
    constexpr double kSmallShare = 0.1;
    if (d.gpu_us <= 0 || d.attention_us > kSmallShare * d.gpu_us || d.kinds.empty()) return "";
    std::vector<std::pair<double, const char*>> parts{
        {d.shares.gemm_us, "matrix multiplications"}, {d.shares.pointwise_us, "elementwise kernels, copies and norms"},
        {d.shares.communication_us, "communication"}, {d.shares.optimizer_us, "the optimizer"},
        {d.shares.other_us, "other kernels"},
    };
    std::stable_sort(parts.begin(), parts.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
    std::string list;
    for (const auto& [us, what] : parts) {
        if (us < 0.05 * d.gpu_us) continue;
        list += fmt::format("{}{} ({})", list.empty() ? "" : ", ", what, percent_of(us, d.gpu_us));
    }
    const std::string text =
        fmt::format(" Attention is not where this trace's time goes: without it the GPU would need {} as long.",
                    percent_of(d.gpu_us - d.attention_us, d.gpu_us));
    return list.empty() ? text : text + " The GPU's time goes to " + list + ".";
}

/// The backend that PyTorch takes for a kind's calls if K and V keep their own heads and enable_gqa is set; none if
/// that can't be known, or if nothing fast takes them.
std::optional<diagnose::SdpBackend> grouped_backend(const Diagnosis& d, const AttentionKind& kind,
                                                    const diagnose::Call& stated) {
    const auto advice = diagnose::advise(d, kind, stated);
    if (!advice || advice->shape.call.heads_in_batch) return std::nullopt;
    diagnose::Call call = advice->shape.call;
    for (diagnose::Operand* operand : {&call.k, &call.v}) {
        if (!operand->shape || operand->shape->size() != 4) return std::nullopt;
        (*operand->shape)[1] = kind.repeats.heads_kv;
        operand->strides = diagnose::packed_strides(*operand->shape);
    }
    call.enable_gqa = true;
    call.enabled = diagnose::Enabled{};
    const diagnose::Explanation explanation = diagnose::explain(call);
    if (explanation.raises || explanation.taken == diagnose::SdpBackend::math) return std::nullopt;
    return explanation.taken;
}

std::string repeats_sentence(const Diagnosis& d, const diagnose::Call& stated) {
    std::int64_t calls = 0;
    const AttentionKind* shown = nullptr;
    for (const AttentionKind& kind : d.kinds) {
        calls += kind.repeats.calls;
        if (kind.repeats.calls > (shown != nullptr ? shown->repeats.calls : 0)) shown = &kind;
    }
    if (shown == nullptr) return "";
    const std::string text = fmt::format(
        " Before {} of the calls, K and V were written {} times over (repeat_interleave or expand made {} heads of "
        "{}).",
        count_text(calls), shown->repeats.times, shown->repeats.heads_kv * shown->repeats.times,
        shown->repeats.heads_kv);
    if (const auto backend = grouped_backend(d, *shown, stated))
        return text + fmt::format(
                          " By its rules PyTorch takes them as they are, with enable_gqa=True, by {}, which reads "
                          "each head once.",
                          name_of(*backend));
    return text + " That costs memory and time; no fast backend is known to take them as they are here.";
}

std::string host_sentence(const Diagnosis& d) {
    const AttentionKind* longest = nullptr;
    for (const AttentionKind& kind : d.kinds) {
        if (host_builds(kind.host) && (longest == nullptr || kind.host.worst_us > longest->host.worst_us))
            longest = &kind;
    }
    if (longest == nullptr) return "";
    const Spread& host = longest->host;
    const bool of_cudnn = longest->reading.family == diagnose::Family::cudnn;
    const char* title = title_of(longest->reading.family);
    std::string text = host.runs == 1
                           ? fmt::format(" On the host, the only call of {} took {}", title, ms_text(host.worst_us))
                           : fmt::format(" On the host, the longest call of {} took {} ({} at the median of {})", title,
                                         ms_text(host.worst_us), ms_text(host.median_us), count_text(host.runs));
    text += of_cudnn ? ": cuDNN builds a plan for each shape that it has not met, so pad lengths to a few sizes"
                     : ": a first call loads or compiles its kernel";
    return text + "; warm up before you measure.";
}

std::string stall_sentence(const Diagnosis& d) {
    const AttentionKind* found = nullptr;
    for (const AttentionKind& kind : d.kinds) {
        const Spread& spread = widest_spread(kind);
        if (sum_misleads(spread) && (found == nullptr || spread.outliers_us > widest_spread(*found).outliers_us))
            found = &kind;
    }
    if (found == nullptr) return "";
    const std::string text = spread_text(widest_spread(*found));
    if (found->shapes.empty())
        return fmt::format(" The runs of {} differ much: {}. They stalled or had longer rows; the file has no shapes.",
                           title_of(found->reading.family), text);
    return fmt::format(
        " A sum misleads, because a few calls of one shape stalled: {} of {}. Gains count from the median.",
        title_of(found->reading.family), text);
}

std::string slowed_sentence(const Diagnosis& d, const diagnose::Call& stated) {
    const auto slowed = diagnose::slowed_clock(d, stated);
    if (!slowed) return "";
    return fmt::format(
        " All {} kinds of calls that the model predicts took {:.2f} to {:.2f} times their prediction, so the GPU may "
        "be "
        "held below its clock by a power cap, a locked clock or heat: {:.2f} GHz in place of {:.2f} would explain it "
        "(nvidia-smi -q -d CLOCK,PERFORMANCE says). tessera machine {} --set clock_ghz={:.2f} --set "
        "loaded_clock_ghz={:.2f} writes such a card for roofline --device. Predicted times are those of the full "
        "clock.",
        slowed->kinds, slowed->least, slowed->most, slowed->ghz, slowed->usual_ghz, slowed->machine, slowed->ghz,
        slowed->ghz);
}

}  // namespace

std::string step_sentences(const Diagnosis& d, const diagnose::Call& stated) {
    if (!d.timed || d.kinds.empty()) return "";
    return clock_sentence(d) + steps_sentence(d) + elsewhere_sentence(d) + slowed_sentence(d, stated) +
           stall_sentence(d) + host_sentence(d) + repeats_sentence(d, stated);
}

std::vector<std::pair<std::string, std::string>> step_facts(const AttentionKind& kind) {
    std::vector<std::pair<std::string, std::string>> facts;
    if (const Spread& spread = widest_spread(kind); sum_misleads(spread))
        facts.emplace_back("  runs", spread_text(spread));
    if (host_builds(kind.host))
        facts.emplace_back("  host", kind.host.runs == 1
                                         ? fmt::format("the only call took {} of the CPU", ms_text(kind.host.worst_us))
                                         : fmt::format("a call took {} of the CPU at the median, {} at worst, of {}",
                                                       ms_text(kind.host.median_us), ms_text(kind.host.worst_us),
                                                       count_text(kind.host.runs)));
    if (kind.repeats.calls > 0)
        facts.emplace_back("  repeated",
                           fmt::format("K and V, {} times before {} calls: {} heads in place of {}", kind.repeats.times,
                                       count_text(kind.repeats.calls), kind.repeats.heads_kv * kind.repeats.times,
                                       kind.repeats.heads_kv));
    return facts;
}

std::vector<std::pair<std::string, std::string>> step_facts(const Diagnosis& d) {
    constexpr std::int64_t kEnoughRuns = 50;  // fewer kernels are no step
    const diagnose::MarkedSteps& steps = d.steps;
    if (!d.timed || d.clock.clock_us <= 0 || (d.clock.runs < kEnoughRuns && steps.count == 0)) return {};
    std::vector<std::pair<std::string, std::string>> facts{
        {"  clock", fmt::format("{} from the first kernel to the last one", ms_text(d.clock.clock_us))},
        {"  GPU busy", fmt::format("{}, {}{}", ms_text(d.clock.busy_us), percent_of(d.clock.busy_us, d.clock.clock_us),
                                   d.clock.gpus > 1 ? fmt::format(", in the mean of {} GPUs", d.clock.gpus) : "")},
        {"  attention", fmt::format("{}, {} of the clock", ms_text(d.clock.attention_us),
                                    percent_of(d.clock.attention_us, d.clock.clock_us))}};
    if (steps.count > 0)
        facts.emplace_back(
            "  steps",
            fmt::format("{} marked by the profiler: {} at the median, {} at most (ProfilerStep#{}); in {} the GPU was "
                        "busy {}, with attention {}",
                        count_text(steps.count), ms_text(steps.median_us), ms_text(steps.longest_us), steps.longest,
                        steps.outliers == 0 ? "them" : "those of the usual time",
                        percent_of(steps.usual_busy_us, steps.usual_us),
                        percent_of(steps.usual_attention_us, steps.usual_us)));
    return facts;
}

}  // namespace tessera::cli
