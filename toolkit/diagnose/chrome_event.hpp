// SPDX-License-Identifier: Apache-2.0
//
// Reads the events of a trace in Chrome's format, one at a time, and adds what they say about kernels to a Trace.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "diagnose/trace.hpp"

namespace tessera::diagnose {

/// Takes the values of one event after another; the keys of an event may come in any order.
class EventSink {
 public:
    explicit EventSink(Trace& trace) : trace_(trace) {}

    void begin_event() { event_ = {}; }
    void end_event();
    std::int64_t events() const { return events_; }

    void text(std::string_view key, std::string_view value);
    void number(std::string_view key, double value, std::int64_t whole);
    void argument_text(std::string_view key, std::string_view value);
    void argument_number(std::string_view key, std::int64_t whole);

    /// True if the list at this key of the arguments is needed. If so, argument_list() gets its text, with a comma
    /// behind each value.
    bool wants(std::string_view key) const;
    void argument_list(std::string_view key, std::string_view list);

    void begin_device() { trace_.gpus.emplace_back(); }
    void device_text(std::string_view key, std::string_view value);
    void device_number(std::string_view key, std::int64_t whole);
    void header_text(std::string_view key, std::string_view value);
    void header_number(std::string_view key, std::int64_t whole);

    /// Call it after the last event.
    void finish();

 private:
    struct Event {
        std::string name, category, phase, argument_name;
        std::string dims, types, strides, scalars;
        std::string process, thread;
        double start_us = 0;
        double us = 0;
        bool has_duration = false;
        std::int64_t correlation = -1;
        std::int64_t external = -1;
        std::int64_t device = -1;
        std::int64_t stream = -1;
    };
    using Row = std::pair<std::string, std::string>;  // process, thread

    void add_kernel();
    void add_op();
    void add_step();
    void add_metadata();
    std::uint32_t row_number(const Row& row);
    bool on_gpu_row() const;

    Trace& trace_;
    Event event_;
    std::int64_t events_ = 0;
    std::map<Row, std::uint32_t> rows_;
    std::set<std::string> gpu_processes_;  // JAX's processes for GPUs, by the names in its metadata
    std::map<Row, bool> stream_rows_;
    bool jax_ = false;
    std::map<std::int64_t, double> us_of_device_;     // kernels' time, by the profiler's number of the GPU
    std::map<std::size_t, std::int64_t> device_ids_;  // Trace::gpus's index -> the profiler's number
};

/// Parses "2.11.0+cu130" as a version; none for any other text.
std::optional<Version> version_of(std::string_view text);

/// True if an operator's launches are recorded.
bool is_kept_op(std::string_view name);

}  // namespace tessera::diagnose
