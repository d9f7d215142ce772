// SPDX-License-Identifier: Apache-2.0
//
// Barriers, pipelines of stages, and registers that warpgroups exchange by setmaxnreg.
#include "cuda/on_device.cuh"
#include "cuda/ptx/barrier.cuh"
#include "cuda/tile/pipeline.cuh"

namespace tessera::cuda::test {
namespace {

/// One thread: writes what try_wait returns for both parities before and after each of `arrivals` arrivals, in two
/// phases.
__global__ void phases(int arrivals, int* said) {
    __shared__ ptx::Mbarrier barrier;
    ptx::mbarrier_init(barrier, arrivals);
    for (int phase = 0; phase < 2; ++phase) {
        for (int i = 0; i <= arrivals; ++i) {
            *said++ = ptx::mbarrier_try_wait(barrier, 0);
            *said++ = ptx::mbarrier_try_wait(barrier, 1);
            if (i < arrivals) ptx::mbarrier_arrive(barrier);
        }
    }
}

__device__ void pause(int reason) {
    if (reason % 3 == 0) __nanosleep(static_cast<unsigned>(reason % 7) * 100);
}

/// Warp 0 fills stages with the numbers 0, 1, 2 ...; the other warps read them. wrong: reads of another number.
template <int kStages>
__global__ void pass_through_ring(int rounds, int slow_side, int* wrong) {
    __shared__ Ring<kStages> ring;
    __shared__ int stages[kStages][32];
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int readers = static_cast<int>(blockDim.x) / 32 - 1;
    if (threadIdx.x == 0) ring.init(readers);
    __syncthreads();
    PipelineState<kStages> at;
    for (int i = 0; i < rounds; ++i, at.advance()) {
        if (slow_side == (warp == 0 ? 0 : 1)) pause(i + warp);
        if (warp == 0) {
            ring.producer_acquire(at);
            stages[at.index()][lane] = i + lane;
            __syncwarp();
            if (lane == 0) ptx::mbarrier_arrive(ring.full[at.index()]);
        } else {
            ring.consumer_wait(at);
            if (stages[at.index()][lane] != i + lane) atomicAdd(wrong, 1);
            __syncwarp();
            if (lane == 0) ring.consumer_release(at);
        }
    }
}

/// Two warpgroups alternate. order[i]: the warpgroup that had turn i.
__global__ void take_turns(int rounds, int* order) {
    __shared__ int next;
    const int warpgroup = static_cast<int>(threadIdx.x) / 128;
    if (threadIdx.x == 0) next = 0;
    __syncthreads();
    if (warpgroup == 1) ptx::named_barrier_arrive(1, 256);  // the first turn is warpgroup 0's
    for (int i = 0; i < rounds; ++i) {
        ptx::named_barrier_sync(1 + warpgroup, 256);
        if (threadIdx.x % 128 == 0) order[atomicAdd(&next, 1)] = warpgroup;
        pause(i + warpgroup);
        ptx::named_barrier_arrive(1 + (1 - warpgroup), 256);
    }
    if (warpgroup == 0) ptx::named_barrier_sync(1, 256);  // the last turn passed comes back
}

/// Consumers keep 208 numbers each. The launch gives 168 registers, so they take more by setmaxnreg.
__global__ void __launch_bounds__(384, 1) exchange_registers(const float* in, float* out) {
    constexpr int kHeld = 208;
    const int thread = static_cast<int>(threadIdx.x);
    if (thread < 128) {
        ptx::setmaxnreg_dec<24>();
        out[thread] = in[thread] + 1;
        return;
    }
    ptx::setmaxnreg_inc<240>();
    float held[kHeld];
#pragma unroll
    for (int i = 0; i < kHeld; ++i) held[i] = in[(thread + i) % 384];
    ptx::named_barrier_sync(1, 256);  // all numbers are in registers here
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) sum = fmaf(sum, 0.5F, held[kHeld - 1 - i]);
    out[thread] = sum;
}

class Barriers : public OnHopper {};

TEST_F(Barriers, an_mbarrier_phase_ends_with_its_last_arrival_and_parities_take_turns) {
    for (const int arrivals : {1, 2, 5}) {
        Mirror<int> said(static_cast<std::size_t>(2 * (arrivals + 1) * 2));
        run_block(phases, 1, 0, arrivals, said.device());
        said.fetch();
        std::size_t at = 0;
        for (int phase = 0; phase < 2; ++phase) {
            for (int i = 0; i <= arrivals; ++i) {
                const int running = i < arrivals ? phase : phase + 1;  // the incomplete phase
                EXPECT_EQ(said.host[at++], running == 1) << arrivals << " arrivals, phase " << phase << ", after " << i;
                EXPECT_EQ(said.host[at++], running != 1) << arrivals << " arrivals, phase " << phase << ", after " << i;
            }
        }
    }
}

TEST_F(Barriers, a_ring_hands_over_every_stage_in_order_whoever_is_slow) {
    for (const int slow_side : {0, 1, 2}) {
        Mirror<int> wrong(3);
        run_block(pass_through_ring<1>, 4 * 32, 0, 1000, slow_side, wrong.device());
        run_block(pass_through_ring<2>, 4 * 32, 0, 1000, slow_side, wrong.device() + 1);
        run_block(pass_through_ring<4>, 9 * 32, 0, 1000, slow_side, wrong.device() + 2);
        EXPECT_EQ(wrong.fetch(), std::vector<int>(3, 0));
    }
}

TEST_F(Barriers, named_barriers_make_two_warpgroups_take_turns) {
    constexpr int kRounds = 200;
    Mirror<int> order(2 * kRounds, -1);
    run_block(take_turns, 256, 0, kRounds, order.device());
    order.fetch();
    for (std::size_t i = 0; i < order.host.size(); ++i) ASSERT_EQ(order.host[i], i % 2) << "turn " << i;
}

TEST_F(Barriers, setmaxnreg_moves_registers_between_warpgroups_that_go_on_with_right_values) {
    std::vector<float> numbers(384);
    for (std::size_t i = 0; i < 384; ++i) numbers[i] = static_cast<float>(i % 97);
    const Mirror<float> in(numbers);
    Mirror<float> out(384);
    run_block(exchange_registers, 384, 0, static_cast<const float*>(in.device()), out.device());
    out.fetch();
    for (std::size_t thread = 0; thread < 384; ++thread) {
        float expected = 0;
        for (std::size_t i = 208; i-- > 0;) expected = expected * 0.5F + numbers[(thread + i) % 384];
        if (thread < 128) EXPECT_EQ(out.host[thread], numbers[thread] + 1);
        else EXPECT_NEAR(out.host[thread], expected, 1e-4);
    }
}

}  // namespace
}  // namespace tessera::cuda::test
