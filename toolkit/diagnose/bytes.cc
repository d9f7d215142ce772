// SPDX-License-Identifier: Apache-2.0
#include "diagnose/bytes.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <vector>

#include "tessera/error.hpp"

namespace tessera::diagnose {
namespace {

constexpr std::size_t kHead = 4096;
constexpr std::size_t kPiece = std::size_t{1} << 18;

class DescriptorStream final : public ByteStream {
 public:
    DescriptorStream(const std::string& path, OnProgress on_progress)
        : path_(path == "-" ? "standard input" : path), on_progress_(std::move(on_progress)) {
        if (path == "-") return;
        // opening a FIFO without a writer must not block
        descriptor_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
        struct stat status {};
        if (descriptor_ < 0 || ::fstat(descriptor_, &status) != 0)
            throw Error(ErrorCode::cannot_open, path_, std::strerror(errno));
        owned_ = true;
        if (!S_ISREG(status.st_mode)) {
            ::close(descriptor_);
            throw Error(ErrorCode::cannot_open, path_,
                        S_ISDIR(status.st_mode)
                            ? "expected a regular file, got a directory: give the trace that is in it"
                            : "expected a regular file");
        }
        total_ = static_cast<std::uint64_t>(status.st_size);
    }
    ~DescriptorStream() override {
        if (owned_) ::close(descriptor_);
    }
    DescriptorStream(const DescriptorStream&) = delete;
    DescriptorStream& operator=(const DescriptorStream&) = delete;

    std::size_t read(std::span<char> into) override {
        while (true) {
            const ssize_t count = ::read(descriptor_, into.data(), into.size());
            if (count >= 0) {
                done_ += static_cast<std::uint64_t>(count);
                if (on_progress_) on_progress_(done_, total_);
                return static_cast<std::size_t>(count);
            }
            if (errno != EINTR) throw Error(ErrorCode::cannot_open, path_, std::strerror(errno));
        }
    }

 private:
    std::string path_;
    OnProgress on_progress_;
    int descriptor_ = STDIN_FILENO;
    bool owned_ = false;
    std::uint64_t done_ = 0;
    std::uint64_t total_ = 0;
};

class MemoryStream final : public ByteStream {
 public:
    explicit MemoryStream(std::string_view memory) : rest_(memory) {}
    std::size_t read(std::span<char> into) override {
        const std::size_t count = std::min(into.size(), rest_.size());
        std::copy_n(rest_.data(), count, into.data());
        rest_.remove_prefix(count);
        return count;
    }

 private:
    std::string_view rest_;
};

/// Streams `head`, then the remainder of `rest`.
class Concatenated final : public ByteStream {
 public:
    Concatenated(std::string head, std::unique_ptr<ByteStream> rest) : head_(std::move(head)), rest_(std::move(rest)) {}
    std::size_t read(std::span<char> into) override {
        if (at_ == head_.size()) return rest_->read(into);
        const std::size_t count = std::min(into.size(), head_.size() - at_);
        std::copy_n(head_.data() + at_, count, into.data());
        at_ += count;
        return count;
    }
    std::string trouble() const override { return rest_->trouble(); }

 private:
    std::string head_;
    std::size_t at_ = 0;
    std::unique_ptr<ByteStream> rest_;
};

/// Decompresses gzip. A file that is cut off or damaged ends with trouble() instead of an error, so that the part
/// before the damage can be read.
class GzipStream final : public ByteStream {
 public:
    explicit GzipStream(std::unique_ptr<ByteStream> packed) : packed_(std::move(packed)), input_(kPiece) {
        constexpr int kGzipOnly = 16 + MAX_WBITS;
        if (::inflateInit2(&state_, kGzipOnly) != Z_OK) throw std::bad_alloc();
    }
    ~GzipStream() override { ::inflateEnd(&state_); }
    GzipStream(const GzipStream&) = delete;
    GzipStream& operator=(const GzipStream&) = delete;

    std::size_t read(std::span<char> into) override {
        state_.next_out = reinterpret_cast<Bytef*>(into.data());
        state_.avail_out = static_cast<uInt>(into.size());
        while (state_.avail_out == into.size() && !ended_) step();
        return into.size() - state_.avail_out;
    }
    std::string trouble() const override { return trouble_; }

 private:
    void step() {
        if (state_.avail_in == 0) {
            const std::size_t count = packed_->read(input_);
            if (count == 0) {
                if (!between_members_) trouble_ = "the gzip stream is cut off";
                ended_ = true;
                return;
            }
            state_.next_in = reinterpret_cast<Bytef*>(input_.data());
            state_.avail_in = static_cast<uInt>(count);
        }
        between_members_ = false;
        const int status = ::inflate(&state_, Z_NO_FLUSH);
        if (status == Z_STREAM_END) {  // another member may follow
            between_members_ = true;
            ::inflateReset(&state_);
        } else if (status != Z_OK && status != Z_BUF_ERROR) {
            trouble_ = "the gzip stream is damaged";
            ended_ = true;
        }
    }

    std::unique_ptr<ByteStream> packed_;
    std::vector<char> input_;
    z_stream state_{};
    bool between_members_ = false;
    bool ended_ = false;
    std::string trouble_;
};

std::string read_head(ByteStream& stream) {
    std::string head(kHead, '\0');
    std::size_t filled = 0;
    while (filled < head.size()) {
        const std::size_t count = stream.read(std::span(head).subspan(filled));
        if (count == 0) break;
        filled += count;
    }
    head.resize(filled);
    return head;
}

}  // namespace

std::unique_ptr<ByteStream> open_bytes(const std::string& path, OnProgress on_progress) {
    return std::make_unique<DescriptorStream>(path, std::move(on_progress));
}

std::unique_ptr<ByteStream> bytes_of(std::string_view memory) { return std::make_unique<MemoryStream>(memory); }

Sniffed::Sniffed(std::unique_ptr<ByteStream> stream) : rest_(std::move(stream)) {
    head_ = read_head(*rest_);
    if (head_.size() < 2 || head_[0] != '\x1f' || head_[1] != '\x8b') return;
    rest_ = std::make_unique<GzipStream>(std::make_unique<Concatenated>(std::move(head_), std::move(rest_)));
    head_ = read_head(*rest_);
}

std::unique_ptr<ByteStream> Sniffed::take() { return std::make_unique<Concatenated>(head_, std::move(rest_)); }

}  // namespace tessera::diagnose
