// SPDX-License-Identifier: Apache-2.0
#include "ways_text.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>

#include "table.hpp"

namespace tessera::cli {

using diagnose::Baseline;
using diagnose::Change;
using diagnose::Cure;
using diagnose::Gain;
using diagnose::Rule;
using diagnose::SdpBackend;
using diagnose::Way;
using diagnose::Ways;

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

namespace {

/// "1. set enable_gqa=True, 2. ..."; one change has no number.
std::string changes_text(const std::vector<Change>& changes) {
    if (changes.empty()) return "nothing to change";
    if (changes.size() == 1) return changes.front().text;
    std::string text;
    for (std::size_t i = 0; i < changes.size(); ++i)
        text += fmt::format("{}({}) {}", i == 0 ? "" : "; ", i + 1, changes[i].text);
    return text;
}

/// Returns the condition under which the changes keep the result, as a sentence, or an empty text.
std::string condition_text(const std::vector<Change>& changes) {
    for (const Change& change : changes) {
        if (change.name == "drop-mask") return " That is " + change.caveat + ".";
    }
    return "";
}

std::string caveats_text(const Way& way) {
    std::vector<std::string> caveats;
    for (const Change& change : way.cure.changes) {
        if (!change.caveat.empty()) caveats.push_back(change.caveat);
    }
    caveats.insert(caveats.end(), way.gain.caveats.begin(), way.gain.caveats.end());
    return fmt::format("{}", fmt::join(caveats, "; "));
}

std::string bar_text(double error) { return fmt::format("+-{:.0f} %", std::ceil(100 * error)); }

/// "at least " or "at most " before a factor, if one of its times lacks something.
const char* bound_text(const Gain& gain, const Baseline& baseline) {
    if (gain.at_most) return "at most ";
    if (!baseline.at_least) return "";
    return gain.not_modelled.empty() ? "at least " : "about ";
}

std::string factor_text(const Gain& gain, const Baseline& baseline) {
    if (gain.call_factor <= 0) return "";
    const char* bound = bound_text(gain, baseline);
    if (gain.faster) return fmt::format("{}{:.1f} times faster", bound, gain.call_factor);
    if (baseline.at_least) return "not known to be faster: what runs now has a lower bound only";
    const double errors = std::hypot(gain.error, baseline.error);
    if (1 / gain.call_factor > 1 + errors) return fmt::format("{:.1f} times slower", 1 / gain.call_factor);
    return fmt::format("{}{:.2f} times the speed, within the errors", bound, gain.call_factor);
}

std::string time_text(const Gain& gain, const Baseline& baseline) {
    if (!gain.missing.empty()) return "no prediction: " + gain.missing;
    std::string text =
        fmt::format("{} a call, {} (as {})", milliseconds_text(gain.kernel_ms), bar_text(gain.error), gain.kernel);
    const std::string factor = factor_text(gain, baseline);
    if (!factor.empty()) text += ": " + factor;
    if (gain.step_factor > 0)
        text += fmt::format(", the trace {}{:.2f} times", gain.at_most ? "at most " : "", gain.step_factor);
    return text;
}

std::string no_way_text(const Cure& cure) {
    if (!cure.missing_fields.empty())
        return fmt::format("can't be known without {}", fmt::join(cure.missing_fields, ", "));
    std::vector<std::string> meanings;
    for (const Rule* rule : cure.blocked_by) meanings.emplace_back(rule->meaning);
    return meanings.empty() ? "nothing gets there" : fmt::format("nothing gets there: {}", fmt::join(meanings, "; "));
}

std::string baseline_text(const Baseline& baseline) {
    if (baseline.ms <= 0) return baseline.source.empty() ? "not predicted" : baseline.source;
    std::string text = fmt::format("{} a call, {}", milliseconds_text(baseline.ms), baseline.source);
    if (baseline.error > 0) text += ", " + bar_text(baseline.error);
    const std::string without = baseline.not_modelled.empty() ? "" : " without the cost of " + baseline.not_modelled;
    if (baseline.source != "measured") return text + without;
    if (baseline.predicted_ms > 0)
        text += fmt::format("; the model says {}{}, {:+.0f} %", milliseconds_text(baseline.predicted_ms), without,
                            100 * (baseline.predicted_ms / baseline.ms - 1));
    return text;
}

std::string gain_sentence(const Way& way, const Baseline& baseline) {
    const Gain& gain = way.gain;
    std::string text =
        fmt::format("by tessera's model a call takes {} ({}{}) with {}, in place of {}{} ({}{:.1f} times faster)",
                    milliseconds_text(gain.kernel_ms), bar_text(gain.error),
                    gain.not_modelled.empty() ? "" : ", without the cost of " + gain.not_modelled,
                    title_of(gain.backend), baseline.at_least ? "at least " : "", milliseconds_text(baseline.ms),
                    gain.at_most ? "at most " : "", gain.call_factor);
    if (gain.step_factor > 0)
        text += fmt::format(", and all GPU time in the trace {}{:.0f} % less", gain.at_most ? "up to " : "",
                            100 * (1 - 1 / gain.step_factor));
    return text;
}

std::string capital(std::string text) {
    if (!text.empty() && text[0] >= 'a' && text[0] <= 'z') text[0] = static_cast<char>(text[0] - 'a' + 'A');
    return text;
}

/// Why no way is called faster.
std::string none_faster(const Ways& ways) {
    std::string missing;
    bool compared = false;
    for (const Way& way : ways.all) {
        if (!way.cure.found && !way.cure.missing_fields.empty())
            return fmt::format("Whether another backend could run can't be known without {}.",
                               fmt::join(way.cure.missing_fields, ", "));
        if (!way.cure.found) continue;
        compared = compared || way.gain.call_factor > 0;
        if (missing.empty()) missing = way.gain.missing;
    }
    if (ways.baseline.ms <= 0 && !ways.baseline.source.empty())
        return fmt::format("Whether another backend would be faster can't be said: what runs is {}.",
                           ways.baseline.source);
    if (compared) return "By tessera's model no other backend of PyTorch is faster by more than the model's error.";
    if (!missing.empty())
        return fmt::format("Whether another backend would be faster can't be predicted: {}.", missing);
    const bool any = std::any_of(ways.all.begin(), ways.all.end(), [](const Way& way) { return way.cure.found; });
    return any ? "Whether another backend would be faster can't be predicted."
               : "No other backend of PyTorch can run it, whatever is changed.";
}

}  // namespace

std::string ways_sentences(const Ways& ways) {
    const Way* first = ways.first();
    if (first == nullptr) return none_faster(ways);
    std::string text =
        capital(gain_sentence(*first, ways.baseline)) +
        fmt::format(". To get there: {}.{}", changes_text(first->cure.changes), condition_text(first->cure.changes));
    if (const Way* further = ways.further())
        text += fmt::format(" With more effort, {} takes {} ({}): {}.{}", title_of(further->gain.backend),
                            milliseconds_text(further->gain.kernel_ms), bar_text(further->gain.error),
                            changes_text(further->cure.changes), condition_text(further->cure.changes));
    return text;
}

std::string ways_text(const Ways& ways, int width) {
    std::vector<std::pair<std::string, std::string>> facts{{"now", baseline_text(ways.baseline)}};
    for (const Way& way : ways.all) {
        const std::string name = name_of(way.cure.backend);
        if (!way.cure.found) {
            facts.emplace_back(name, no_way_text(way.cure));
            continue;
        }
        facts.emplace_back(name, changes_text(way.cure.changes));
        facts.emplace_back("", time_text(way.gain, ways.baseline));
        const std::string caveats = caveats_text(way);
        if (!caveats.empty()) facts.emplace_back("", "presumes: " + caveats);
    }
    return facts_text(facts, width);
}

Json json_of(const Ways& ways) {
    const auto known = [](double value) { return value > 0 ? Json(value) : Json(nullptr); };
    Json all = Json::array();
    for (const Way& way : ways.all) {
        Json changes = Json::array();
        for (const Change& change : way.cure.changes)
            changes.push_back({{"name", change.name}, {"text", change.text}, {"caveat", change.caveat}});
        Json blocked = Json::array();
        for (const Rule* rule : way.cure.blocked_by)
            blocked.push_back({{"rule", rule->name}, {"meaning", rule->meaning}});
        const Gain& gain = way.gain;
        all.push_back({{"backend", name_of(way.cure.backend)},
                       {"found", way.cure.found},
                       {"changes", changes},
                       {"blocked_by", blocked},
                       {"missing_fields", way.cure.missing_fields},
                       {"kernel", gain.kernel},
                       {"predicted_ms", known(gain.predicted_ms)},
                       {"kernel_ms", known(gain.kernel_ms)},
                       {"error", known(gain.error)},
                       {"call_factor", known(gain.call_factor)},
                       {"step_factor", known(gain.step_factor)},
                       {"at_most", gain.at_most},
                       {"faster", gain.faster},
                       {"not_modelled", gain.not_modelled},
                       {"missing", gain.missing},
                       {"caveats", gain.caveats}});
    }
    const Baseline& now = ways.baseline;
    return {{"now",
             {{"ms", known(now.ms)},
              {"error", now.error},
              {"at_least", now.at_least},
              {"source", now.source},
              {"not_modelled", now.not_modelled},
              {"predicted_ms", known(now.predicted_ms)},
              {"predicted_error", known(now.predicted_error)}}},
            {"ways", all}};
}

}  // namespace tessera::cli
