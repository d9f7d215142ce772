// SPDX-License-Identifier: Apache-2.0
#include "verdict_text.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "table.hpp"
#include "ways_text.hpp"

namespace tessera::cli {
namespace {

using diagnose::Explanation;
using diagnose::Rule;
using diagnose::SdpBackend;
using diagnose::Standing;
using diagnose::Verdict;

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

/// PyTorch's text in quotes, and its meaning.
std::string reason(const Rule& rule) {
    const std::string words = rule.text[0] == '\0' ? "" : fmt::format("\"{}\": ", rule.text);
    return fmt::format("{}{}.", words, rule.meaning);
}

/// True if the backend is FA3 or FA4, which replace flash and share its checks.
bool replaces_flash(SdpBackend backend) { return backend == SdpBackend::fa3 || backend == SdpBackend::fa4; }

std::string because(const Explanation& explanation, const Verdict& verdict) {
    switch (verdict.standing) {
        case Standing::taken:
            if (explanation.raises) return "PyTorch chooses it, and it raises";
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

}  // namespace

std::string verdict_sentence(const Explanation& explanation, const diagnose::Ways& ways) {
    std::string text;
    if (explanation.raises) {
        const std::string& error = explanation.raises->error;
        text = fmt::format("PyTorch raises a {}{}: {}.", explanation.raises->type,
                           error.empty() ? "" : fmt::format(" (\"{}\")", error), explanation.raises->meaning);
    } else if (explanation.aborts) {
        text = "PyTorch raises: every backend refuses this call (\"No available kernel. Aborting execution.\").";
    } else if (!explanation.taken) {
        return "The options do not determine which backend PyTorch takes.";
    } else {
        return fmt::format("PyTorch takes {}. {}", name_of(*explanation.taken), ways_sentences(ways));
    }
    const diagnose::Way* least = nullptr;
    for (const diagnose::Way& way : ways.all) {
        if (way.cure.found && (least == nullptr || way.effort() < least->effort())) least = &way;
    }
    if (least == nullptr) return text + " No change that is known makes a backend take it.";
    std::string changes;
    for (const diagnose::Change& change : least->cure.changes) changes += (changes.empty() ? "" : "; ") + change.text;
    return fmt::format("{} The smallest change after which it runs, by {}: {}.", text, name_of(least->cure.backend),
                       changes);
}

diagnose::Ways ways_for(const Explanation& explanation, const diagnose::Call& call, Pass pass) {
    return diagnose::ways_of(call, explanation.raises ? std::nullopt : explanation.taken, pass, {});
}

std::string verdict_text(const Explanation& explanation, const diagnose::Ways& ways, int width) {
    std::string text = lines(verdict_sentence(explanation, ways), width) + "\n";
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

Json json_of(const Explanation& explanation) {
    Json json;
    json["taken"] = explanation.taken ? Json(name_of(*explanation.taken)) : Json(nullptr);
    json["aborts"] = explanation.aborts;
    json["raises"] = explanation.raises ? Json{{"name", explanation.raises->name},
                                               {"type", explanation.raises->type},
                                               {"error", explanation.raises->error},
                                               {"meaning", explanation.raises->meaning}}
                                        : Json(nullptr);
    json["order"] = Json::array();
    for (const SdpBackend backend : explanation.order) json["order"].push_back(name_of(backend));
    json["order_because"] = explanation.order_because;
    json["backends"] = Json::array();
    for (const Verdict& verdict : explanation.verdicts) {
        Json row{{"backend", name_of(verdict.backend)}, {"verdict", name_of(verdict.standing)}};
        row["refusals"] = Json::array();
        for (const Rule* rule : verdict.refusals) {
            row["refusals"].push_back(
                {{"rule", rule->name}, {"text", rule->text}, {"meaning", rule->meaning}, {"source", rule->source}});
        }
        row["missing_fields"] = verdict.missing_fields;
        json["backends"].push_back(row);
    }
    json["remarks"] = explanation.remarks;
    json["assumed"] = explanation.assumed;
    return json;
}

}  // namespace tessera::cli
