// SPDX-License-Identifier: Apache-2.0
#include "report/rows.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <set>
#include <string_view>
#include <tuple>

#include "measure/predicted.hpp"

namespace tessera::report {
namespace {

using measure::Record;

bool on_gpu(const Record& r) {
    const model::Machine* machine = model::machine_of_device(r.device);
    return r.kernel.starts_with("cuda.") || (machine != nullptr && machine->kind == model::MachineKind::gpu);
}

/// A feature of a Record: PyTorch's autograd called the backward. It describes the run, and the problem is unchanged.
constexpr const char* kAutograd = "autograd";

/// Returns the common name of a peer.
std::string label_of(const Record& r) {
    static const std::map<std::string, std::string> known = {{"cudnn", "cuDNN"},
                                                             {"fa2", "FlashAttention-2"},
                                                             {"fa3", "FlashAttention-3"},
                                                             {"fa4", "FlashAttention-4"},
                                                             {"torch_cpu", "PyTorch"}};
    if (r.by == "tessera") return "tessera " + r.schedule;
    const auto found = known.find(r.by);
    std::string label = found == known.end() ? r.by : found->second;
    if (r.features.find(kAutograd) != std::string::npos) label += " by autograd";
    if (r.pass == "backward" && r.deterministic && on_gpu(r)) label += ", deterministic";
    return label;
}

/// Ranks tessera's kernels first, from the newest schedule on, then the others by name.
auto rank_of(const std::string& label) {
    const bool other = !label.starts_with("tessera");
    const auto at = std::find_if(std::rbegin(kSchedules), std::rend(kSchedules), [&](Schedule schedule) {
        return label == fmt::format("tessera {}", name_of(schedule));
    });
    return std::make_tuple(other, at - std::rbegin(kSchedules), label);
}

std::string mask_of(const Record& r) {
    if (r.mask == "none") return "full";
    const bool square = r.len_q == r.len_kv;
    const bool is_causal = r.mask == "causal" || r.mask == "causal bottom-right" || r.mask == "causal top-left";
    return square && is_causal ? "causal" : r.mask;
}

std::string pair_text(std::int64_t a, std::int64_t b) {
    return a == b ? fmt::format("{}", a) : fmt::format("{}/{}", a, b);
}

void add(std::string& text, const std::string& part) {
    if (!text.empty()) text += ", ";
    text += part;
}

/// Returns the features of the problem. The residual of O and the caller do not change it and are left out.
std::string requested_features(const Record& r) {
    std::string text = r.features;
    for (const std::string_view kept : {"residual of O", kAutograd}) {
        if (!text.ends_with(kept)) continue;
        text.erase(text.size() - kept.size());
        if (text.ends_with(", ")) text.erase(text.size() - 2);
    }
    return text;
}

Group group_of(const Record& r) {
    Group g{.pass = r.pass, .dtype = r.dtype, .mask = mask_of(r)};
    g.heads = pair_text(r.heads_q, r.heads_kv);
    g.head_dim = pair_text(r.head_dim, r.head_dim_v);
    if (r.threads > 0 && !on_gpu(r)) add(g.others, fmt::format("{} thread{}", r.threads, r.threads == 1 ? "" : "s"));
    if (r.len_q != r.len_kv) add(g.others, fmt::format("{} quer{}", r.len_q, r.len_q == 1 ? "y" : "ies"));
    if (const std::string asked = requested_features(r); !asked.empty()) add(g.others, asked);
    return g;
}

auto key_of(const Group& g) {
    const auto numbers = [](const std::string& text) {
        return std::make_pair(text.size(), text);
    };  // sorts 64 before 128
    return std::make_tuple(g.pass == "backward", numbers(g.head_dim), numbers(g.heads), g.others, g.dtype,
                           g.mask != "full", g.mask);
}

/// True if both rows are of one case, under any name of the mask.
bool same_row(const Row& a, const Row& b) {
    const auto key = [](const Row& r) {
        return std::make_tuple(r.label, r.record.batch, r.record.len_q, r.record.len_kv);
    };
    return key(a) == key(b);
}

void take(Group& group, Row row) {
    const auto same =
        std::find_if(group.rows.begin(), group.rows.end(), [&](const Row& r) { return same_row(r, row); });
    if (same == group.rows.end()) return group.rows.push_back(std::move(row));
    ++group.replaced;
    if (same->record.date <= row.record.date) *same = std::move(row);
}

/// Splits a group so that it has one batch per length, or one group for each batch.
std::vector<Group> split_by_batch(const Group& group) {
    std::set<std::tuple<std::string, std::int64_t, std::int64_t>> seen;
    const bool split = std::any_of(group.rows.begin(), group.rows.end(), [&](const Row& r) {
        return !seen.insert({r.label, r.record.len_q, r.record.len_kv}).second;
    });
    if (!split) return {group};
    std::map<std::int64_t, Group> parts;
    for (const Row& row : group.rows) {
        Group& part = parts[row.record.batch];
        if (part.rows.empty()) {
            part = group;
            part.rows.clear();
            add(part.others, fmt::format("batch {}", row.record.batch));
        }
        part.rows.push_back(row);
    }
    std::vector<Group> result;
    for (auto& [batch, part] : parts) result.push_back(std::move(part));
    return result;
}

std::optional<std::string> reason_against(const Record& r) {
    if (r.pass != "forward" && r.pass != "backward") return "neither forward nor backward";
    if (!(r.ms > 0) || !(r.tflops > 0)) return "no time or no rate";
    return std::nullopt;
}

/// Returns the last prediction of this case among the Records, with the fields that a plot needs.
std::optional<model::Prediction> recorded_prediction(const Record& measured, std::span<const Record> predicted) {
    Record wanted = measured;
    wanted.what = "predicted";
    std::optional<model::Prediction> result;
    for (const Record& record : predicted) {
        if (!same_case(record, wanted) || !(record.ms > 0)) continue;
        result.emplace();
        result->ms = record.ms;
        result->tflops = record.tflops;
        result->bound = record.bound;
        const auto dram = record.bytes.find("dram");
        if (dram != record.bytes.end() && dram->second > 0)
            result->intensity = record.tflops * record.ms * 1e9 / dram->second;
    }
    return result;
}

DeviceRows device_of(const std::string& name, std::map<decltype(key_of(Group())), Group>& groups,
                     std::span<const Record> predicted, const model::Machine* machine) {
    DeviceRows device{.name = name};
    if (const model::Machine* known = model::machine_of_device(name)) machine = known;
    if (machine != nullptr) device.machine = *machine;
    std::set<std::string> labels;
    for (auto& [key, group] : groups) {
        device.replaced += group.replaced;
        std::stable_sort(group.rows.begin(), group.rows.end(), [](const Row& a, const Row& b) {
            return std::make_tuple(rank_of(a.label), a.record.len_kv) <
                   std::make_tuple(rank_of(b.label), b.record.len_kv);
        });
        for (Row& row : group.rows) {
            labels.insert(row.label);
            row.prediction =
                machine == nullptr ? recorded_prediction(row.record, predicted) : measure::predict(row.record, machine);
        }
        for (Group& part : split_by_batch(group)) device.groups.push_back(std::move(part));
    }
    device.labels.assign(labels.begin(), labels.end());
    std::sort(device.labels.begin(), device.labels.end(),
              [](const std::string& a, const std::string& b) { return rank_of(a) < rank_of(b); });
    return device;
}

}  // namespace

std::string Group::title() const {
    return fmt::format("{}, {}, head_dim {}", pass, mask == "full" ? "full mask" : mask, head_dim);
}

std::string Group::subtitle() const {
    return fmt::format("{}, {} head{}{}{}", dtype, heads, heads == "1" ? "" : "s", others.empty() ? "" : ", ", others);
}

std::vector<const Row*> Group::of(const std::string& label) const {
    std::vector<const Row*> result;
    for (const Row& row : rows) {
        if (row.label == label) result.push_back(&row);
    }
    return result;
}

std::size_t DeviceRows::count() const {
    std::size_t sum = 0;
    for (const Group& group : groups) sum += group.rows.size();
    return sum;
}

Sorted sorted(std::span<const Record> records, const model::Machine* machine) {
    std::map<std::string, std::map<decltype(key_of(Group())), Group>> devices;
    Sorted result;
    std::vector<Record> predicted;
    for (const Record& record : records) {
        if (record.what != "measured") {
            predicted.push_back(record);
            continue;
        }
        if (const auto reason = reason_against(record)) {
            ++result.left_out[*reason];
            continue;
        }
        const Group group = group_of(record);
        take(devices[record.device].try_emplace(key_of(group), group).first->second, {record, label_of(record), {}});
    }
    for (auto& [name, groups] : devices) result.devices.push_back(device_of(name, groups, predicted, machine));
    // The device with most measurements comes first.
    std::stable_sort(result.devices.begin(), result.devices.end(),
                     [](const DeviceRows& a, const DeviceRows& b) { return a.count() > b.count(); });
    return result;
}

}  // namespace tessera::report
