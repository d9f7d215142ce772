// SPDX-License-Identifier: Apache-2.0
#include "diagnose/op_tree.hpp"

#include <algorithm>

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
        if (trace.ops[i].external >= 0) by_external_.emplace(trace.ops[i].external, i);
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

std::int64_t OpTree::launched_by(const KernelRun& kernel) const {
    if (trace_.ops.empty()) return kNone;
    if (kernel.correlation >= 0) {
        const auto site =
            std::lower_bound(trace_.sites.begin(), trace_.sites.end(), kernel.correlation,
                             [](const LaunchSite& a, std::int64_t correlation) { return a.correlation < correlation; });
        if (site != trace_.sites.end() && site->correlation == kernel.correlation)
            return at(site->thread, site->start_us);
    }
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
