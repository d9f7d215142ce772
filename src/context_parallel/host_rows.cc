// SPDX-License-Identifier: Apache-2.0
#include "context_parallel/host_rows.hpp"

#include <cstring>
#include <type_traits>
#include <vector>

#include "core/numeric.hpp"

namespace tessera::ranks {
namespace {

template <class T>
void add_row(const RowSums& sums, std::int64_t row) {
    using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;
    const std::int64_t width = sums.widths[0] + sums.widths[1];
    for (std::int64_t c = 0; c < width; ++c) {
        Wide total = 0;
        for (std::int64_t i = sums.first[row]; i < sums.first[row + 1]; ++i) {
            const T part = static_cast<const T*>(sums.parts)[sums.sources[i] * width + c];
            if constexpr (std::is_same_v<T, double>) total += part;
            else total += to_float(part);
        }
        const int half = c < sums.widths[0] ? 0 : 1;
        const RowsAt& to = sums.to[half];
        auto* at = static_cast<std::byte*>(to.data) + static_cast<std::size_t>(row) * to.pitch;
        reinterpret_cast<T*>(at)[half == 0 ? c : c - sums.widths[0]] = from_double<T>(static_cast<double>(total));
    }
}

class HostRows : public DeviceRows {
 public:
    void* allocate(std::size_t bytes) override { return memory_.emplace_back(bytes).data(); }
    void write(void* to, const void* from, std::size_t bytes) override {
        if (bytes > 0) std::memcpy(to, from, bytes);
    }
    void read(void* to, const void* from, std::size_t bytes) override { write(to, from, bytes); }

    void copy(const RowsAt& to, const RowsAt& from, std::size_t width, std::int64_t rows, void*) override {
        for (std::size_t row = 0; row < static_cast<std::size_t>(rows); ++row)
            std::memcpy(static_cast<std::byte*>(to.data) + row * to.pitch,
                        static_cast<const std::byte*>(from.data) + row * from.pitch, width);
    }

    void add(const RowSums& sums, void*) override {
        visit_floating(sums.dtype, [&](auto zero) {
            for (std::int64_t row = 0; row < sums.rows; ++row) add_row<decltype(zero)>(sums, row);
        });
    }

    void* side_stream() override { return nullptr; }
    void* second_stream() override { return nullptr; }
    void mark(int, void*) override {}
    void wait(int, void*) override {}

 private:
    std::vector<std::vector<std::byte>> memory_;
};

}  // namespace

std::unique_ptr<DeviceRows> host_rows() { return std::make_unique<HostRows>(); }

}  // namespace tessera::ranks
