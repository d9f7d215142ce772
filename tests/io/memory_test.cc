// SPDX-License-Identifier: Apache-2.0
#include "io/memory.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "io/file.hpp"
#include "io_test_util.hpp"

namespace tessera::io::test::memory_test {
namespace {

constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;

/// A /proc and /sys of a machine with 1000 MiB, of which 600 are available.
struct FakeSystem {
    Folder folder;
    FakeSystem() { put("proc/meminfo", "MemTotal: 1024000 kB\nMemFree: 1024 kB\nMemAvailable:   614400 kB\n"); }
    void put(const std::string& name, const std::string& text) const {
        const std::filesystem::path path = folder.file(name);
        std::filesystem::create_directories(path.parent_path());
        std::ofstream(path) << text;
    }
    MemoryState state() const { return memory_state(folder.path()); }
};

TEST(Memory, what_is_left_of_the_machine) {
    const FakeSystem system;
    EXPECT_EQ(system.state().limit, 1000 * kMiB);
    EXPECT_EQ(system.state().left, 600 * kMiB);
    system.put("proc/meminfo", "MemTotal: 1024000 kB\nMemAvailable: 614400 kB\nSwapFree: 102400 kB\n");
    EXPECT_EQ(system.state().left, 700 * kMiB);
}

TEST(Memory, groups_of_version_2_with_those_around_them) {
    const FakeSystem system;
    system.put("proc/self/cgroup", "0::/a/b\n");
    system.put("sys/fs/cgroup/a/b/memory.max", "max\n");
    system.put("sys/fs/cgroup/a/memory.max", fmt::format("{}\n", 500 * kMiB));
    system.put("sys/fs/cgroup/a/memory.current", fmt::format("{}\n", 450 * kMiB));
    EXPECT_EQ(system.state().limit, 500 * kMiB);
    EXPECT_EQ(system.state().left, 50 * kMiB);
    system.put("sys/fs/cgroup/a/memory.stat", fmt::format("anon 5\nactive_file 7\ninactive_file {}\n", 400 * kMiB));
    EXPECT_EQ(system.state().left, 450 * kMiB) << "pages of files give way";
}

TEST(Memory, groups_of_version_1) {
    const FakeSystem system;
    system.put("proc/self/cgroup", "8:pids:/x\n4:cpu,memory:/a\n0::/\n");
    system.put("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
    system.put("sys/fs/cgroup/memory/a/memory.limit_in_bytes", fmt::format("{}\n", 300 * kMiB));
    system.put("sys/fs/cgroup/memory/a/memory.usage_in_bytes", fmt::format("{}\n", 310 * kMiB));
    EXPECT_EQ(system.state().limit, 300 * kMiB);
    EXPECT_EQ(system.state().left, 0U);
}

TEST(Memory, what_is_too_much_together_is_refused) {
    const std::uint64_t left = memory_state().left;
    ASSERT_GT(left, 0U);
    expect_memory(0, "nothing");
    expect_error(ErrorCode::out_of_memory, "scores: expected at most ",
                 [] { expect_memory(std::uint64_t{1} << 60, "scores"); });
    expect_error(ErrorCode::out_of_memory, "q: expected at most ", [] { allocate(std::uint64_t{1} << 60, "q"); });
}

}  // namespace
}  // namespace tessera::io::test::memory_test
