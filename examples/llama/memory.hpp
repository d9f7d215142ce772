// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <memory>

#include "io/memory.hpp"
#include "tessera/attention.hpp"

namespace llama {

/// The memory in which attention runs. Another device needs these four functions and nothing else of this program.
class Memory {
 public:
    virtual ~Memory() = default;
    virtual tessera::Device device() const = 0;
    /// Memory aligned to Plan::kWorkspaceAlignment that lives as long as a copy of the pointer. Throws
    /// Error(out_of_memory) that names `what`.
    virtual std::shared_ptr<std::byte> allocate(std::size_t bytes, const char* what) = 0;
    /// Copies wait for the attention of earlier calls, and are done when they return.
    virtual void copy_in(void* there, const void* here, std::size_t bytes) = 0;
    virtual void copy_out(void* here, const void* there, std::size_t bytes) = 0;
};

/// Memory for the data of a step. It grows as needed and is kept for the next step: to ask how much memory is left
/// takes longer than a small step.
struct Buffer {
    std::shared_ptr<std::byte> data;
    std::size_t bytes = 0;

    std::byte* reserve(Memory& memory, std::size_t needed) {
        if (bytes < needed) {
            const std::size_t more = std::max(needed, 2 * bytes);
            *this = {memory.allocate(more, "a step"), more};
        }
        return data.get();
    }
};

class HostMemory final : public Memory {
 public:
    tessera::Device device() const override { return {}; }
    std::shared_ptr<std::byte> allocate(std::size_t bytes, const char* what) override {
        tessera::io::expect_memory(bytes, what);
        const auto owner = std::make_shared<tessera::Workspace>(bytes);
        return {owner, owner->span().data()};
    }
    void copy_in(void* there, const void* here, std::size_t bytes) override { copy(there, here, bytes); }
    void copy_out(void* here, const void* there, std::size_t bytes) override { copy(here, there, bytes); }

 private:
    /// A tensor without elements may have a null pointer, which memcpy refuses for 0 bytes too.
    static void copy(void* to, const void* from, std::size_t bytes) {
        if (bytes > 0) std::memcpy(to, from, bytes);
    }
};

}  // namespace llama
