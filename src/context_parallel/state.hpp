// SPDX-License-Identifier: Apache-2.0
//
// The state of a ContextParallel: the layout of this rank, its kernels' plans and its tables on the device.
#pragma once

#include <map>
#include <memory>
#include <vector>

#include "context_parallel/layout.hpp"
#include "core/device_rows.hpp"
#include "tessera/context_parallel.hpp"

namespace tessera::ranks {

/// Key heads [first, last) that are exchanged and computed together.
struct Step {
    std::int64_t first = 0;
    std::int64_t last = 0;
    std::int64_t heads() const { return last - first; }
};

/// A call of the kernels on this rank, and what it needs.
struct PlannedCall {
    SegmentCall call;
    std::map<std::int64_t, Plan> plans;  ///< by the key heads of a step
    TensorView cu_seqlens_q{};           ///< with documents; on the device
    TensorView cu_seqlens_kv{};
    std::int64_t parts = 0;  ///< backward: the first row of its dK and dV in the parts
};

/// The rows of dK and dV in one message.
struct PartRows {
    int rank = 0;
    std::int64_t row = 0;
    std::int64_t rows = 0;
};

/// The rows of K and V in one message; their index in the keys is the same for both ranks.
using KeyRows = PartRows;

}  // namespace tessera::ranks

namespace tessera {

struct ContextParallel::State {
    Problem whole;
    Communicator* communicator = nullptr;
    Device device{};
    std::unique_ptr<DeviceRows> memory;
    std::int64_t total = 0;  ///< rows of the sequence
    std::int64_t rows = 0;   ///< rows of this rank
    std::int64_t batch = 1;  ///< 1 with documents
    std::vector<std::int64_t> positions;
    std::vector<ranks::Piece> pieces;          ///< of this rank
    std::vector<ranks::Step> steps[2];         ///< by Pass
    std::vector<ranks::PlannedCall> calls[2];  ///< by Pass
    std::vector<ranks::KeyRows> sent, received;
    std::vector<ranks::PartRows> parts_sent, parts_received;
    std::int64_t parts = 0;                 ///< rows of dK and dV: those of this rank's calls, then those received
    const std::int64_t* sums = nullptr;     ///< RowSums::first, [batch * rows + 1]
    const std::int64_t* sources = nullptr;  ///< RowSums::sources

    const std::vector<ranks::Step>& steps_of(Pass pass) const { return steps[static_cast<int>(pass)]; }
    std::int64_t widest_step(Pass pass) const;  ///< key heads
    std::int64_t width(std::int64_t heads) const { return heads * (whole.head_dim + whole.head_dim_v); }
    std::size_t kernel_bytes(Pass pass) const;
};

}  // namespace tessera
