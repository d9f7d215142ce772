// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <new>
#include <span>
#include <string>
#include <vector>

namespace tessera::io {

/// Alignment in bytes of every tensor that a reader returns.
inline constexpr std::size_t kAlignment = 64;

struct AlignedDelete {
    void operator()(std::byte* memory) const noexcept { ::operator delete[](memory, std::align_val_t{kAlignment}); }
};

/// Memory aligned to kAlignment, not initialised.
using AlignedBytes = std::unique_ptr<std::byte[], AlignedDelete>;

/// Allocates `bytes` (at least one). Throws Error(out_of_memory) that names `origin` if they exceed `limit` or the
/// allocation fails, so that a huge file is refused before the machine starts to swap.
AlignedBytes allocate(std::uint64_t bytes, const std::string& origin, std::uint64_t limit);
/// Allocates `bytes` with the available memory as the limit (memory.hpp).
AlignedBytes allocate(std::uint64_t bytes, const std::string& origin);

/// The source of a file's bytes. The format readers read the header first and check it. Then they read the payload
/// straight into its final memory, so that a file is never held twice.
class ByteSource {
 public:
    virtual ~ByteSource() = default;

    virtual std::uint64_t size() const = 0;

    /// Returns the name that messages use.
    virtual const std::string& origin() const = 0;

    /// Fills `into` from `offset`. Throws Error(bad_data) if the source ends before.
    virtual void read(std::uint64_t offset, std::span<std::byte> into) const = 0;
};

/// Bytes in memory that outlive the source.
class MemorySource final : public ByteSource {
 public:
    MemorySource(std::span<const std::byte> bytes, std::string origin) : bytes_(bytes), origin_(std::move(origin)) {}

    std::uint64_t size() const override { return bytes_.size(); }
    const std::string& origin() const override { return origin_; }
    void read(std::uint64_t offset, std::span<std::byte> into) const override;

 private:
    std::span<const std::byte> bytes_;
    std::string origin_;
};

/// An open regular file, read with pread. If the file shrinks meanwhile, pread gives an Error, while a mapping gives
/// SIGBUS.
class InputFile final : public ByteSource {
 public:
    /// Throws Error(cannot_open) if `path` is missing, unreadable or not a regular file (a directory, FIFO, socket or
    /// device); never blocks on a FIFO.
    explicit InputFile(const std::string& path);
    ~InputFile() override;
    InputFile(const InputFile&) = delete;
    InputFile& operator=(const InputFile&) = delete;

    std::uint64_t size() const override { return size_; }
    const std::string& origin() const override { return path_; }
    void read(std::uint64_t offset, std::span<std::byte> into) const override;

 private:
    std::string path_;
    int descriptor_ = -1;
    std::uint64_t size_ = 0;
};

/// The bytes of a whole file in their own memory.
struct FileBytes {
    AlignedBytes data;
    std::size_t size = 0;

    std::span<const std::byte> span() const { return {data.get(), size}; }
};

/// Reads a whole file. Throws as InputFile does, and Error(out_of_memory) if the file exceeds `limit` or free memory.
FileBytes read_file(const std::string& path, std::uint64_t limit = std::numeric_limits<std::uint64_t>::max());

/// The destination of an output's bytes.
class ByteSink {
 public:
    virtual ~ByteSink() = default;
    virtual void write(std::span<const std::byte> bytes) = 0;
};

class MemorySink final : public ByteSink {
 public:
    void write(std::span<const std::byte> bytes) override { bytes_.insert(bytes_.end(), bytes.begin(), bytes.end()); }
    std::vector<std::byte> take() { return std::move(bytes_); }

 private:
    std::vector<std::byte> bytes_;
};

}  // namespace tessera::io
