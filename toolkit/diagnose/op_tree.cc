// SPDX-License-Identifier: Apache-2.0
#include "diagnose/op_tree.hpp"

#include <algorithm>
#include <optional>
#include <set>
#include <string>

namespace tessera::diagnose {
namespace {

constexpr std::size_t kDeepest = 256;  // most nested operators; it bounds the walk to the outermost

/// True if an operator computes attention. Parts of attention by hand, wrappers, and the kernel names that Inductor
/// gives its launches do not count.
bool is_attention_op(std::string_view name) {
    for (const char* part :
         {"oftmax", "bmm", "autograd::", "ScaledDotProduct", "triton_", "repeat_interleave", "aten::expand"}) {
        if (name.find(part) != std::string_view::npos) return false;
    }
    return true;
}

}  // namespace

OpTree::OpTree(Trace& trace) : trace_(trace), parent_(trace.ops.size(), kNone) {
    std::sort(trace.sites.begin(), trace.sites.end(),
              [](const LaunchSite& a, const LaunchSite& b) { return a.correlation < b.correlation; });
    for (std::size_t name = 0; name < trace.ops_named.size(); ++name)
        is_attention_op_.push_back(is_attention_op(trace.ops_named[static_cast<std::uint32_t>(name)]));
    for (std::uint32_t i = 0; i < trace.ops.size(); ++i) {
        by_thread_[trace.ops[i].thread].push_back(i);
        if (trace.ops[i].external < 0) continue;
        const auto [first, is_new] = by_external_.emplace(trace.ops[i].external, i);
        if (!is_new && trace.ops[first->second].process != trace.ops[i].process)
            shared_externals_.insert(trace.ops[i].external);
    }
    for (auto& [thread, ops] : by_thread_) {
        std::sort(ops.begin(), ops.end(), [&](std::uint32_t a, std::uint32_t b) {
            const OpRun& x = trace.ops[a];
            const OpRun& y = trace.ops[b];
            return x.start_us != y.start_us ? x.start_us < y.start_us : x.end_us > y.end_us;
        });
        std::vector<std::uint32_t> open;
        for (const std::uint32_t op : ops) {
            while (!open.empty() && trace.ops[open.back()].end_us < trace.ops[op].end_us) open.pop_back();
            if (!open.empty()) parent_[op] = open.back();
            if (open.size() < kDeepest) open.push_back(op);
        }
    }
    find_owners(trace);
}

OpTree::Sites OpTree::sites_of(std::int64_t correlation) const {
    const auto less = [](const LaunchSite& a, const LaunchSite& b) { return a.correlation < b.correlation; };
    const auto [begin, end] =
        std::equal_range(trace_.sites.begin(), trace_.sites.end(), LaunchSite{.correlation = correlation}, less);
    return {begin, end};
}

/// Processes number their launches each for itself. In joined files the place of a run in the file tells its process.
/// Else time may: a kernel starts after its launch, so where only one process had launched by then, the
/// process of that kernel's name on that stream is known, and decides for its other runs.
void OpTree::find_owners(Trace& trace) {
    const auto of_two = [](const LaunchSite& a, const LaunchSite& b) {
        return a.correlation == b.correlation && a.process != b.process;
    };
    if (std::adjacent_find(trace.sites.begin(), trace.sites.end(), of_two) == trace.sites.end()) return;
    find_blocks(trace);
    vote(trace);
    std::int64_t lost = 0;
    for (std::size_t i = 0; i < trace.runs.size(); ++i) {
        const auto sites = sites_of(trace.runs[i].correlation);
        const bool shared = std::adjacent_find(sites.begin(), sites.end(), of_two) != sites.end();
        if (shared && !owner_of(i) && !calls_agree(sites)) ++lost;
    }
    trace.notes.push_back(
        "several processes in one file count their launches alike" +
        (lost == 0 ? std::string(": which one launched a kernel was found by its place in the file, or by time")
                   : ": of " + std::to_string(lost) +
                         " kernels it is not known what launched them; a file for each process has it"));
}

void OpTree::find_blocks(const Trace& trace) {
    for (const auto& [process, runs] : trace.runs_at_launches) blocks_.push_back({runs.first, runs.second, process});
    std::sort(blocks_.begin(), blocks_.end());
    for (std::size_t i = 1; i < blocks_.size(); ++i) {
        if (std::get<1>(blocks_[i - 1]) > std::get<0>(blocks_[i])) return blocks_.clear();
    }
}

std::optional<std::uint32_t> OpTree::block_of(std::size_t run) const {
    for (std::size_t i = 0; i < blocks_.size(); ++i) {
        const auto& [first, last, process] = blocks_[i];
        // The profiler may write a launch before or after its kernel, so a run at a border may be of either side.
        const bool after = i == 0 || run > first;
        const bool before = i + 1 == blocks_.size() || run + 1 < std::get<0>(blocks_[i + 1]);
        if (after && before) return process;
    }
    return std::nullopt;
}

/// Kernels of a name that only one process is known to have launched on a stream are its own.
void OpTree::vote(const Trace& trace) {
    constexpr double kClocksDiffer = 20;  // us
    std::map<std::pair<std::uint32_t, std::uint32_t>, std::set<std::uint32_t>> votes;
    for (std::size_t i = 0; i < trace.runs.size(); ++i) {
        const KernelRun& run = trace.runs[i];
        std::set<std::uint32_t> launched;
        if (const auto block = block_of(i)) launched.insert(*block);
        for (const LaunchSite& site : sites_of(run.correlation)) {
            if (blocks_.empty() && site.start_us <= run.start_us + kClocksDiffer) launched.insert(site.process);
        }
        if (launched.size() == 1) votes[{run.stream, run.name}].insert(*launched.begin());
    }
    for (const auto& [kernel, processes] : votes) {
        if (processes.size() == 1) owners_.emplace(kernel, *processes.begin());
    }
}

std::optional<std::uint32_t> OpTree::owner_of(std::size_t run) const {
    if (const auto block = block_of(run)) return block;
    const auto owner = owners_.find({trace_.runs[run].stream, trace_.runs[run].name});
    return owner == owners_.end() ? std::nullopt : std::optional(owner->second);
}

bool OpTree::same_call(std::int64_t a, std::int64_t b) const {
    if (a == b) return true;
    if (a == kNone || b == kNone) return false;
    const std::int64_t outer_a = attention_around(a), outer_b = attention_around(b);
    if (outer_a == kNone || outer_b == kNone) return outer_a == outer_b && run(a).name == run(b).name;
    return run(outer_a).name == run(outer_b).name && run(outer_a).inputs == run(outer_b).inputs;
}

bool OpTree::calls_agree(const Sites& sites) const {
    const std::int64_t first = at(sites.begin()->thread, sites.begin()->start_us);
    return std::all_of(sites.begin(), sites.end(),
                       [&](const LaunchSite& site) { return same_call(first, at(site.thread, site.start_us)); });
}

std::int64_t OpTree::at(std::uint32_t thread, double us) const {
    const auto ops = by_thread_.find(thread);
    if (ops == by_thread_.end()) return kNone;
    const auto after = std::upper_bound(ops->second.begin(), ops->second.end(), us,
                                        [&](double time, std::uint32_t op) { return time < trace_.ops[op].start_us; });
    if (after == ops->second.begin()) return kNone;
    std::int64_t op = *(after - 1);
    while (op != kNone && run(op).end_us < us) op = parent_[static_cast<std::size_t>(op)];
    return op;
}

std::int64_t OpTree::launched_by(std::size_t run_index) const {
    const KernelRun& kernel = trace_.runs[run_index];
    if (trace_.ops.empty()) return kNone;
    if (const auto sites = sites_of(kernel.correlation); kernel.correlation >= 0 && !sites.empty()) {
        const std::optional<std::uint32_t> owner = owner_of(run_index);
        for (const LaunchSite& site : sites) {
            if (owner == site.process) return at(site.thread, site.start_us);
        }
        const std::uint32_t process = sites.begin()->process;
        const bool alone = std::all_of(sites.begin(), sites.end(), [&](const auto& s) { return s.process == process; });
        return alone || calls_agree(sites) ? at(sites.begin()->thread, sites.begin()->start_us) : kNone;
    }
    if (shared_externals_.count(kernel.external) != 0) return kNone;
    const auto found = kernel.external >= 0 ? by_external_.find(kernel.external) : by_external_.end();
    return found == by_external_.end() ? kNone : static_cast<std::int64_t>(found->second);
}

std::int64_t OpTree::attention_around(std::int64_t op) const {
    std::int64_t outermost = kNone;
    for (; op != kNone; op = parent_[static_cast<std::size_t>(op)]) {
        if (is_attention_op_[run(op).name]) outermost = op;
    }
    return outermost;
}

std::int64_t OpTree::outermost(std::int64_t op, const std::function<bool(std::int64_t)>& fits) const {
    std::int64_t found = kNone;
    for (; op != kNone; op = parent_[static_cast<std::size_t>(op)]) {
        if (fits(op)) found = op;
    }
    return found;
}

bool OpTree::inside(std::int64_t op, std::string_view wanted) const {
    for (; op != kNone; op = parent_[static_cast<std::size_t>(op)]) {
        if (name(op) == wanted) return true;
    }
    return false;
}

const std::string& OpTree::inputs(std::int64_t op) const {
    static const std::string kNothing;
    const std::uint32_t number = run(op).inputs;
    return number == Texts::kLost ? kNothing : trace_.inputs[number];
}

}  // namespace tessera::diagnose
