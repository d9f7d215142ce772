// SPDX-License-Identifier: Apache-2.0
//
// Streams of bytes: a trace is read a piece at a time and is never held whole.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>

namespace tessera::diagnose {

/// Called regularly with the number of bytes read so far; `total` is 0 if it is unknown (a pipe).
using OnProgress = std::function<void(std::uint64_t done, std::uint64_t total)>;

class ByteStream {
 public:
    virtual ~ByteStream() = default;

    /// Fills the front of `into` and returns the number of bytes, 0 at the end. Throws Error(cannot_open) or
    /// Error(bad_data).
    virtual std::size_t read(std::span<char> into) = 0;

    /// The fault at the end of the stream ("the gzip stream is cut off"); empty if there is none.
    virtual std::string trouble() const { return ""; }
};

/// Opens a file, or standard input for "-". Throws Error(cannot_open).
std::unique_ptr<ByteStream> open_bytes(const std::string& path, OnProgress on_progress = {});

/// Streams bytes of memory, which must outlive the stream.
std::unique_ptr<ByteStream> bytes_of(std::string_view memory);

/// Reads the first bytes of a stream without consuming them, and decompresses the stream if they are gzip's.
class Sniffed {
 public:
    explicit Sniffed(std::unique_ptr<ByteStream> stream);

    /// At most 4096 bytes.
    std::string_view head() const { return head_; }
    std::unique_ptr<ByteStream> take();

 private:
    std::string head_;
    std::unique_ptr<ByteStream> rest_;
};

}  // namespace tessera::diagnose
