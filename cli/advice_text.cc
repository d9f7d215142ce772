// SPDX-License-Identifier: Apache-2.0
#include "advice_text.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "diagnose/call_inputs.hpp"
#include "table.hpp"
#include "verdict_text.hpp"

namespace tessera::cli {
namespace {

using diagnose::Advice;
using diagnose::Faster;
using diagnose::Rule;
using diagnose::SdpBackend;
using diagnose::Standing;

constexpr double kWorthSaying = 1.05;  // smaller gains are well within the model's error

const char* title_of(SdpBackend backend) {
    switch (backend) {
        case SdpBackend::flash: return "FlashAttention-2 (PyTorch's flash backend)";
        case SdpBackend::efficient: return "memory-efficient attention";
        case SdpBackend::math: return "the math path";
        case SdpBackend::cudnn: return "cuDNN attention";
        case SdpBackend::fa3: return "FlashAttention-3";
        case SdpBackend::fa4: return "FlashAttention-4";
    }
    return "";
}

/// The best backend to describe: the first with a predicted gain, or else the first with a verdict.
const Faster* best_of(const Advice& advice) {
    const Faster* best = nullptr;
    for (const Faster& faster : advice.faster) {
        const bool gains = faster.gain.missing.empty() && faster.gain.call_factor > kWorthSaying;
        if (gains && (best == nullptr || faster.gain.call_factor > best->gain.call_factor)) best = &faster;
    }
    return best;
}

/// Asks for PyTorch's version if it is among the missing fields.
std::string version_hint(const Faster& faster) {
    for (const std::string& field : faster.verdict.missing_fields) {
        if (field.find("version") != std::string::npos) return " (give it with --torch)";
    }
    return "";
}

std::string obstacle(const Advice& advice, const Faster& faster) {
    const char* name = title_of(faster.verdict.backend);
    if (advice.by_hand) {
        return fmt::format(
            "The model computes attention with its own operators. If it called "
            "torch.nn.functional.scaled_dot_product_attention, {} could run{}.",
            name,
            faster.verdict.refusals.empty()
                ? ""
                : fmt::format(" once this is removed: {}", faster.verdict.refusals.front()->meaning));
    }
    switch (faster.verdict.standing) {
        case Standing::refused: {
            const Rule& rule = *faster.verdict.refusals.front();
            return fmt::format("{} is usually faster, but PyTorch refused it: {}. To get it: {}.", name, rule.meaning,
                               rule.cure);
        }
        case Standing::could_run:
            if (faster.verdict.backend == SdpBackend::fa3 || faster.verdict.backend == SdpBackend::fa4)
                return fmt::format("{} is usually faster and takes such calls, once it is installed and activated.",
                                   name);
            return fmt::format("{} is usually faster and takes such calls, but PyTorch tries another backend first.",
                               name);
        case Standing::taken:
            return fmt::format(
                "By its rules PyTorch would have taken {}. Another one ran, so it was switched off, or an assumption "
                "below is wrong.",
                name);
        case Standing::unknown:
            return fmt::format("{} is usually faster; why it did not run can't be known without {}{}.", name,
                               fmt::join(faster.verdict.missing_fields, ", "), version_hint(faster));
    }
    return "";
}

bool has(const Advice& advice, SdpBackend backend) {
    return std::any_of(advice.faster.begin(), advice.faster.end(),
                       [&](const Faster& faster) { return faster.verdict.backend == backend; });
}

std::string gain_sentence(const Advice& advice, const Faster& faster) {
    const double count = static_cast<double>(std::max<std::int64_t>(advice.shape.count, 1));
    std::string text = fmt::format(" By tessera's model a call would take {} in place of {} ({:.1f} times faster)",
                                   milliseconds_text(faster.gain.predicted_ms),
                                   milliseconds_text(advice.shape.us / 1000 / count), faster.gain.call_factor);
    if (faster.gain.step_factor > 0)
        text +=
            fmt::format(", and everything in the trace {:.0f} % less time", 100 * (1 - 1 / faster.gain.step_factor));
    return text + ".";
}

}  // namespace

std::string advice_sentences(const Advice& advice) {
    if (const Faster* best = best_of(advice)) return " " + obstacle(advice, *best) + gain_sentence(advice, *best);
    for (const Faster& faster : advice.faster) {
        if (faster.verdict.standing == Standing::unknown || !faster.gain.missing.empty()) continue;
        return fmt::format(" No faster backend is known for these calls: by tessera's model {} would not be faster.",
                           title_of(faster.verdict.backend));
    }
    if (advice.faster.empty()) return " PyTorch has no faster backend for this GPU.";
    return " " + obstacle(advice, advice.faster.front());
}

std::string advice_text(const Advice& advice, int width) {
    if (advice.faster.empty()) return "";
    std::string text = "  why not faster\n";
    std::vector<std::pair<std::string, std::string>> facts;
    for (const Faster& faster : advice.faster) {
        std::string name = fmt::format("  {}", name_of(faster.verdict.backend));
        if (faster.verdict.refusals.empty()) facts.emplace_back(name, obstacle(advice, faster));
        for (const Rule* rule : faster.verdict.refusals) {
            const std::string words = rule->text[0] == '\0' ? "" : fmt::format("\"{}\": ", rule->text);
            const bool flash_has_it = rule->backend != faster.verdict.backend && has(advice, rule->backend);
            facts.emplace_back(name, flash_has_it
                                         ? fmt::format("refused for the same reason as {}", name_of(rule->backend))
                                         : fmt::format("{}{}. Cure: {}.", words, rule->meaning, rule->cure));
            name.clear();
        }
    }
    if (!advice.explanation.assumed.empty())
        facts.emplace_back("  assumed", fmt::format("{}", fmt::join(advice.explanation.assumed, "; ")));
    std::vector<diagnose::Gain> gains;
    for (const Faster& faster : advice.faster) gains.push_back(faster.gain);
    text += facts_text(facts, width);
    const std::string table = gain_text(gains, width - 2);
    for (std::size_t begin = 0; begin < table.size();) {
        const std::size_t end = table.find('\n', begin) + 1;
        text += "  " + table.substr(begin, end - begin);
        begin = end;
    }
    return text;
}

Json json_of(const Advice& advice) {
    Json json = json_of(advice.explanation);
    json["ran"] = advice.by_hand ? "by hand" : name_of(advice.ran);
    json["call"] = text_of(advice.shape.call);
    json["gains"] = Json::array();
    for (const Faster& faster : advice.faster) json["gains"].push_back(json_of(faster.gain));
    return json;
}

}  // namespace tessera::cli
