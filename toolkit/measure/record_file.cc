// SPDX-License-Identifier: Apache-2.0
//
// Files of Records: one JSON object per line. Writers only append.
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>

#include "io/file.hpp"
#include "measure/record.hpp"
#include "tessera/error.hpp"

namespace tessera::measure {
namespace {

using Json = nlohmann::ordered_json;

[[noreturn]] void cannot_write(const std::string& path) {
    throw Error(ErrorCode::cannot_write, path, std::strerror(errno));
}

class AppendedFile {
 public:
    explicit AppendedFile(const std::string& path)
        : path_(path), descriptor_(::open(path.c_str(), O_RDWR | O_APPEND | O_CREAT | O_CLOEXEC | O_NONBLOCK, 0666)) {
        if (descriptor_ < 0) cannot_write(path);
    }
    ~AppendedFile() { ::close(descriptor_); }
    AppendedFile(const AppendedFile&) = delete;
    AppendedFile& operator=(const AppendedFile&) = delete;

    bool ends_within_a_line() const {
        struct stat status {};
        char last = '\n';
        return ::fstat(descriptor_, &status) == 0 && S_ISREG(status.st_mode) && status.st_size > 0 &&
               ::pread(descriptor_, &last, 1, status.st_size - 1) == 1 && last != '\n';
    }

    void write(std::string_view text) {
        while (!text.empty()) {
            const ssize_t written = ::write(descriptor_, text.data(), text.size());
            if (written >= 0) text.remove_prefix(static_cast<std::size_t>(written));
            else if (errno != EINTR) failed();
        }
        // A sync keeps reported records through a power cut. Pipes and the like cannot be synced.
        if (::fdatasync(descriptor_) != 0 && errno != EINVAL && errno != EROFS) failed();
    }

 private:
    /// Reports an error of writing. An empty file is removed, so that a full disk leaves none.
    [[noreturn]] void failed() const {
        const int error = errno;
        struct stat status {};
        if (::fstat(descriptor_, &status) == 0 && S_ISREG(status.st_mode) && status.st_size == 0) {
            ::unlink(path_.c_str());
        }
        errno = error;
        cannot_write(path_);
    }

    const std::string& path_;
    int descriptor_;
};

/// Parses one line as a Record; empty if the line was cut off.
std::optional<Record> parse_line(const std::string& line, const std::string& where) {
    const Json json = Json::parse(line, nullptr, false);
    if (json.is_discarded()) {
        if (line.front() == '{' && line.back() != '}') return std::nullopt;
        throw Error(ErrorCode::bad_data, where, "expected a JSON object");
    }
    try {
        return record_from_json(json);
    } catch (const Error& error) {
        throw Error(ErrorCode::bad_data, where, error.what());
    }
}

}  // namespace

void append_records(const std::string& path, const std::vector<Record>& records) {
    std::string text;
    for (const Record& record : records)
        text += to_json(record).dump(-1, ' ', false, Json::error_handler_t::replace) + "\n";
    AppendedFile file(path);
    file.write(file.ends_within_a_line() && !text.empty() ? "\n" + text : text);
}

std::vector<Record> read_records(const std::string& path, std::int64_t* cut_off) {
    const io::FileBytes bytes = io::read_file(path);
    const std::string_view text(reinterpret_cast<const char*>(bytes.data.get()), bytes.size);
    std::vector<Record> records;
    int number = 0;
    for (std::size_t begin = 0; begin < text.size();) {
        const std::size_t end = std::min(text.find('\n', begin), text.size());
        const std::string line(text.substr(begin, end - begin));
        begin = end + 1;
        ++number;
        if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
        if (auto record = parse_line(line, fmt::format("{}:{}", path, number))) {
            record->file = path;
            records.push_back(std::move(*record));
        } else if (cut_off != nullptr) {
            ++*cut_off;
        }
    }
    return records;
}

}  // namespace tessera::measure
