// SPDX-License-Identifier: Apache-2.0
#include "io/atomic_file.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdio>
#include <cstring>
#include <optional>
#include <string_view>
#include <system_error>
#include <utility>

#include "tessera/error.hpp"

namespace tessera::io {
namespace {

// The registry is a fixed table without locks or heap memory, because a signal handler reads it. A slot's folder and
// name are written while it is `claimed`. The handler reads them only after it has changed the slot from `live` to
// `removing`.
enum class SlotState : int { free, claimed, live, removing };

struct Slot {
    std::atomic<SlotState> state{SlotState::free};
    int folder = -1;
    pid_t process = 0;  // a forked child must not remove its parent's files
    char name[NAME_MAX + 1] = {};
};

constexpr int kSlots = 64;
static_assert(std::atomic<SlotState>::is_always_lock_free, "the signal handler needs lock-free slots");
// Zero-initialised static storage, usable from a handler at any time, even before and after main.
constinit std::array<Slot, kSlots> slots;

int claim_slot(int folder) {
    for (int i = 0; i < kSlots; ++i) {
        Slot& slot = slots[static_cast<std::size_t>(i)];
        SlotState expected = SlotState::free;
        if (slot.state.compare_exchange_strong(expected, SlotState::claimed)) {
            slot.folder = folder;
            slot.process = ::getpid();
            return i;
        }
    }
    return -1;
}

Slot& slot_at(int index) { return slots[static_cast<std::size_t>(index)]; }

[[noreturn]] void cannot_write(const std::string& path, const std::string& what, int error) {
    throw Error(ErrorCode::cannot_write, "",
                fmt::format("{}: {}: {}", path, what, std::generic_category().message(error)));
}

/// True if a sync failed. A file system that cannot sync a folder or a special file has not failed.
bool sync_failed(int descriptor) {
    while (::fsync(descriptor) != 0) {
        if (errno != EINTR) return errno != EINVAL && errno != ENOTSUP;
    }
    return false;
}

/// Returns the path behind symbolic links, so that a link itself is not replaced by a file. Nothing has to exist there.
std::string follow_link(const std::string& path) {
    constexpr int kMostLinks = 40;  // as the kernel's own limit
    std::string at = path;
    for (int links = 0; links <= kMostLinks; ++links) {
        struct stat info {};
        if (::lstat(at.c_str(), &info) != 0 || !S_ISLNK(info.st_mode)) return at;
        char target[PATH_MAX];
        const ssize_t size = ::readlink(at.c_str(), target, sizeof target);
        if (size < 0) cannot_write(path, "cannot follow this symbolic link", errno);
        const std::string_view to(target, static_cast<std::size_t>(size));
        // A relative target counts from the folder of the link; "" is the current folder.
        at = to.starts_with('/') ? std::string(to) : at.substr(0, at.rfind('/') + 1) + std::string(to);
    }
    cannot_write(path, "cannot follow this symbolic link", ELOOP);
}

/// Returns the permissions of the target, which must be a regular file, for the new file; empty if it does not exist.
std::optional<unsigned> permissions_of(const std::string& path, int folder, const std::string& target) {
    struct stat info {};
    if (::fstatat(folder, target.c_str(), &info, AT_SYMLINK_NOFOLLOW) != 0) {
        if (errno == ENOENT) return std::nullopt;
        cannot_write(path, "cannot look at the target", errno);
    }
    if (!S_ISREG(info.st_mode)) {
        throw Error(ErrorCode::cannot_write, "", fmt::format("{}: expected a regular file as the target", path));
    }
    return info.st_mode & 0777U;
}

}  // namespace

AtomicFile::AtomicFile(const std::string& path) : path_(path) {
    const std::string resolved = follow_link(path);
    const std::size_t slash = resolved.rfind('/');
    target_ = slash == std::string::npos ? resolved : resolved.substr(slash + 1);
    folder_path_ = slash == std::string::npos ? "." : slash == 0 ? "/" : resolved.substr(0, slash);
    if (target_.empty() || target_ == "." || target_ == "..") {
        throw Error(ErrorCode::cannot_write, "", fmt::format("{}: expected the name of a file", path));
    }
    try {
        open_folder();
        open_temporary(permissions_of(path_, folder_, target_));
    } catch (...) {
        discard();  // the destructor of a half-built object does not run
        throw;
    }
}

AtomicFile::~AtomicFile() { discard(); }

void AtomicFile::open_folder() {
    folder_ = ::open(folder_path_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (folder_ < 0) cannot_write(path_, fmt::format("cannot open the folder {}", folder_path_), errno);
    slot_ = claim_slot(folder_);
    if (slot_ < 0) {
        throw Error(ErrorCode::cannot_write, "",
                    fmt::format("{}: expected at most {} output files open at once", path_, kSlots));
    }
}

void AtomicFile::open_temporary(std::optional<unsigned> permissions) {
    static std::atomic<unsigned> counter{0};
    constexpr int kAttempts = 100;         // names that a killed process of equal id left behind are skipped
    constexpr std::size_t kNameMax = 200;  // keeps the name with its affixes below NAME_MAX
    Slot& slot = slot_at(slot_);
    for (int attempt = 0; attempt < kAttempts; ++attempt) {
        const std::string name =
            fmt::format(".{}.tmp.{}.{}", target_.substr(0, kNameMax), slot.process, counter.fetch_add(1));
        std::memcpy(slot.name, name.c_str(), name.size() + 1);
        // The slot is live before the file exists: a signal in between removes nothing. The other order could leak.
        slot.state.store(SlotState::live);
        constexpr int kFlags = O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW;
        descriptor_ = ::openat(folder_, name.c_str(), kFlags, permissions ? 0600U : 0666U);
        const int error = errno;
        if (descriptor_ >= 0) {
            temporary_ = name;
            if (permissions && ::fchmod(descriptor_, *permissions) != 0) {
                cannot_write(path_, "cannot set the permissions", errno);
            }
            return;
        }
        SlotState expected = SlotState::live;
        if (!slot.state.compare_exchange_strong(expected, SlotState::claimed) || error != EEXIST) {
            cannot_write(path_, fmt::format("cannot create a file in {}", folder_path_), error);
        }
    }
    throw Error(ErrorCode::cannot_write, "", fmt::format("{}: every temporary name is taken", path_));
}

void AtomicFile::write(std::span<const std::byte> bytes) {
    while (!bytes.empty()) {
        const ssize_t count = ::write(descriptor_, bytes.data(), bytes.size());
        if (count < 0 && errno == EINTR) continue;
        if (count < 0) cannot_write(path_, "cannot write", errno);
        bytes = bytes.subspan(static_cast<std::size_t>(count));
    }
}

void AtomicFile::commit() {
    if (descriptor_ < 0) {
        throw Error(ErrorCode::internal, "", fmt::format("{}: committed twice", path_));
    }
    if (sync_failed(descriptor_)) cannot_write(path_, "cannot sync", errno);
    // A network file system may report a failed write only here.
    if (::close(std::exchange(descriptor_, -1)) != 0 && errno != EINTR) cannot_write(path_, "cannot close", errno);
    if (::renameat(folder_, temporary_.c_str(), folder_, target_.c_str()) != 0) {
        cannot_write(path_, "cannot rename the finished file", errno);
    }
    temporary_.clear();
    if (sync_failed(folder_)) cannot_write(path_, fmt::format("cannot sync the folder {}", folder_path_), errno);
    discard();
}

void AtomicFile::discard() noexcept {
    if (descriptor_ >= 0) ::close(std::exchange(descriptor_, -1));
    // A forked child that unwinds must not remove its parent's file.
    if (!temporary_.empty() && slot_at(slot_).process == ::getpid()) ::unlinkat(folder_, temporary_.c_str(), 0);
    temporary_.clear();
    if (slot_ >= 0) {
        Slot& slot = slot_at(std::exchange(slot_, -1));
        SlotState expected = SlotState::live;
        const bool was_live = slot.state.compare_exchange_strong(expected, SlotState::free);
        if (!was_live && expected == SlotState::claimed) slot.state.store(SlotState::free);
        // A handler in another thread uses the slot and ends the process, so the slot and its folder's descriptor stay.
        if (!was_live && expected == SlotState::removing) folder_ = -1;
    }
    if (folder_ >= 0) ::close(std::exchange(folder_, -1));
}

void remove_uncommitted_files() noexcept {
    const int saved = errno;
    const pid_t process = ::getpid();
    for (Slot& slot : slots) {
        SlotState expected = SlotState::live;
        if (!slot.state.compare_exchange_strong(expected, SlotState::removing)) continue;
        if (slot.process == process) ::unlinkat(slot.folder, slot.name, 0);
        slot.state.store(SlotState::live);
    }
    errno = saved;
}

}  // namespace tessera::io
