// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <string>

#include "io/file.hpp"

namespace tessera::io {

/// An output file that exists either completely or not at all. The bytes go to `.NAME.tmp.PID.N` in the folder of the
/// target; commit() syncs it, renames it to the target and syncs the folder. Without commit() the destructor removes
/// it, and an existing target keeps its old content. An existing target's permissions are kept, and a symbolic link
/// is followed: the file that it points to is replaced.
///
/// Every failure is Error(cannot_write). A process that writes should ignore SIGXFSZ, so that a file size limit
/// arrives as such an Error.
class AtomicFile final : public ByteSink {
 public:
    explicit AtomicFile(const std::string& path);
    ~AtomicFile() override;
    AtomicFile(const AtomicFile&) = delete;
    AtomicFile& operator=(const AtomicFile&) = delete;

    void write(std::span<const std::byte> bytes) override;
    void commit();

 private:
    void open_folder();
    void open_temporary(std::optional<unsigned> permissions);
    void discard() noexcept;

    std::string path_;    // spelled as by the caller, for messages
    std::string target_;  // the name to rename to, inside the folder
    std::string temporary_;
    std::string folder_path_;
    int folder_ = -1;
    int descriptor_ = -1;
    int slot_ = -1;  // in the registry of uncommitted files
};

/// Removes the temporary file of every uncommitted AtomicFile of this process; their later commit() fails. It is
/// async-signal-safe, for a handler of SIGINT and SIGTERM that ends the process afterwards.
void remove_uncommitted_files() noexcept;

}  // namespace tessera::io
