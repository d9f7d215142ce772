// SPDX-License-Identifier: Apache-2.0
#include "core/arena.hpp"

#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

namespace tessera::arena_test {
namespace {

constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();

TEST(Arena, aligned_disjoint_and_inside) {
    alignas(Arena::kAlignment) std::array<std::byte, 512> memory{};
    Arena arena(memory);
    const auto address = [](const void* p) { return reinterpret_cast<std::uintptr_t>(p); };
    const char* a = arena.take<char>(1);
    const double* b = arena.take<double>(9);
    const float* c = arena.take<float>(16);
    const char* d = arena.take<char>(1);
    for (const void* p : {static_cast<const void*>(a), static_cast<const void*>(b), static_cast<const void*>(c)}) {
        EXPECT_EQ(address(p) % Arena::kAlignment, 0u);
    }
    EXPECT_EQ(address(a), address(memory.data()));
    EXPECT_EQ(address(b) - address(a), 64u);
    EXPECT_EQ(address(c) - address(b), 128u);
    EXPECT_EQ(address(d) - address(c), 64u);
    EXPECT_EQ(arena.used(), 320u);
    EXPECT_LE(arena.used(), memory.size());
}

TEST(Arena, measures_what_it_hands_out) {
    alignas(Arena::kAlignment) std::array<std::byte, 1024> memory{};
    Arena with(memory);
    Arena without;
    for (const std::int64_t count : {0, 1, 7, 8, 9, 0, 20}) {
        EXPECT_NE(with.take<double>(count), nullptr);
        EXPECT_EQ(without.take<double>(count), nullptr);
        EXPECT_EQ(with.used(), without.used());
    }
}

TEST(Arena, nothing_costs_nothing) {
    Arena arena;
    arena.take<double>(0);
    arena.take<double>(-5);
    EXPECT_EQ(arena.used(), 0u);
}

TEST(Arena, saturates_instead_of_wrapping) {
    const std::int64_t counts[] = {kMost,
                                   kMost / 2,
                                   kMost / 4,
                                   kMost / 8,
                                   static_cast<std::int64_t>(Arena::kTooMuch / 8),
                                   static_cast<std::int64_t>(Arena::kTooMuch / 8) - 1};
    for (const std::int64_t count : counts) {
        Arena arena;
        arena.take<char>(100);
        EXPECT_EQ(arena.take<double>(count), nullptr);
        EXPECT_EQ(arena.used(), Arena::kTooMuch) << count;
        arena.take<char>(1);  // stays there
        arena.take<double>(kMost);
        EXPECT_EQ(arena.used(), Arena::kTooMuch) << count;
    }
}

TEST(Arena, saturates_by_many_small_steps) {
    Arena arena;
    std::size_t before = 0;
    for (int i = 0; i < 100; ++i) {
        arena.take<char>(std::int64_t{1} << 56);
        EXPECT_GE(arena.used(), before);
        before = arena.used();
    }
    EXPECT_EQ(arena.used(), Arena::kTooMuch);
}

TEST(Arena, large_sizes_are_exact) {
    Arena arena;
    arena.take<double>(std::int64_t{1} << 50);
    EXPECT_EQ(arena.used(), std::size_t{1} << 53);
}

TEST(WorkerMemory, workers_lie_one_after_another) {
    const auto lay_out = [](Arena& one) { return std::pair{one.take<char>(3), one.take<double>(5)}; };
    Arena measured;
    const WorkerMemory none(measured, 3, lay_out);
    ASSERT_EQ(measured.used(), 3 * 2 * Arena::kAlignment);
    std::vector<std::byte> memory(measured.used());
    Arena arena(memory);
    const WorkerMemory workers(arena, 3, lay_out);
    EXPECT_EQ(arena.used(), measured.used());
    for (int worker = 0; worker < 3; ++worker) {
        Arena one = workers.arena(worker);
        const auto [chars, doubles] = lay_out(one);
        const auto* begin = reinterpret_cast<const char*>(memory.data()) + worker * 2 * Arena::kAlignment;
        EXPECT_EQ(chars, begin);
        EXPECT_EQ(static_cast<const void*>(doubles), begin + Arena::kAlignment);
    }
}

TEST(WorkerMemory, too_much_stays_too_much) {
    Arena arena;
    const WorkerMemory workers(arena, 64, [](Arena& one) { one.take<double>(std::int64_t{1} << 57); });
    EXPECT_EQ(arena.used(), Arena::kTooMuch);
}

}  // namespace
}  // namespace tessera::arena_test
