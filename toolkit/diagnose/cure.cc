// SPDX-License-Identifier: Apache-2.0
#include "diagnose/cure.hpp"

#include <algorithm>
#include <optional>
#include <queue>
#include <set>

namespace tessera::diagnose {
namespace {

constexpr int kMostCalls = 400;  // calls that a search asks about
constexpr std::size_t kMostChanges = 7;

using Path = std::vector<Change>;

struct State {
    int effort = 0;
    Call call{};
    Path path{};
    /// The cheapest first; of two equal ones that with fewer changes.
    bool operator<(const State& other) const {
        return effort != other.effort ? effort > other.effort : path.size() > other.path.size();
    }
};

std::string_view kind_of(const Change& change) {
    return std::string_view(change.name).substr(0, change.name.find('-'));
}

/// True if two changes exclude each other: they are equal, or one installs another release of what the other installs.
/// PyTorch's wheel contains a cuDNN, so PyTorch is installed before a cuDNN.
bool excludes(const Path& path, const Change& next) {
    return std::any_of(path.begin(), path.end(), [&](const Change& made) {
        const bool installs_torch = kind_of(next) == "torch";
        if (made.name == next.name) return true;
        if (kind_of(made) == "torch") return installs_torch;
        if (kind_of(made) == "cudnn") return installs_torch || kind_of(next) == "cudnn";
        return false;
    });
}

bool refuses(const Verdict& verdict, const Rule& rule) {
    return std::any_of(verdict.refusals.begin(), verdict.refusals.end(),
                       [&](const Rule* other) { return std::string_view(other->name) == rule.name; });
}

/// True if a refusal of `before` is gone in `after`.
bool removes_one(const Verdict& before, const Verdict& after) {
    return std::any_of(before.refusals.begin(), before.refusals.end(),
                       [&](const Rule* rule) { return !refuses(after, *rule); });
}

/// Changes that move a backend in the order, or a call's error away, but cure no refusal.
bool may_reorder(const Change& change) {
    const std::string_view kind = kind_of(change);
    return kind == "leave" || kind == "select" || kind == "activate" || kind == "restore" || kind == "cudnn" ||
           kind == "torch" || kind == "enable" || kind == "cast" || kind == "not";
}

std::string key_of(const Path& path) {
    std::set<std::string> names;
    for (const Change& change : path) names.insert(change.name);
    std::string key;
    for (const std::string& name : names) key += name + " ";
    return key;
}

const Change* named(const std::vector<Change>& changes, const std::string& name) {
    const auto found = std::find_if(changes.begin(), changes.end(), [&](const Change& c) { return c.name == name; });
    return found == changes.end() ? nullptr : &*found;
}

/// Applies the changes of these names one after the other and returns them. Returns nothing if one of them can't be
/// made, or if the call that they lead to does not run on `wanted`.
std::optional<Path> replayed(const Call& call, const std::vector<std::string>& names, SdpBackend wanted) {
    Path path;
    for (const std::string& name : names) {
        const Call& so_far = path.empty() ? call : path.back().after;
        const std::vector<Change> changes = changes_of(so_far, wanted);
        const Change* change = named(changes, name);
        if (change == nullptr) return {};
        path.push_back(*change);
    }
    return takes(path.empty() ? call : path.back().after, wanted) ? std::optional(path) : std::nullopt;
}

std::vector<std::string> names_of(const Path& path) {
    std::vector<std::string> names;
    for (const Change& change : path) names.push_back(change.name);
    return names;
}

/// Removes changes that are not needed, then puts the cheapest first if that order leads to the backend too.
Path tidied(const Call& call, Path path, SdpBackend wanted) {
    for (std::size_t i = path.size(); i-- > 0;) {
        std::vector<std::string> fewer = names_of(path);
        fewer.erase(fewer.begin() + static_cast<std::ptrdiff_t>(i));
        if (auto shorter = replayed(call, fewer, wanted)) path = *shorter;
    }
    Path sorted = path;
    const auto rank = [](const Change& change) {  // PyTorch is installed before the libraries that it loads
        return std::pair(kind_of(change) == "cudnn" || kind_of(change) == "activate", change.effort);
    };
    std::stable_sort(sorted.begin(), sorted.end(), [&](const Change& a, const Change& b) { return rank(a) < rank(b); });
    return replayed(call, names_of(sorted), wanted).value_or(path);
}

/// The refusals that no single change removes; if each has its change, those of the newest release; else all.
std::vector<const Rule*> stubborn(const Call& call, SdpBackend wanted) {
    const Verdict verdict = verdict_of(call, wanted);
    const std::vector<Change> changes = changes_of(call, wanted);
    std::vector<const Rule*> left;
    for (const Rule* rule : verdict.refusals) {
        const bool goes = std::any_of(changes.begin(), changes.end(), [&](const Change& change) {
            return !refuses(verdict_of(change.after, wanted), *rule);
        });
        if (!goes) left.push_back(rule);
    }
    if (!left.empty()) return left;
    if (!changes.empty() && kind_of(changes.back()) == "torch") return stubborn(changes.back().after, wanted);
    return verdict.refusals;
}

}  // namespace

Cure cure_for(const Call& call, SdpBackend wanted) {
    Cure cure{.backend = wanted, .after = call};
    std::priority_queue<State> open;
    open.push({.call = call});
    std::set<std::string> seen;
    std::vector<std::string> missing_later;
    for (int asked = 0; !open.empty() && asked < kMostCalls;) {
        const State state = open.top();
        open.pop();
        if (!seen.insert(key_of(state.path)).second) continue;
        ++asked;
        const Verdict verdict = verdict_of(state.call, wanted);
        if (verdict.standing == Standing::could_run && takes(state.call, wanted)) {
            cure.found = true;
            cure.changes = tidied(call, state.path, wanted);
            if (!cure.changes.empty()) cure.after = cure.changes.back().after;
            return cure;
        }
        if (state.path.empty()) cure.missing_fields = verdict.missing_fields;
        if (missing_later.empty()) missing_later = verdict.missing_fields;
        if (state.path.size() == kMostChanges || verdict.standing == Standing::unknown) continue;
        for (Change& change : changes_of(state.call, wanted)) {
            if (excludes(state.path, change)) continue;
            // From 2.14 on three dimensions are no refusal, but changes of heads, head_dim and lengths need four.
            const bool helps =
                change.name == "unsqueeze" ||
                (verdict.standing == Standing::refused ? removes_one(verdict, verdict_of(change.after, wanted))
                                                       : may_reorder(change));
            if (!helps) continue;
            State next{state.effort + change.effort, change.after, state.path};
            next.path.push_back(std::move(change));
            open.push(std::move(next));
        }
    }
    if (verdict_of(call, wanted).standing == Standing::refused) cure.blocked_by = stubborn(call, wanted);
    if (cure.blocked_by.empty() && cure.missing_fields.empty()) cure.missing_fields = missing_later;
    return cure;
}

}  // namespace tessera::diagnose
