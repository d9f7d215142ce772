// SPDX-License-Identifier: Apache-2.0
#include "measure/cold_cache.hpp"

#include <algorithm>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace tessera::measure {
namespace {

constexpr std::size_t kLine = 64;

/// The bytes between the lowest and the highest element of a view.
std::span<const std::byte> extent(const TensorView& view) {
    if (view.size() == 0) return {};
    std::int64_t low = 0;
    std::int64_t high = 0;
    for (std::size_t d = 0; d < static_cast<std::size_t>(view.rank); ++d) {
        const std::int64_t reach = (view.shape[d] - 1) * view.strides[d];
        low += std::min<std::int64_t>(reach, 0);
        high += std::max<std::int64_t>(reach, 0);
    }
    const auto* begin = static_cast<const std::byte*>(view.data) + low * size_of(view.dtype);
    return {begin, static_cast<std::size_t>((high - low + 1) * size_of(view.dtype))};
}

}  // namespace

#if defined(__x86_64__)

ColdCache::ColdCache(std::int64_t) {}

void ColdCache::evict(std::span<const TensorView> tensors) {
    for (const TensorView& tensor : tensors) {
        const auto bytes = extent(tensor);
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
