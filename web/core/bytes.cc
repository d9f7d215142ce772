// SPDX-License-Identifier: Apache-2.0
//
// Implements diagnose/bytes.hpp without zlib, and the reader of Nsight Systems' files without SQLite. The page reads
// pasted names and tables, and traces in plain JSON. For other files the error message names the command to use.
#include "diagnose/bytes.hpp"

#include <algorithm>
#include <fstream>
#include <iterator>

#include "diagnose/trace.hpp"
#include "tessera/error.hpp"

namespace tessera::diagnose {
namespace {

class Memory final : public ByteStream {
 public:
    explicit Memory(std::string bytes) : bytes_(std::move(bytes)) {}
    std::size_t read(std::span<char> into) override {
        const std::size_t count = std::min(into.size(), bytes_.size() - at_);
        std::copy_n(bytes_.data() + at_, count, into.data());
        at_ += count;
        return count;
    }

 private:
    std::string bytes_;
    std::size_t at_ = 0;
};

[[noreturn]] void refuse(const std::string& origin, const char* what) {
    throw Error(ErrorCode::bad_data, origin,
                std::string("expected names of kernels, a table or plain JSON, got ") + what +
                    ", which the command tessera which reads");
}

}  // namespace

std::unique_ptr<ByteStream> open_bytes(const std::string& path, OnProgress) {
    std::ifstream file(path, std::ios::binary);
    if (!file) throw Error(ErrorCode::cannot_open, path, "expected a file of the page");
    return std::make_unique<Memory>(std::string(std::istreambuf_iterator<char>(file), {}));
}

std::unique_ptr<ByteStream> bytes_of(std::string_view memory) { return std::make_unique<Memory>(std::string(memory)); }

Sniffed::Sniffed(std::unique_ptr<ByteStream> stream) : head_(4096, '\0'), rest_(std::move(stream)) {
    head_.resize(rest_->read(head_));
    if (head_.size() >= 2 && head_[0] == '\x1f' && head_[1] == '\x8b') refuse("file", "gzip");
}

std::unique_ptr<ByteStream> Sniffed::take() {
    std::string all = std::move(head_);
    std::string piece(std::size_t{1} << 16, '\0');
    while (const std::size_t count = rest_->read(piece)) all.append(piece, 0, count);
    return std::make_unique<Memory>(std::move(all));
}

Trace read_nsys_sqlite(const std::string& path, const OnProgress&) { refuse(path, "SQLite"); }

}  // namespace tessera::diagnose
