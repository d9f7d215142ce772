// SPDX-License-Identifier: Apache-2.0
//
// The events of a trace in Chrome's format, one at a time: what they say about kernels goes into a Trace.
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

/// Takes the values of one event after the other, in whatever order its keys stand.
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

    /// Whether the list at this key of the arguments is needed; argument_list() then gets its text, a comma behind each
    /// value.
    bool wants(std::string_view key) const;
    void argument_list(std::string_view key, std::string_view list);

    void begin_device() { trace_.gpus.emplace_back(); }
    void device_text(std::string_view key, std::string_view value);
    void device_number(std::string_view key, std::int64_t whole);
    void header_text(std::string_view key, std::string_view value);
    void header_number(std::string_view key, std::int64_t whole);

    /// After the last event.
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
    void add_metadata();
    std::uint32_t row_number(const Row& row);
    bool on_gpu_row() const;

    Trace& trace_;
    Event event_;
    std::int64_t events_ = 0;
    std::map<Row, std::uint32_t> rows_;
    std::set<std::string> gpu_processes_;  // of JAX, by the names that its metadata gives
    std::map<Row, bool> stream_rows_;
    bool jax_ = false;
};

/// "2.11.0+cu130" as a version; none when it is none.
std::optional<Version> version_of(std::string_view text);

/// An operator whose launches are looked at.
bool is_kept_op(std::string_view name);

}  // namespace tessera::diagnose
