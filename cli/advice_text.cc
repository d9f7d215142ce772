// SPDX-License-Identifier: Apache-2.0
#include "advice_text.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "diagnose/call_inputs.hpp"
#include "diagnose/device.hpp"
#include "table.hpp"
#include "verdict_text.hpp"
#include "ways_text.hpp"

namespace tessera::cli {
namespace {

using diagnose::Advice;
using diagnose::Rule;
using diagnose::Verdict;

}  // namespace

std::string advice_sentences(const Advice& advice) {
    std::string text;
    if (advice.by_hand) text = " The model computes attention with its own operators.";
    if (!advice.surprise.empty()) text += " " + advice.surprise + ".";
    const bool without_version =
        std::any_of(advice.ways.all.begin(), advice.ways.all.end(), [](const diagnose::Way& way) {
            return std::find(way.cure.missing_fields.begin(), way.cure.missing_fields.end(), "PyTorch's version") !=
                   way.cure.missing_fields.end();
        });
    if (without_version)
        return text + " Why no other kernel ran can't be known without PyTorch's version (give it with --torch).";
    text += " " + ways_sentences(advice.ways);
    if (advice.cudnn_may_be_old && advice.ways.first() != nullptr)
        text += " If it is cuDNN that is old, install 9.15.1 or later.";
    return text;
}

std::string advice_text(const Advice& advice, int width) {
    std::string text = "  why not faster\n";
    std::vector<std::pair<std::string, std::string>> facts;
    for (const Verdict& verdict : advice.explanation.verdicts) {
        if (verdict.backend == advice.ran || verdict.refusals.empty()) continue;
        std::string name = fmt::format("  {}", name_of(verdict.backend));
        for (const Rule* rule : verdict.refusals) {
            if (rule->backend != verdict.backend) {
                if (!name.empty())
                    facts.emplace_back(name, fmt::format("refused for the same reason as {}", name_of(rule->backend)));
            } else {
                const std::string words = rule->text[0] == '\0' ? "" : fmt::format("\"{}\": ", rule->text);
                facts.emplace_back(name, fmt::format("{}{}", words, rule->meaning));
            }
            name.clear();
        }
    }
    const diagnose::Call& call = advice.shape.call;
    std::string read = text_of(call);
    if (const std::string gpu = diagnose::text_of(call.gpu); !gpu.empty()) read += "; " + gpu;
    if (call.torch) read += fmt::format("; PyTorch {}.{}", call.torch->major, call.torch->minor);
    facts.emplace_back("  read", read);
    if (!advice.explanation.assumed.empty())
        facts.emplace_back("  assumed", fmt::format("{}", fmt::join(advice.explanation.assumed, "; ")));
    text += facts_text(facts, width) + "  ways to another kernel\n";
    const std::string ways = ways_text(advice.ways, width - 4);
    for (std::size_t begin = 0; begin < ways.size();) {
        const std::size_t end = ways.find('\n', begin) + 1;
        text += "    " + ways.substr(begin, end - begin);
        begin = end;
    }
    return text;
}

Json json_of(const Advice& advice) {
    Json json = json_of(advice.explanation);
    json["ran"] = advice.by_hand ? "by hand" : name_of(advice.ran);
    json["call"] = text_of(advice.shape.call);
    json["surprise"] = advice.surprise;
    json.update(json_of(advice.ways));
    return json;
}

}  // namespace tessera::cli
