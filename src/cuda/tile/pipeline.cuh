// SPDX-License-Identifier: Apache-2.0
//
// Producer/consumer pipeline: a ring of shared-memory stages that one side fills and the other empties, synchronised by
// mbarriers. Rings that cp.async fills have a state of their own: decode/ring.cuh and block/shared.cuh say why.
#pragma once

#include "cuda/ptx/barrier.cuh"

namespace tessera::cuda {

/// Waits until the phase of this parity has ended.
__device__ __forceinline__ void wait(ptx::Mbarrier& barrier, std::uint32_t parity) {
    while (!ptx::mbarrier_try_wait(barrier, parity)) {
    }
}

/// The mbarriers of a ring of stages, and its four operations (CUTLASS: PipelineTmaAsync). `full` counts one arrival
/// and the bytes of the copy; `empty` one arrival of every reader. `state`: a PipelineState.
template <int kStages>
struct Ring {
    ptx::Mbarrier full[kStages];
    ptx::Mbarrier empty[kStages];

    __device__ void init(int readers, int writers = 1) {
        for (int s = 0; s < kStages; ++s) {
            ptx::mbarrier_init(full[s], writers);
            ptx::mbarrier_init(empty[s], readers);
        }
    }
    __device__ void end() {
        for (int s = 0; s < kStages; ++s) {
            ptx::mbarrier_inval(full[s]);
            ptx::mbarrier_inval(empty[s]);
        }
    }

    /// Producer: waits until the stage may be overwritten. The first round passes at once.
    template <class State>
    __device__ __forceinline__ void producer_acquire(const State& state) {
        wait(empty[state.index()], state.phase() ^ 1);
    }
    /// Consumer: does the stage hold its data? Doesn't wait.
    template <class State>
    __device__ __forceinline__ bool is_full(const State& state) {
        return ptx::mbarrier_test_wait(full[state.index()], state.phase());
    }
    /// Consumer: waits until the stage holds its data.
    template <class State>
    __device__ __forceinline__ void consumer_wait(const State& state) {
        wait(full[state.index()], state.phase());
    }
    /// Consumer: one arrival at `empty`, the stage was read.
    template <class State>
    __device__ __forceinline__ void consumer_release(const State& state) {
        ptx::mbarrier_arrive(empty[state.index()]);
    }
};

/// Phases of barriers that are not used in ring order: each counts its own.
struct StagePhases {
    std::uint32_t phases = 0;  ///< one bit for each stage

    __device__ __forceinline__ void wait(ptx::Mbarrier& barrier, int stage) {
        cuda::wait(barrier, phases >> stage & 1);
        phases ^= 1U << stage;
    }
};

/// How a PipelineState is kept in registers.
enum class StateStorage {
    counter,          ///< one register: how many stages were taken; kStages is a power of two
    index_and_phase,  ///< two registers, for any number of stages
};

/// Position of one side in a ring: the index of its stage and the parity of its phase (CUTLASS: PipelineState). Both
/// sides take the stages in the same order.
template <int kStages, StateStorage kStorage = StateStorage::counter>
class PipelineState {
    static_assert((kStages & (kStages - 1)) == 0, "the count wraps at a power of two");

 public:
    __device__ __forceinline__ int index() const { return static_cast<int>(taken_ % kStages); }
    __device__ __forceinline__ std::uint32_t phase() const { return taken_ / kStages & 1; }
    __device__ __forceinline__ void advance() { ++taken_; }

 private:
    std::uint32_t taken_ = 0;
};

template <int kStages>
class PipelineState<kStages, StateStorage::index_and_phase> {
 public:
    PipelineState() = default;
    __device__ __forceinline__ PipelineState(int index, std::uint32_t phase) : index_(index), phase_(phase) {}
    __device__ __forceinline__ int index() const { return index_; }
    __device__ __forceinline__ std::uint32_t phase() const { return phase_; }
    __device__ __forceinline__ void advance() {
        if (++index_ == kStages) index_ = 0, phase_ ^= 1;
    }
    /// Index of the stage before this one.
    __device__ __forceinline__ int previous_index() const { return index_ == 0 ? kStages - 1 : index_ - 1; }

 private:
    int index_ = 0;
    std::uint32_t phase_ = 0;
};

}  // namespace tessera::cuda
