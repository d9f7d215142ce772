// SPDX-License-Identifier: Apache-2.0
#include "model/documents_on_ranks.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <queue>

namespace tessera::model {
namespace {

constexpr std::int64_t kMostChunks = 8;  // of a GPU, as balance_documents() has by default
constexpr double kEvenEnough = 1.03;     // the pairs of the fullest GPU beside those in the best order

using Span = std::pair<std::int64_t, std::int64_t>;  // rows [first, last)

class Documents {
 public:
    Documents(const std::vector<std::int64_t>& lengths, bool causal) : causal_(causal), offsets_{0} {
        for (const std::int64_t length : lengths) offsets_.push_back(offsets_.back() + length);
    }
    std::int64_t total() const { return offsets_.back(); }
    bool causal() const { return causal_; }

    /// Calls visit(document's first row, document's last row, span in it) for each document that a span touches.
    template <class Visit>
    void for_each(const Span& span, const Visit& visit) const {
        auto next = std::upper_bound(offsets_.begin(), offsets_.end(), span.first);
        for (; next != offsets_.end() && *(next - 1) < span.second; ++next) {
            const std::int64_t begin = *(next - 1), end = *next;
            if (begin < end) visit(begin, end, Span{std::max(span.first, begin), std::min(span.second, end)});
        }
    }
    std::int64_t pairs(const Span& span) const {
        std::int64_t sum = 0;
        for_each(span, [&](std::int64_t begin, std::int64_t end, const Span& own) {
            const std::int64_t first = own.first - begin, last = own.second - begin;
            sum += causal_ ? last * (last + 1) / 2 - first * (first + 1) / 2 : (last - first) * (end - begin);
        });
        return sum;
    }

 private:
    bool causal_;
    std::vector<std::int64_t> offsets_;
};

/// Spans of each GPU, ascending.
using SpansOfRanks = std::vector<std::vector<Span>>;

SpansOfRanks cut(std::int64_t total, int ranks, int each, bool zigzag) {
    SpansOfRanks order(static_cast<std::size_t>(ranks));
    const std::int64_t size = total / (std::int64_t{ranks} * each);
    for (int r = 0; r < ranks; ++r) {
        auto& own = order[static_cast<std::size_t>(r)];
        own.push_back({r * size, (r + 1) * size});
        if (zigzag) own.push_back({(2 * ranks - 1 - r) * size, (2 * ranks - r) * size});
    }
    return order;
}

/// Chunks go to the GPUs from the most pairs to the least, each to the GPU with the fewest pairs that has room.
SpansOfRanks dealt(const Documents& documents, int ranks, std::int64_t each) {
    const std::int64_t count = each * ranks, size = documents.total() / count;
    std::vector<std::int64_t> pairs(static_cast<std::size_t>(count)), chunks(static_cast<std::size_t>(count));
    for (std::int64_t c = 0; c < count; ++c)
        pairs[static_cast<std::size_t>(c)] = documents.pairs({c * size, (c + 1) * size});
    std::iota(chunks.begin(), chunks.end(), 0);
    std::stable_sort(chunks.begin(), chunks.end(), [&](std::int64_t a, std::int64_t b) {
        return pairs[static_cast<std::size_t>(a)] > pairs[static_cast<std::size_t>(b)];
    });
    SpansOfRanks order(static_cast<std::size_t>(ranks));
    using Load = std::pair<std::int64_t, int>;
    std::priority_queue<Load, std::vector<Load>, std::greater<>> emptiest;
    for (int r = 0; r < ranks; ++r) emptiest.push({0, r});
    for (const std::int64_t chunk : chunks) {
        const auto [load, rank] = emptiest.top();
        emptiest.pop();
        auto& own = order[static_cast<std::size_t>(rank)];
        own.push_back({chunk * size, (chunk + 1) * size});
        if (static_cast<std::int64_t>(own.size()) < each)
            emptiest.push({load + pairs[static_cast<std::size_t>(chunk)], rank});
    }
    for (auto& own : order) std::sort(own.begin(), own.end());
    return order;
}

std::int64_t fullest_pairs(const Documents& documents, const SpansOfRanks& order) {
    std::int64_t most = 0;
    for (const auto& own : order) {
        std::int64_t pairs = 0;
        for (const Span& span : own) pairs += documents.pairs(span);
        most = std::max(most, pairs);
    }
    return most;
}

RankWork work_of(const Documents& documents, const std::vector<Span>& own) {
    std::vector<Span> joined;  // spans that follow each other are one
    for (const Span& span : own) {
        if (!joined.empty() && joined.back().second == span.first) joined.back().second = span.second;
        else joined.push_back(span);
    }
    RankWork work;
    std::int64_t document = -1, seen = 0, of_own = 0;
    const auto end_document = [&] {
        work.needed += seen;
        work.others += seen - of_own;
        if (!documents.causal()) work.parts += seen - of_own;
        seen = of_own = 0;
    };
    for (const Span& span : joined) {
        work.pairs += documents.pairs(span);
        documents.for_each(span, [&](std::int64_t begin, std::int64_t end, const Span& rows) {
            const std::int64_t count = rows.second - rows.first;
            const std::int64_t keys = documents.causal() ? rows.second - begin : end - begin;
            if (begin != document) end_document();
            // Without a mask a GPU makes one call of a document, whichever of its rows it has.
            if (begin == document && !documents.causal()) work.runs.back().rows += count;
            else work.runs.push_back({count, keys});
            document = begin, seen = std::max(seen, keys), of_own += count;
            if (documents.causal()) work.parts += keys - of_own;
        });
    }
    end_document();
    return work;
}

template <class Of>
double mean(const std::vector<RankWork>& ranks, const Of& of) {
    double sum = 0;
    for (const RankWork& rank : ranks) sum += static_cast<double>(of(rank));
    return sum / static_cast<double>(ranks.size());
}

}  // namespace

const RankWork& DocumentsOnRanks::fullest() const {
    return *std::max_element(ranks.begin(), ranks.end(),
                             [](const RankWork& a, const RankWork& b) { return a.pairs < b.pairs; });
}

const RankWork& DocumentsOnRanks::most_runs() const {
    return *std::max_element(ranks.begin(), ranks.end(),
                             [](const RankWork& a, const RankWork& b) { return a.runs.size() < b.runs.size(); });
}

double DocumentsOnRanks::mean_needed() const {
    return mean(ranks, [](const RankWork& rank) { return rank.needed; });
}

double DocumentsOnRanks::mean_parts() const {
    return mean(ranks, [](const RankWork& rank) { return rank.parts; });
}

int DocumentsOnRanks::peers(std::int64_t rows) const {
    const auto others = static_cast<std::int64_t>(ranks.size()) - 1;
    return static_cast<int>(std::min(others, (rows + chunk - 1) / std::max<std::int64_t>(chunk, 1)));
}

DocumentsOnRanks spread_documents(const std::vector<std::int64_t>& lengths, int ranks, bool causal) {
    const Documents documents(lengths, causal);
    const std::int64_t total = documents.total(), rows = total / ranks;
    std::vector<std::pair<std::string, SpansOfRanks>> orders{{"contiguous", cut(total, ranks, 1, false)}};
    if (total % (2 * std::int64_t{ranks}) == 0) orders.emplace_back("zigzag", cut(total, ranks, 2, true));
    std::int64_t most = std::min(kMostChunks, rows);
    while (most > 1 && rows % most != 0) --most;
    for (const std::int64_t each : {std::int64_t{2}, std::int64_t{4}, most}) {
        const bool again = each == most && (most == 2 || most == 4);
        if (each > most || rows % each != 0 || again) continue;
        orders.emplace_back(fmt::format("{} chunks a GPU", each), dealt(documents, ranks, each));
    }
    std::vector<std::int64_t> fullest;
    for (const auto& [name, order] : orders) fullest.push_back(fullest_pairs(documents, order));
    const auto best = static_cast<double>(*std::min_element(fullest.begin(), fullest.end()));
    std::size_t chosen = 0;
    while (static_cast<double>(fullest[chosen]) > kEvenEnough * best) ++chosen;
    const auto& first = orders[chosen].second.front().front();
    DocumentsOnRanks found{orders[chosen].first, first.second - first.first, {}};
    for (const auto& own : orders[chosen].second) found.ranks.push_back(work_of(documents, own));
    return found;
}

}  // namespace tessera::model
