// SPDX-License-Identifier: Apache-2.0
//
// Bytes read in order, a piece at a time: a trace is never held whole.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>

namespace tessera::diagnose {

/// Told now and then how many of the file's bytes were read; `total` is 0 where that is unknown (a pipe).
using OnProgress = std::function<void(std::uint64_t done, std::uint64_t total)>;

class ByteStream {
 public:
    virtual ~ByteStream() = default;

    /// Fills the front of `into`; the number of bytes, 0 at the end. Throws Error(cannot_open) or Error(bad_data).
    virtual std::size_t read(std::span<char> into) = 0;

    /// What is wrong with the end of the stream ("the gzip stream is cut off"), or empty.
    virtual std::string trouble() const { return ""; }
};

/// A file, or standard input for "-". Throws Error(cannot_open).
std::unique_ptr<ByteStream> open_bytes(const std::string& path, OnProgress on_progress = {});

/// Bytes in memory that outlive the stream.
std::unique_ptr<ByteStream> bytes_of(std::string_view memory);

/// The first bytes of a stream, and the stream with them still in it; decompressed when they are gzip's.
class Sniffed {
 public:
    explicit Sniffed(std::unique_ptr<ByteStream> stream);

    /// Up to 4096 bytes.
    std::string_view head() const { return head_; }
    std::unique_ptr<ByteStream> take();

 private:
    std::string head_;
    std::unique_ptr<ByteStream> rest_;
};

}  // namespace tessera::diagnose
