// SPDX-License-Identifier: Apache-2.0
#include "measure/cold_cache.hpp"

#include "core/extent.hpp"

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace tessera::measure {
namespace {

constexpr std::size_t kLine = 64;

}  // namespace

#if defined(__x86_64__)

ColdCache::ColdCache(std::int64_t) {}

void ColdCache::evict(std::span<const TensorView> tensors) {
    for (const TensorView& tensor : tensors) {
        const std::span<const std::byte> bytes = extent(tensor);
        for (std::size_t at = 0; at < bytes.size(); at += kLine) _mm_clflush(bytes.data() + at);
        if (!bytes.empty()) _mm_clflush(&bytes.back());  // the first line may begin before the first byte
    }
    _mm_mfence();
}

#else

/// Twice the cache replaces its content under any of the usual replacement rules.
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
