// SPDX-License-Identifier: Apache-2.0
#include "which_call.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include "diagnose/family_tree.hpp"
#include "table.hpp"
#include "verdict_text.hpp"
#include "ways_text.hpp"

namespace tessera::cli {
namespace {

/// Throws unless there are a shape and a dtype, which every verdict needs; the other fields may stay unknown.
void require_call(const CallOptions& options) {
    if (options.shape.empty() && options.first_size().first.empty())
        throw UsageError(
            "--shape",
            "expected the shape of q, BATCH,HEADS,LEN,DIM, or --batch, --heads, --len and --head-dim, for a "
            "question without a trace");
    if (options.dtype.empty()) throw UsageError("--dtype", "expected the dtype of q, k and v");
    if (options.torch.empty()) throw UsageError("--torch", "expected PyTorch's version: 2.4 to 2.15");
}

/// Throws unless the mask broadcasts to scores of [..., len_q, len_kv]: each dimension must be equal or 1.
void require_broadcast(const diagnose::Call& call) {
    if (!call.mask.shape || !call.q.shape || !call.k.shape || call.q.shape->size() < 2 || call.k.shape->size() < 2)
        return;
    diagnose::Sizes scores = *call.q.shape;
    scores.back() = (*call.k.shape)[call.k.shape->size() - 2];
    const diagnose::Sizes& mask = *call.mask.shape;
    if (mask.size() > scores.size()) return;  // the math path may accept it
    for (std::size_t back = 1; back <= mask.size(); ++back) {
        const auto have = mask[mask.size() - back];
        const auto need = scores[scores.size() - back];
        const auto keys =
            back > 2 && back <= call.k.shape->size() ? (*call.k.shape)[call.k.shape->size() - back] : need;
        if (have == 1 || have == need || (need == 1 && have == keys)) continue;
        throw UsageError("--mask", fmt::format("expected a shape that broadcasts to the scores' {}, got \"{}\"",
                                               fmt::join(scores, ","), fmt::join(mask, ",")));
    }
}

}  // namespace

void answer_call(const CallOptions& options, const Session& session) {
    require_call(options);
    std::vector<std::string> assumed;
    diagnose::Call given = options.call();
    if (!given.mask_kind) {
        given.mask_kind = diagnose::MaskKind::none;
        given.is_causal = false;
        assumed.emplace_back("no mask");
    }
    if (*given.mask_kind != diagnose::MaskKind::none && !given.mask.shape && given.q.shape->size() == 4 &&
        given.k.shape->size() == 4) {
        given.mask.shape = diagnose::Sizes{(*given.q.shape)[2], (*given.k.shape)[2]};
        assumed.emplace_back("attn_mask is [len_q, len_kv]");
    }
    require_broadcast(given);
    const diagnose::Call call = diagnose::assume_defaults(given, assumed);
    diagnose::Explanation explanation = diagnose::explain(call);
    explanation.assumed = assumed;
    const diagnose::Ways ways = ways_for(explanation, call, Pass::forward);
    if (session.json) {
        Json document = json_of(explanation);
        document["sentence"] = verdict_sentence(explanation, ways);
        document.update(json_of(ways));
        return session.print_json(document, "call");
    }
    const int width = terminal_width(STDOUT_FILENO);
    std::string text = verdict_text(explanation, ways, width);
    text.append("\nWays to another backend, with the predicted time of the forward\n\n").append(ways_text(ways, width));
    session.print(text);
}

void answer_family(const Session& session) {
    if (!session.json) return session.print(diagnose::family_text());
    Json document{{"relatives", Json::array()}, {"libraries", Json::array()}};
    for (const diagnose::Relative& r : diagnose::relatives()) {
        document["relatives"].push_back({{"name", r.name},
                                         {"parent", r.parent},
                                         {"title", r.title},
                                         {"since", r.since},
                                         {"by", r.by},
                                         {"step", r.step},
                                         {"kernel", r.kernel},
                                         {"family", diagnose::name_of(r.family)}});
    }
    for (const diagnose::Chooser& c : diagnose::choosers()) {
        document["libraries"].push_back(
            {{"name", c.name}, {"since", c.since}, {"ends_in", c.ends_in}, {"how", c.how}, {"source", c.source}});
    }
    session.print_json(document, "family");
}

}  // namespace tessera::cli
