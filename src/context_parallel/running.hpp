// SPDX-License-Identifier: Apache-2.0
//
// A call of ContextParallel in its steps: the memory of K and V of all ranks, their exchange beside the kernels, and
// the way back of dK and dV.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "context_parallel/state.hpp"
#include "core/arena.hpp"
#include "tessera/error.hpp"

namespace tessera::ranks {

using State = ContextParallel::State;

// With up to so many steps each has memory of its own for K and V; with more, two take turns.
inline constexpr std::size_t kMostBuffers = 4;

// Marks of a step, by its buffer.
inline constexpr int kArrived = 0;   // K and V of the step are there
inline constexpr int kComputed = 4;  // the kernels of the step are done with K and V, and have written their dK and dV
inline constexpr int kReturned = 8;  // dK and dV of the step are there; two buffers
inline constexpr int kBegun = 10;    // the caller's stream has reached the call
inline constexpr int kSettled = 11;  // another stream has done all
inline constexpr int kForked = 12;   // the second stream may begin with calls of a step
inline constexpr int kJoined = 13;   // and has done them

/// The memory of a call.
struct Memory {
    std::vector<std::byte*>
        keys;                   ///< [batch * total, heads, head_dim + head_dim_v], as [K of all heads | V of all heads]
    std::byte* parts[2] = {};   ///< [parts, ..] likewise: dK and dV of the widest step
    std::byte* kernel[2] = {};  ///< workspaces of the kernels on the caller's stream and on the second one
    std::size_t kernel_bytes = 0;

    Memory(const State& s, Pass pass, Arena& arena) {
        const std::vector<Step>& steps = s.steps_of(pass);
        const std::int64_t size = size_of(s.whole.dtype), widest = s.width(s.widest_step(pass)) * size;
        if (steps.size() <= kMostBuffers) {
            for (const Step& step : steps)
                keys.push_back(arena.take<std::byte>(s.batch, s.total, s.width(step.heads()) * size));
        } else {
            for (int i = 0; i < 2; ++i) keys.push_back(arena.take<std::byte>(s.batch, s.total, widest));
        }
        for (std::size_t i = 0; pass == Pass::backward && i < std::min<std::size_t>(steps.size(), 2); ++i)
            parts[i] = arena.take<std::byte>(s.parts, widest);
        kernel_bytes = s.kernel_bytes(pass);
        for (std::byte*& workspace_of : kernel)
            workspace_of = arena.take<std::byte>(static_cast<std::int64_t>(kernel_bytes));
    }
};

/// The dimension of the rows in a tensor of this rank: [batch, rows, heads, dim] or with documents [rows, heads, dim].
inline std::size_t row_dim(const TensorView& t) { return static_cast<std::size_t>(t.rank) - 3; }

/// The rows of a rank and the query heads that one call of a step computes.
struct CallPart {
    std::int64_t row, rows;
    std::int64_t first_head, heads;

    CallPart(const PlannedCall& planned, const Step& step, std::int64_t group)
        : row(planned.call.row()),
          rows(planned.call.rows()),
          first_head(step.first * group),
          heads(step.heads() * group) {}

    /// Its part of a tensor of this rank.
    TensorView of(TensorView t) const {
        if (!t.given()) return t;
        const std::size_t r = row_dim(t);
        t.data =
            static_cast<std::byte*>(t.data) + (row * t.strides[r] + first_head * t.strides[r + 1]) * size_of(t.dtype);
        t.shape[r] = rows;
        t.shape[r + 1] = heads;
        return t;
    }
    /// Likewise of LSE: [batch, heads, rows] or [heads, rows].
    TensorView of_lse(TensorView t) const {
        if (!t.given()) return t;
        const std::size_t h = static_cast<std::size_t>(t.rank) - 2;
        t.data =
            static_cast<std::byte*>(t.data) + (first_head * t.strides[h] + row * t.strides[h + 1]) * size_of(t.dtype);
        t.shape[h] = heads;
        t.shape[h + 1] = rows;
        return t;
    }
};

/// One call of ContextParallel in its steps.
class Running {
 public:
    Running(const State& state, Pass pass, const TensorView& k, const TensorView& v, std::span<std::byte> workspace,
            const Execution& how)
        : s_(state), steps_(state.steps_of(pass)), arena_(workspace), memory_(state, pass, arena_), k_(k), v_(v) {
        main_ = state.device.type == DeviceType::cuda ? how.stream : nullptr;
        side_ = state.memory->side_stream();
        second_ = state.memory->second_stream();
        state.memory->mark(kBegun, main_);
        state.memory->wait(kBegun, side_);
        if (second_ != nullptr) state.memory->wait(kBegun, second_);  // a capture that ~Running() joins begins here
    }

    /// The caller's stream waits for the others, whatever happened: they may still write the workspace.
    ~Running() {
        try {
            for (void* stream : {side_, second_}) {
                s_.memory->mark(kSettled, stream);
                s_.memory->wait(kSettled, main_);
            }
        } catch (const Error&) {
            return;  // an error of the device, which the caller's next call sees too
        }
    }
    Running(const Running&) = delete;
    Running& operator=(const Running&) = delete;

    /// compute(step) runs the kernels of a step.
    template <class Compute>
    void each_step(const Compute& compute) {
        // This rank's rows are copied first, so that exchanges follow each other without a kernel of this stream
        // between them: it would wait for the kernels of attention.
        const std::size_t ahead = memory_.keys.size();
        for (std::size_t i = 0; i < ahead; ++i) copy_own_rows(i);
        for (std::size_t i = 0; i < ahead; ++i) exchange_rows(i);
        for (std::size_t i = 0; i < steps_.size(); ++i) {
            s_.memory->wait(kArrived + buffer(i), main_);
            compute(i);
            s_.memory->mark(kComputed + buffer(i), main_);
            if (i + ahead >= steps_.size()) continue;
            s_.memory->wait(kComputed + buffer(i), side_);
            copy_own_rows(i + ahead);
            exchange_rows(i + ahead);
        }
    }

    /// Starts the way of a step's dK and dV, whose kernels are queued.
    void return_parts(std::size_t step) {
        s_.memory->mark(kComputed + buffer(step), main_);
        s_.memory->wait(kComputed + buffer(step), side_);
        exchange(memory_.parts[step % 2], s_.parts_sent, s_.parts_received, step);
        s_.memory->mark(kReturned + static_cast<int>(step % 2), side_);
    }

    /// Adds dK and dV of a step, in the order of the sequence.
    void add_parts(std::size_t step, const TensorView& dk, const TensorView& dv) {
        s_.memory->wait(kReturned + static_cast<int>(step % 2), main_);
        const Step& heads = steps_[step];
        RowSums sums{.dtype = s_.whole.dtype,
                     .parts = memory_.parts[step % 2],
                     .sources = s_.sources,
                     .rows = s_.rows,
                     .widths = {heads.heads() * s_.whole.head_dim, heads.heads() * s_.whole.head_dim_v},
                     .to = {}};
        for (std::int64_t b = 0; b < s_.batch; ++b) {
            sums.first = s_.sums + b * s_.rows;
            sums.to[0] = rows_at(dk, b, 0, heads.first);
            sums.to[1] = rows_at(dv, b, 0, heads.first);
            s_.memory->add(sums, main_);
        }
    }

    /// K (V) of a call, as a view of the keys of a step.
    TensorView keys(const PlannedCall& planned, std::size_t step, bool values) const {
        return half(memory_.keys[step % memory_.keys.size()], planned.call.keys().begin, s_.total, planned, step,
                    values);
    }

    /// The memory that a call writes its dK (dV) to.
    TensorView parts(const PlannedCall& planned, std::size_t step, bool values) const {
        return half(memory_.parts[step % 2], planned.parts, planned.call.keys().size(), planned, step, values);
    }

    /// Runs call(planned, workspace, how) for every call of a step. Several calls alternate between two streams, so
    /// that one fills the multiprocessors that another leaves idle at its end.
    template <class Call>
    void each_call(const std::vector<PlannedCall>& calls, const Execution& how, const Call& call) {
        const bool both = calls.size() > 1 && second_ != nullptr;
        if (both) {
            s_.memory->mark(kForked, main_);
            s_.memory->wait(kForked, second_);
        }
        for (std::size_t i = 0; i < calls.size(); ++i) {
            const std::size_t which = both ? i % 2 : 0;
            Execution here = how;
            if (which == 1) here.stream = second_;
            call(calls[i], std::span<std::byte>{memory_.kernel[which], memory_.kernel_bytes}, here);
        }
        if (both) {
            s_.memory->mark(kJoined, second_);
            s_.memory->wait(kJoined, main_);
        }
    }

 private:
    int buffer(std::size_t step) const { return static_cast<int>(step % memory_.keys.size()); }

    /// Rows of a sequence of the batch, from a head on.
    static RowsAt rows_at(const TensorView& t, std::int64_t batch, std::int64_t row, std::int64_t head) {
        const std::size_t r = row_dim(t);
        const std::int64_t at = (r == 1 ? batch * t.strides[0] : 0) + row * t.strides[r] + head * t.strides[r + 1];
        return {static_cast<std::byte*>(t.data) + at * size_of(t.dtype),
                static_cast<std::size_t>(t.strides[r] * size_of(t.dtype))};
    }

    std::size_t row_bytes(std::size_t step) const {
        return static_cast<std::size_t>(s_.width(steps_[step].heads()) * size_of(s_.whole.dtype));
    }

    /// One half of rows [K | V] from `row` on, `stride` rows to the next sequence of the batch.
    TensorView half(std::byte* base, std::int64_t row, std::int64_t stride, const PlannedCall& planned,
                    std::size_t step, bool values) const {
        const Problem& p = s_.whole;
        const std::int64_t heads = steps_[step].heads(), width = s_.width(heads),
                           dim = values ? p.head_dim_v : p.head_dim;
        auto* data = base + static_cast<std::size_t>(row) * row_bytes(step);
        if (values) data += heads * p.head_dim * size_of(p.dtype);
        const std::int64_t rows = planned.call.keys().size();
        TensorView view{.data = data, .dtype = p.dtype, .rank = p.ragged ? 3 : 4, .device = s_.device};
        if (p.ragged) {
            view.shape = {rows, heads, dim};
            view.strides = {width, dim, 1};
        } else {
            view.shape = {s_.batch, rows, heads, dim};
            view.strides = {stride * width, width, dim, 1};
        }
        return view;
    }

    void exchange(std::byte* rows, const std::vector<PartRows>& sent, const std::vector<PartRows>& received,
                  std::size_t step) const {
        const std::size_t bytes = row_bytes(step);
        const auto messages = [&](const std::vector<PartRows>& some) {
            std::vector<Message> list;
            for (const PartRows& r : some)
                list.push_back(
                    {r.rank, rows + static_cast<std::size_t>(r.row) * bytes, static_cast<std::size_t>(r.rows) * bytes});
            return list;
        };
        if (s_.communicator->ranks() > 1) s_.communicator->exchange(messages(sent), messages(received), side_);
    }

    /// Copies this rank's rows of K and V of a step into the keys of the calls.
    void copy_own_rows(std::size_t step) {
        const Step& heads = steps_[step];
        const std::size_t bytes = row_bytes(step);
        std::byte* to = memory_.keys[step % memory_.keys.size()];
        const auto size = static_cast<std::size_t>(size_of(s_.whole.dtype) * heads.heads());
        const std::size_t of_k = size * static_cast<std::size_t>(s_.whole.head_dim);
        const std::size_t of_v = size * static_cast<std::size_t>(s_.whole.head_dim_v);
        for (std::int64_t b = 0; b < s_.batch; ++b) {
            for (const Piece& piece : s_.pieces) {
                std::byte* at = to + static_cast<std::size_t>(b * s_.total + piece.start) * bytes;
                s_.memory->copy({at, bytes}, rows_at(k_, b, piece.row, heads.first), of_k, piece.length, side_);
                s_.memory->copy({at + of_k, bytes}, rows_at(v_, b, piece.row, heads.first), of_v, piece.length, side_);
            }
        }
    }

    /// The exchange of K and V of a step.
    void exchange_rows(std::size_t step) {
        exchange(memory_.keys[step % memory_.keys.size()], s_.sent, s_.received, step);
        s_.memory->mark(kArrived + buffer(step), side_);
    }

    const State& s_;
    const std::vector<Step>& steps_;
    Arena arena_;
    Memory memory_;
    const TensorView& k_;
    const TensorView& v_;
    void* main_ = nullptr;
    void* side_ = nullptr;
    void* second_ = nullptr;
};

}  // namespace tessera::ranks
