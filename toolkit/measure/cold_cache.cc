// SPDX-License-Identifier: Apache-2.0
#include "measure/cold_cache.hpp"

#include "core/extent.hpp"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace tessera::measure {
namespace {

constexpr std::size_t kLine = 64;

}  // namespace

#if defined(__x86_64__)

namespace {

/// True if the CPU has clflushopt (since 2015), which need not wait for the line before.
bool flushes_in_any_order() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (b & (1U << 23)) != 0;
}

__attribute__((target("clflushopt"))) void flush_in_any_order(const std::byte* begin, std::size_t bytes) {
    for (std::size_t at = 0; at < bytes; at += kLine) _mm_clflushopt(const_cast<std::byte*>(begin) + at);
}

void flush(const std::byte* begin, std::size_t bytes) {
    for (std::size_t at = 0; at < bytes; at += kLine) _mm_clflush(begin + at);
}

}  // namespace

ColdCache::ColdCache(std::int64_t) {}

void ColdCache::evict(std::span<const TensorView> tensors) {
    static const auto flush_lines = flushes_in_any_order() ? flush_in_any_order : flush;
    for (const TensorView& tensor : tensors) {
        const std::span<const std::byte> bytes = extent(tensor);
        flush_lines(bytes.data(), bytes.size());
        if (!bytes.empty()) _mm_clflush(&bytes.back());  // the first line may begin before the first byte
    }
    _mm_mfence();
}

#else

/// Twice the cache size replaces its content under any usual replacement rule.
ColdCache::ColdCache(std::int64_t cache_bytes) {
    constexpr std::int64_t kUnknown = std::int64_t{64} << 20;
    buffer_.resize(static_cast<std::size_t>(cache_bytes > 0 ? cache_bytes : kUnknown) * 2);
}

void ColdCache::evict(std::span<const TensorView>) {
    volatile unsigned char* bytes = buffer_.data();
    for (std::size_t at = 0; at < buffer_.size(); at += kLine) bytes[at] = static_cast<unsigned char>(bytes[at] + 1);
}

#endif

}  // namespace tessera::measure
