// SPDX-License-Identifier: Apache-2.0
#include "io/memory.hpp"

#include <fmt/format.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <fstream>
#include <limits>
#include <optional>
#include <string_view>

#include "tessera/error.hpp"

namespace tessera::io {
namespace {

constexpr std::uint64_t kUnlimited = std::numeric_limits<std::uint64_t>::max();

std::uint64_t difference(std::uint64_t a, std::uint64_t b) { return a > b ? a - b : 0; }

/// Returns the number after `key` in a file of "key number" lines; without a key, the file's first number.
std::optional<std::uint64_t> number_in(const std::string& path, std::string_view key = {}) {
    std::ifstream file(path);
    for (std::string line; std::getline(file, line);) {
        if (!line.starts_with(key)) continue;
        const std::size_t begin = line.find_first_not_of(" :\t", key.size());
        std::uint64_t number = 0;
        if (begin == std::string::npos) return std::nullopt;
        if (std::from_chars(line.data() + begin, line.data() + line.size(), number).ec == std::errc{}) return number;
        return std::nullopt;  // the file says "max"
    }
    return std::nullopt;
}

void add(MemoryState& state, std::uint64_t limit, std::uint64_t used) {
    state.limit = std::min(state.limit, limit);
    state.left = std::min(state.left, difference(limit, used));
}

/// The file names of a control group, in version 2 and version 1.
struct Names {
    const char *limit, *used, *cache;
};
constexpr Names kVersion2{"memory.max", "memory.current", "inactive_file "};
constexpr Names kVersion1{"memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file "};

/// Adds the limits of the group and of all its parent groups.
void add_groups(MemoryState& state, const std::string& mount, std::string path, const Names& names) {
    for (;; path.erase(path.rfind('/'))) {
        while (path.ends_with('/')) path.pop_back();
        const std::string folder = mount + path + "/";
        if (const auto limit = number_in(folder + names.limit)) {
            const std::uint64_t used = number_in(folder + names.used).value_or(0);
            add(state, *limit, difference(used, number_in(folder + "memory.stat", names.cache).value_or(0)));
        }
        if (path.empty()) return;
    }
}

void add_cgroups(MemoryState& state, const std::string& root) {
    std::ifstream file(root + "/proc/self/cgroup");
    for (std::string line; std::getline(file, line);) {  // lines such as "4:memory:/path" or "0::/path"
        const std::size_t first = line.find(':');
        const std::size_t second = first == std::string::npos ? first : line.find(':', first + 1);
        if (second == std::string::npos) continue;
        const std::string controllers = fmt::format(",{},", line.substr(first + 1, second - first - 1));
        const std::string path = line.substr(second + 1);
        if (controllers == ",,") add_groups(state, root + "/sys/fs/cgroup", path, kVersion2);
        else if (controllers.find(",memory,") != std::string::npos)
            add_groups(state, root + "/sys/fs/cgroup/memory", path, kVersion1);
    }
}

}  // namespace

MemoryState memory_state(const std::string& root) {
    MemoryState state{kUnlimited, kUnlimited};
    const auto kib = [&](const char* key) { return number_in(root + "/proc/meminfo", key).value_or(0) * 1024; };
    if (const std::uint64_t total = kib("MemTotal"); total > 0) {
        const std::uint64_t available = kib("MemAvailable") + kib("SwapFree");
        add(state, total, difference(total, available > 0 ? available : total));
    } else if (const long pages = ::sysconf(_SC_PHYS_PAGES); pages > 0) {
        add(state, static_cast<std::uint64_t>(pages) * static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE)), 0);
    }
    add_cgroups(state, root);
    struct rlimit space {};
    if (::getrlimit(RLIMIT_AS, &space) == 0 && space.rlim_cur != RLIM_INFINITY) {
        const auto page = static_cast<std::uint64_t>(std::max(0L, ::sysconf(_SC_PAGESIZE)));
        add(state, space.rlim_cur, number_in(root + "/proc/self/statm").value_or(0) * page);
    }
    return state;
}

void expect_memory(std::uint64_t bytes, const std::string& what) {
    const std::uint64_t left = memory_state().left;
    if (bytes <= left) return;
    throw Error(ErrorCode::out_of_memory, "",
                fmt::format("{}: expected at most {} bytes, the memory that is left, got {}", what, left, bytes));
}

}  // namespace tessera::io
