// SPDX-License-Identifier: Apache-2.0
#include "measure/host.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <ctime>
#include <fstream>

#include "parallel.hpp"

namespace tessera::measure {
namespace {

/// The first line of a file of /sys; empty when there is none.
std::string first_line(const std::string& path) {
    std::ifstream file(path);
    std::string line;
    std::getline(file, line);
    return line;
}

/// Calls f(value) for each line "key : value" of /proc/cpuinfo.
template <class F>
void for_each_cpuinfo(const std::string& key, F&& f) {
    std::ifstream file("/proc/cpuinfo");
    for (std::string line; std::getline(file, line);) {
        const std::size_t colon = line.find(':');
        if (colon == std::string::npos || line.compare(0, key.size(), key) != 0) continue;
        const std::size_t begin = line.find_first_not_of(" \t", colon + 1);
        if (begin != std::string::npos) f(line.substr(begin));
    }
}

std::string cpu_name() {
    std::string name;
    for_each_cpuinfo("model name", [&](const std::string& value) { name = name.empty() ? value : name; });
    if (name.empty()) name = first_line("/proc/device-tree/model");
    return name.empty() ? "unknown" : name;
}

/// "32768K" or "32M" as bytes.
std::int64_t cache_size(const std::string& text) {
    char* unit = nullptr;
    const std::int64_t number = std::strtoll(text.c_str(), &unit, 10);
    if (*unit == 'K') return number << 10;
    if (*unit == 'M') return number << 20;
    if (*unit == 'G') return number << 30;
    return number;
}

std::int64_t last_level_cache() {
    constexpr int kMostLevels = 8;
    std::int64_t largest = 0;
    for (int index = 0; index < kMostLevels; ++index) {
        const std::string size = first_line(fmt::format("/sys/devices/system/cpu/cpu0/cache/index{}/size", index));
        if (size.empty()) break;
        largest = std::max(largest, cache_size(size));
    }
    return largest;
}

}  // namespace

Host describe_host() { return {.cpu = cpu_name(), .cores = available_threads(), .cache_bytes = last_level_cache()}; }

double clock_mhz() {
    double fastest = 0;
    constexpr int kMostCores = 4096;
    for (int core = 0; core < kMostCores; ++core) {
        const std::string khz = first_line(fmt::format("/sys/devices/system/cpu/cpu{}/cpufreq/scaling_cur_freq", core));
        if (khz.empty()) break;
        fastest = std::max(fastest, std::atof(khz.c_str()) / 1e3);
    }
    if (fastest > 0) return fastest;
    for_each_cpuinfo("cpu MHz", [&](const std::string& mhz) { fastest = std::max(fastest, std::atof(mhz.c_str())); });
    return fastest;
}

std::string utc_date() {
    const std::time_t now = std::time(nullptr);
    std::tm parts{};
    ::gmtime_r(&now, &parts);
    char text[32];
    std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", &parts);
    return text;
}

}  // namespace tessera::measure
