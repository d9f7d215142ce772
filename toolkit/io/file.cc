// SPDX-License-Identifier: Apache-2.0
#include "io/file.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <limits>
#include <string_view>
#include <system_error>

#include "io/memory.hpp"
#include "io/other_format.hpp"
#include "tessera/error.hpp"

namespace tessera::io {
namespace {

std::string_view kind_of(mode_t mode) {
    if (S_ISDIR(mode)) return "a directory";
    if (S_ISFIFO(mode)) return "a FIFO";
    if (S_ISCHR(mode) || S_ISBLK(mode)) return "a device";
    if (S_ISSOCK(mode)) return "a socket";
    return "of another kind";
}

[[noreturn]] void cannot_open(const std::string& path, int error) {
    throw Error(ErrorCode::cannot_open, "",
                fmt::format("{}: cannot open: {}", path, std::generic_category().message(error)));
}

}  // namespace

AlignedBytes allocate(std::uint64_t bytes, const std::string& origin) {
    // Reading the available memory takes about 50 us, so that small requests skip it.
    constexpr std::uint64_t kWorthAsking = std::uint64_t{1} << 24;
    return allocate(bytes, origin, bytes < kWorthAsking ? bytes : memory_state().left);
}

AlignedBytes allocate(std::uint64_t bytes, const std::string& origin, std::uint64_t limit) {
    if (bytes > limit) {
        throw Error(
            ErrorCode::out_of_memory, "",
            fmt::format("{}: expected at most {} bytes, the memory that is left, got {}", origin, limit, bytes));
    }
    const std::size_t size = std::max<std::size_t>(bytes, 1);
    void* memory = ::operator new[](size, std::align_val_t{kAlignment}, std::nothrow);
    if (memory == nullptr) {
        throw Error(ErrorCode::out_of_memory, "", fmt::format("{}: cannot allocate {} bytes", origin, bytes));
    }
    return AlignedBytes(static_cast<std::byte*>(memory));
}

void MemorySource::read(std::uint64_t offset, std::span<std::byte> into) const {
    if (offset > bytes_.size() || into.size() > bytes_.size() - offset) {
        throw Error(ErrorCode::bad_data, "",
                    fmt::format("{}: expected {} bytes at offset {}, got only {} bytes in all", origin_, into.size(),
                                offset, bytes_.size()));
    }
    if (!into.empty()) std::memcpy(into.data(), bytes_.data() + offset, into.size());
}

InputFile::InputFile(const std::string& path) : path_(path) {
    // O_NONBLOCK keeps open() from waiting forever on a FIFO without a writer; it has no effect on a regular file.
    descriptor_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (descriptor_ < 0) cannot_open(path, errno);
    struct stat info {};
    if (::fstat(descriptor_, &info) != 0) {
        const int error = errno;
        ::close(descriptor_);
        cannot_open(path, error);
    }
    if (!S_ISREG(info.st_mode)) {
        ::close(descriptor_);
        throw Error(ErrorCode::cannot_open, "",
                    fmt::format("{}: expected a regular file, it is {}{}", path, kind_of(info.st_mode),
                                S_ISDIR(info.st_mode) ? folder_text(path) : ""));
    }
    size_ = static_cast<std::uint64_t>(info.st_size);
}

InputFile::~InputFile() { ::close(descriptor_); }

void InputFile::read(std::uint64_t offset, std::span<std::byte> into) const {
    std::size_t done = 0;
    while (done < into.size()) {
        const auto position = static_cast<off_t>(offset + done);
        const ssize_t count = ::pread(descriptor_, into.data() + done, into.size() - done, position);
        if (count < 0 && errno == EINTR) continue;
        if (count < 0) {
            throw Error(ErrorCode::cannot_open, "",
                        fmt::format("{}: cannot read: {}", path_, std::generic_category().message(errno)));
        }
        if (count == 0) {
            throw Error(ErrorCode::bad_data, "",
                        fmt::format("{}: expected {} bytes at offset {}, got {}: the file ends before", path_,
                                    into.size(), offset, done));
        }
        done += static_cast<std::size_t>(count);
    }
}

FileBytes read_file(const std::string& path, std::uint64_t limit) {
    const InputFile file(path);
    const bool limited = limit != std::numeric_limits<std::uint64_t>::max();
    FileBytes bytes{limited ? allocate(file.size(), path, limit) : allocate(file.size(), path),
                    static_cast<std::size_t>(file.size())};
    file.read(0, {bytes.data.get(), bytes.size});
    return bytes;
}

}  // namespace tessera::io
