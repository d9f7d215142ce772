// SPDX-License-Identifier: Apache-2.0
#include "measure/host.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <ctime>
#include <fstream>

#include "cpu/matrix/primitives.hpp"
#include "cpu/simd/primitives.hpp"
#include "parallel.hpp"
#include "tessera/error.hpp"

namespace tessera::measure {
namespace {

/// Returns the first line of a file of /sys; empty if the file is missing.
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

/// Parses "32768K" or "32M" as bytes.
std::int64_t cache_size(const std::string& text) {
    char* unit = nullptr;
    const std::int64_t number = std::strtoll(text.c_str(), &unit, 10);
    if (*unit == 'K') return number << 10;
    if (*unit == 'M') return number << 20;
    if (*unit == 'G') return number << 30;
    return number;
}

constexpr const char* kFakeHost = "TESSERA_FAKE_HOST";

std::string_view trimmed(std::string_view text) {
    const std::size_t begin = text.find_first_not_of(' ');
    if (begin == std::string_view::npos) return {};
    return text.substr(begin, text.find_last_not_of(' ') - begin + 1);
}

int whole_number(std::string_view field, std::string_view text) {
    constexpr int kMost = 1 << 20;
    int value = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc() || end != text.data() + text.size() || value < 0 || value > kMost)
        throw Error(ErrorCode::invalid_argument, kFakeHost,
                    fmt::format("{}: expected 0..{}, got \"{}\"", field, kMost, text));
    return value;
}

/// Sets one field from a text such as "cores=16".
void fake_field(Host& host, std::string_view setting) {
    const std::size_t equals = std::min(setting.find('='), setting.size());
    const std::string_view field = trimmed(setting.substr(0, equals));
    const std::string_view value = equals < setting.size() ? trimmed(setting.substr(equals + 1)) : std::string_view();
    if (field == "cpu") host.cpu = value;
    else if (field == "isa") host.isa = value;
    else if (field == "matrix_unit") host.matrix_unit = value;
    else if (field == "cores") host.cores = std::max(1, whole_number(field, value));
    else if (field == "cache_mib") host.cache_bytes = std::int64_t{whole_number(field, value)} << 20;
    else
        throw Error(ErrorCode::invalid_argument, kFakeHost,
                    fmt::format("expected cpu, isa, matrix_unit, cores or cache_mib, got \"{}\"", field));
}

}  // namespace

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

Host describe_host() {
    Host host{.cpu = cpu_name(),
              .isa = cpu::simd::target_name(),
              .matrix_unit = cpu::matrix::name_of(cpu::matrix::unit()),
              .cores = available_threads(),
              .cache_bytes = last_level_cache()};
    const char* fake = std::getenv(kFakeHost);
    std::string_view rest = fake == nullptr ? "" : fake;
    host.faked = !rest.empty();
    while (!rest.empty()) {
        const std::size_t end = std::min(rest.find(';'), rest.size());
        if (!trimmed(rest.substr(0, end)).empty()) fake_field(host, rest.substr(0, end));
        rest.remove_prefix(std::min(end + 1, rest.size()));
    }
    return host;
}

std::string text_of(const Host& host) {
    std::string text = fmt::format("{} ({}", host.cpu, host.isa);
    if (!host.matrix_unit.empty()) text += ", " + host.matrix_unit;
    text += fmt::format(", {} core{}", host.cores, host.cores == 1 ? "" : "s");
    if (host.cache_bytes > 0) text += fmt::format(", {} MiB cache", host.cache_bytes >> 20);
    return text + ")";
}

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
