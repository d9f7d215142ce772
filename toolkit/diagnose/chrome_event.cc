// SPDX-License-Identifier: Apache-2.0
#include "diagnose/chrome_event.hpp"

#include <algorithm>

#include "diagnose/kernel_text.hpp"

namespace tessera::diagnose {
namespace {

constexpr std::size_t kMostRows = 100'000;
constexpr std::size_t kMostGpus = 1024;

/// Converts the list to JSON by removing the comma after the last value of each list.
std::string json_of_list(std::string_view list) {
    std::string text;
    for (const char c : list) {
        if ((c == ']' || c == '}') && !text.empty() && text.back() == ',') text.back() = c;
        else text += c;
    }
    if (!text.empty() && text.back() == ',') text.pop_back();
    return text;
}

}  // namespace

std::optional<Version> version_of(std::string_view text) {
    Version version;
    int* parts[] = {&version.major, &version.minor, &version.patch};
    std::size_t at = 0;
    for (std::size_t part = 0; part < 3; ++part) {
        std::size_t end = at;
        while (end < text.size() && text[end] >= '0' && text[end] <= '9') ++end;
        const auto value = number(text.substr(at, end - at));
        if (!value) return part >= 2 ? std::optional(version) : std::nullopt;
        *parts[part] = *value;
        if (end == text.size() || text[end] != '.') return part >= 1 ? std::optional(version) : std::nullopt;
        at = end + 1;
    }
    return version;
}

bool is_kept_op(std::string_view name) {
    // These two repeat K and V for grouped heads.
    if (name == "aten::repeat_interleave" || name == "aten::expand") return true;
    for (const char* op : {"aten::_softmax", "aten::softmax", "aten::_safe_softmax", "aten::_softmax_backward_data",
                           "SafeSoftmaxBackward0", "SoftmaxBackwardDataBackward0", "aten::bmm", "aten::baddbmm",
                           "aten::index_add_", "sgl_kernel::fwd"}) {
        if (name == op) return true;
    }
    const std::string lower = lower_case(name.substr(0, 256));
    // a softmax with operators that Inductor fused around it
    if (contains(lower, "triton_") && contains(lower, "_softmax")) return true;
    return contains_any(lower, {"attention", "attn", "sdpa", "fmha", "scaleddotproduct", "flash_fwd", "flash_bwd"});
}

void EventSink::text(std::string_view key, std::string_view value) {
    if (key == "name") event_.name = value.substr(0, kLongestName);
    else if (key == "cat") event_.category = value.substr(0, 64);
    else if (key == "ph") event_.phase = value.substr(0, 4);
    else if (key == "pid") event_.process = value.substr(0, 128);
    else if (key == "tid") event_.thread = value.substr(0, 128);
}

void EventSink::number(std::string_view key, double value, std::int64_t whole) {
    if (key == "ts") event_.start_us = value;
    else if (key == "dur") event_.us = value, event_.has_duration = true;
    else if (key == "pid") event_.process = std::to_string(whole);
    else if (key == "tid") event_.thread = std::to_string(whole);
}

void EventSink::argument_text(std::string_view key, std::string_view value) {
    if (key == "name") event_.argument_name = value.substr(0, 256);
}

void EventSink::argument_number(std::string_view key, std::int64_t whole) {
    if (key == "correlation" || key == "correlation_id") event_.correlation = whole;
    else if (key == "External id" || key == "external id") event_.external = whole;
    else if (key == "device") event_.device = whole;
    else if (key == "stream") event_.stream = whole;
}

bool EventSink::wants(std::string_view key) const {
    const bool known = key == "Input Dims" || key == "Input type" || key == "Input Strides" || key == "Concrete Inputs";
    return known && (event_.name.empty() || is_kept_op(event_.name));
}

void EventSink::argument_list(std::string_view key, std::string_view list) {
    std::string text = json_of_list(list);
    if (key == "Input Dims") event_.dims = std::move(text);
    else if (key == "Input type") event_.types = std::move(text);
    else if (key == "Input Strides") event_.strides = std::move(text);
    else if (key == "Concrete Inputs") event_.scalars = std::move(text);
}

void EventSink::end_event() {
    ++events_;
    if (event_.phase == "M") return add_metadata();
    if (event_.phase != "X" || !(event_.us >= 0) || event_.us > 1e15) return;
    if (event_.category == "kernel" || event_.category == "Kernel") return add_kernel();
    if (event_.category.empty() && jax_ && on_gpu_row()) return add_kernel();
    if (event_.category == "user_annotation") return add_step();
    if (event_.category == "cpu_op" || event_.category == "Operator") {
        if (is_kept_op(event_.name)) add_op();
        return;
    }
    const bool launch = contains(event_.category, "cuda_") || contains(event_.category, "hip_") ||
                        event_.category == "Runtime" || contains(event_.category, "_runtime");
    if (launch && event_.correlation >= 0 && contains(event_.name, "Launch")) {
        trace_.add(LaunchSite{event_.correlation, event_.start_us, row_number({event_.process, event_.thread}),
                              row_number({event_.process, ""})});
    }
}

void EventSink::add_kernel() {
    KernelRun run;
    run.name = trace_.kernels.number_of(event_.name);
    const std::string device = "gpu " + std::to_string(event_.device) + " " + event_.process;
    run.stream = row_number({device, event_.stream >= 0 ? std::to_string(event_.stream) : event_.thread});
    trace_.device_of_stream.try_emplace(run.stream, row_number({device, ""}));
    run.start_us = event_.start_us;
    run.us = event_.us;
    run.correlation = event_.correlation;
    run.external = event_.external;
    if (event_.us > 0) us_of_device_[event_.device] += event_.us;
    trace_.add(run);
}

/// Keeps "ProfilerStep#7", which torch.profiler's step() makes.
void EventSink::add_step() {
    if (event_.name.compare(0, 13, "ProfilerStep#") != 0) return;
    const auto step = number_after(event_.name, "ProfilerStep#");
    if (step) trace_.add(MarkedStep{*step, event_.start_us, event_.start_us + event_.us});
}

void EventSink::add_op() {
    OpRun op;
    op.name = trace_.ops_named.number_of(event_.name);
    op.thread = row_number({event_.process, event_.thread});
    op.process = row_number({event_.process, ""});
    op.start_us = event_.start_us;
    op.end_us = event_.start_us + event_.us;
    op.external = event_.external;
    if (!event_.dims.empty()) {
        const auto part = [](const char* key, const std::string& list) {
            return list.empty() ? std::string() : std::string(",\"") + key + "\":" + list;
        };
        op.inputs = trace_.inputs.number_of("{\"dims\":" + event_.dims + part("types", event_.types) +
                                            part("strides", event_.strides) + part("scalars", event_.scalars) + "}");
    }
    trace_.add(op);
}

/// Reads the names of processes and threads, by which JAX marks the streams of a GPU.
void EventSink::add_metadata() {
    if (stream_rows_.size() > kMostRows || gpu_processes_.size() > kMostRows) return;
    if (event_.name == "process_name" && contains(event_.argument_name, "/device:GPU")) {
        gpu_processes_.insert(event_.process);
        jax_ = true;
    } else if (event_.name == "thread_name") {
        stream_rows_[{event_.process, event_.thread}] = contains(event_.argument_name, "Stream");
    }
}

bool EventSink::on_gpu_row() const {
    if (gpu_processes_.count(event_.process) == 0) return false;
    const auto row = stream_rows_.find({event_.process, event_.thread});
    return row == stream_rows_.end() || row->second;
}

std::uint32_t EventSink::row_number(const Row& row) {
    if (const auto found = rows_.find(row); found != rows_.end()) return found->second;
    if (rows_.size() >= kMostRows) return 0;
    return rows_.emplace(row, static_cast<std::uint32_t>(rows_.size() + 1)).first->second;
}

void EventSink::device_text(std::string_view key, std::string_view value) {
    if (key == "name" && !trace_.gpus.empty()) trace_.gpus.back().name = value.substr(0, 128);
}

void EventSink::device_number(std::string_view key, std::int64_t whole) {
    if (trace_.gpus.empty() || trace_.gpus.size() > kMostGpus || whole < 0) return;
    constexpr std::int64_t kMostMultiprocessors = 4096;
    if (key == "id") device_ids_[trace_.gpus.size() - 1] = whole;
    if (key == "numSms" && whole > 0 && whole <= kMostMultiprocessors)
        trace_.gpus.back().multiprocessors = static_cast<int>(whole);
    if (key == "totalGlobalMem" && whole > 0) trace_.gpus.back().memory_gib = static_cast<double>(whole) / 1073741824.0;
    if (whole > 99) return;
    std::optional<int>& capability = trace_.gpus.back().capability;
    if (key == "computeMajor") capability = static_cast<int>(whole) * 10 + capability.value_or(0);
    if (key == "computeMinor") capability = capability.value_or(0) + static_cast<int>(whole);
}

void EventSink::header_text(std::string_view key, std::string_view value) {
    const std::string lower = lower_case(key);
    if (contains(lower, "torch") && contains(lower, "version")) trace_.torch = version_of(value);
}

void EventSink::header_number(std::string_view key, std::int64_t whole) {
    if (key == "cuda_runtime_version" && whole > 0 && whole < 1'000'000) trace_.cuda = static_cast<int>(whole);
}

void EventSink::finish() {
    trace_.timed = trace_.ordered = true;
    trace_.tool = jax_ ? "JAX profiler" : "PyTorch profiler";
    // A trace may list GPUs that ran nothing, and its merged parts list them again; one of several equal GPUs is
    // enough.
    std::vector<std::pair<double, Gpu>> listed;
    double all_us = 0;
    for (std::size_t i = 0; i < trace_.gpus.size(); ++i) {
        const auto id = device_ids_.find(i);
        const auto us = id == device_ids_.end() ? us_of_device_.end() : us_of_device_.find(id->second);
        listed.emplace_back(us == us_of_device_.end() ? 0 : us->second, trace_.gpus[i]);
        all_us += listed.back().first;
    }
    if (all_us > 0) std::erase_if(listed, [](const auto& gpu) { return gpu.first <= 0; });
    std::stable_sort(listed.begin(), listed.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
    std::vector<Gpu> different;
    for (const auto& one : listed) {
        const Gpu& gpu = one.second;
        const bool known = std::any_of(different.begin(), different.end(), [&](const Gpu& other) {
            return other.name == gpu.name && other.capability == gpu.capability &&
                   other.multiprocessors == gpu.multiprocessors;
        });
        if (!known) different.push_back(gpu);
    }
    trace_.gpus = std::move(different);
}

}  // namespace tessera::diagnose
