// SPDX-License-Identifier: Apache-2.0 Checks the readers of traces and of kernels' names with any bytes. The fuzz
// targets use it.
#pragma once

#include <cmath>
#include <stdexcept>
#include <string_view>

#include "diagnose/diagnosis.hpp"
#include "diagnose/kernel_text.hpp"
#include "diagnose/name.hpp"
#include "tessera/error.hpp"

namespace tessera::diagnose::fuzz {

inline void require(bool condition, const char* what) {
    if (!condition) throw std::logic_error(what);
}

inline void exercise_name(std::string_view name) {
    const NameReading reading = read_name(name);
    require(reading.arch >= 0 && reading.head_dim >= 0 && reading.tile_q >= 0, "no size is negative");
    require(reading.role != Role::attention || reading.confidence != Confidence::none, "an answer says how sure it is");
    require(reading.confidence == Confidence::none || !reading.evidence.empty(), "an answer has evidence");
    require(normalised(name).size() <= 64 * kLongestName, "the text is bounded");
}

/// True when the bytes were a trace, a table or names.
inline bool exercise_trace(std::string_view bytes) {
    try {
        Trace trace = read_trace_bytes(bytes, "input");
        const Diagnosis d = diagnose(trace);
        require(std::isfinite(d.gpu_us) && d.gpu_us >= 0, "the time is a number");
        require(d.attention_us <= d.gpu_us * (1 + 1e-9), "attention is a part of the whole");
        for (const AttentionKind& kind : d.kinds) require(!kind.kernels.empty(), "a kind has kernels");
        return true;
    } catch (const Error& error) {
        if (error.code() != ErrorCode::bad_data) throw;
        return false;
    }
}

}  // namespace tessera::diagnose::fuzz
