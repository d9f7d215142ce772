// SPDX-License-Identifier: Apache-2.0
#include "verdict_text.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "table.hpp"

namespace tessera::cli {
namespace {

using diagnose::Explanation;
using diagnose::Gain;
using diagnose::Rule;
using diagnose::SdpBackend;
using diagnose::Standing;
using diagnose::Verdict;

const Verdict* verdict_of(const Explanation& explanation, SdpBackend backend) {
    for (const Verdict& verdict : explanation.verdicts) {
        if (verdict.backend == backend) return &verdict;
    }
    return nullptr;
}

std::string lines(const std::string& text, int width) {
    std::string result;
    for (const std::string& line : wrapped(text, static_cast<std::size_t>(width))) result += line + "\n";
    return result;
}

std::string names(const std::vector<SdpBackend>& backends) {
    std::string text;
    for (const SdpBackend backend : backends) text.append(text.empty() ? "" : ", ").append(name_of(backend));
    return text;
}

/// PyTorch's text in quotes, its meaning, and the change that avoids the refusal.
std::string reason(const Rule& rule) {
    const std::string words = rule.text[0] == '\0' ? "" : fmt::format("\"{}\": ", rule.text);
    return fmt::format("{}{}. Cure: {}.", words, rule.meaning, rule.cure);
}

/// True if the backend is FA3 or FA4, which replace flash and share its checks.
bool replaces_flash(SdpBackend backend) { return backend == SdpBackend::fa3 || backend == SdpBackend::fa4; }

std::string because(const Explanation& explanation, const Verdict& verdict) {
    switch (verdict.standing) {
        case Standing::taken:
            return verdict.backend == explanation.verdicts.front().backend
                       ? "the first in the order, and its checks pass"
                       : "its checks pass, and PyTorch refuses those before it";
        case Standing::could_run:
            if (replaces_flash(verdict.backend))
                return fmt::format("runs instead of flash after activate_flash_attention_impl(\"{}\")",
                                   name_of(verdict.backend));
            return explanation.taken ? "its checks pass, but another one comes first" : "its checks pass";
        case Standing::refused: return "";
        case Standing::unknown:
            return fmt::format("can't be known without {}", fmt::join(verdict.missing_fields, ", "));
    }
    return "";
}

std::vector<std::string> reasons(const Verdict& verdict) {
    std::vector<std::string> texts;
    for (const Rule* rule : verdict.refusals) {
        if (rule->backend == verdict.backend) texts.push_back(reason(*rule));
        else if (texts.empty()) texts.emplace_back("Refused for the same reason as flash.");
    }
    return texts;
}

void add_rows(Table& table, const Explanation& explanation, const Verdict& verdict) {
    std::string backend = name_of(verdict.backend);
    std::string standing = name_of(verdict.standing);
    if (verdict.refusals.empty()) return table.add({backend, standing, because(explanation, verdict)});
    for (const std::string& text : reasons(verdict)) {
        table.add({backend, standing, text});
        backend.clear(), standing.clear();
    }
}

/// The Python call that selects a backend that PyTorch's order puts behind others.
std::string how_to_select(SdpBackend backend) {
    switch (backend) {
        case SdpBackend::flash: return "sdpa_kernel([SDPBackend.FLASH_ATTENTION])";
        case SdpBackend::efficient: return "sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION])";
        case SdpBackend::cudnn: return "sdpa_kernel([SDPBackend.CUDNN_ATTENTION])";
        case SdpBackend::math: return "sdpa_kernel([SDPBackend.MATH])";
        case SdpBackend::fa3:
            return "activate_flash_attention_impl(\"FA3\") and sdpa_kernel([SDPBackend.FLASH_ATTENTION])";
        case SdpBackend::fa4:
            return "activate_flash_attention_impl(\"FA4\") and sdpa_kernel([SDPBackend.FLASH_ATTENTION])";
    }
    return "";
}

std::string times(double factor) { return fmt::format("{:.2f}x", factor); }

}  // namespace

std::string verdict_sentence(const Explanation& explanation, const diagnose::Call& call) {
    if (explanation.aborts) return "PyTorch aborts: every backend refuses this call (\"No available kernel\").";
    if (!explanation.taken) return "The options do not determine which backend PyTorch takes.";
    const std::string text = fmt::format("PyTorch takes {}.", name_of(*explanation.taken));
    const Verdict* refused = nullptr;
    const Verdict* could = nullptr;
    for (const SdpBackend faster : faster_than(*explanation.taken, call.gpu)) {
        const Verdict* verdict = verdict_of(explanation, faster);
        if (!verdict) continue;
        if (verdict->standing == Standing::could_run && !could) could = verdict;
        if (verdict->standing == Standing::refused && !refused && !replaces_flash(faster)) refused = verdict;
    }
    if (could) {
        return fmt::format("{} {}, which is usually faster here, could run: {}.", text, name_of(could->backend),
                           how_to_select(could->backend));
    }
    if (!refused) return text;
    const Rule& rule = *refused->refusals.front();
    return fmt::format("{} {}, which is usually faster here, is refused: {}. To get it: {}.", text,
                       name_of(refused->backend), rule.meaning, rule.cure);
}

std::string verdict_text(const Explanation& explanation, const diagnose::Call& call, int width) {
    std::string text = lines(verdict_sentence(explanation, call), width) + "\n";
    if (explanation.order.empty())
        text += lines(fmt::format("Order of the backends: {}.", explanation.order_because), width);
    else
        text += lines(
            fmt::format("Order of the backends: {} ({}).", names(explanation.order), explanation.order_because), width);
    Table table({{"backend"}, {"verdict"}, {"why"}});
    for (const Verdict& verdict : explanation.verdicts) add_rows(table, explanation, verdict);
    text.append("\n").append(table.text(width));
    for (const std::string& remark : explanation.remarks) text.append("\n").append(lines(remark, width));
    if (explanation.assumed.empty()) return text;
    const std::string assumed = fmt::format("Assumed: {}.", fmt::join(explanation.assumed, "; "));
    text.append("\n").append(lines(assumed, width));
    return text;
}

std::vector<Gain> gains_of(const Explanation& explanation, const diagnose::Call& call, Pass pass,
                           const diagnose::Measured& measured) {
    std::vector<Gain> gains;
    if (!explanation.taken) return gains;
    for (const SdpBackend better : faster_than(*explanation.taken, call.gpu))
        gains.push_back(diagnose::gain(call, better, pass, measured));
    return gains;
}

std::string gain_text(const std::vector<Gain>& gains, int width) {
    if (gains.empty()) return "";
    Table table({{"instead"}, {"one call"}, {"gain"}, {"step"}, {"note"}});
    for (const Gain& gain : gains) {
        if (!gain.missing.empty()) {
            table.add({name_of(gain.backend), "-", "-", "-", "no prediction: " + gain.missing});
            continue;
        }
        const std::string caveats = fmt::format("{}", fmt::join(gain.caveats, "; "));
        table.add({name_of(gain.backend), milliseconds_text(gain.predicted_ms),
                   gain.call_factor > 0 ? times(gain.call_factor) : "-",
                   gain.step_factor > 0 ? times(gain.step_factor) : "-",
                   fmt::format("predicted as {}{}{}", gain.kernel, caveats.empty() ? "" : "; ", caveats)});
    }
    return table.text(width);
}

Json json_of(const Explanation& explanation) {
    Json json;
    json["taken"] = explanation.taken ? Json(name_of(*explanation.taken)) : Json(nullptr);
    json["aborts"] = explanation.aborts;
    json["order"] = Json::array();
    for (const SdpBackend backend : explanation.order) json["order"].push_back(name_of(backend));
    json["order_because"] = explanation.order_because;
    json["backends"] = Json::array();
    for (const Verdict& verdict : explanation.verdicts) {
        Json row{{"backend", name_of(verdict.backend)}, {"verdict", name_of(verdict.standing)}};
        row["refusals"] = Json::array();
        for (const Rule* rule : verdict.refusals) {
            row["refusals"].push_back({{"rule", rule->name},
                                       {"text", rule->text},
                                       {"meaning", rule->meaning},
                                       {"cure", rule->cure},
                                       {"source", rule->source}});
        }
        row["missing_fields"] = verdict.missing_fields;
        json["backends"].push_back(row);
    }
    json["remarks"] = explanation.remarks;
    json["assumed"] = explanation.assumed;
    return json;
}

Json json_of(const Gain& gain) {
    const auto known = [](double value) { return value > 0 ? Json(value) : Json(nullptr); };
    return {{"backend", name_of(gain.backend)},
            {"kernel", gain.kernel},
            {"predicted_ms", known(gain.predicted_ms)},
            {"call_factor", known(gain.call_factor)},
            {"step_factor", known(gain.step_factor)},
            {"missing", gain.missing},
            {"caveats", gain.caveats}};
}

}  // namespace tessera::cli
