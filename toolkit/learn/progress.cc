// SPDX-License-Identifier: Apache-2.0
#include "learn/progress.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <span>

#include "io/atomic_file.hpp"
#include "tessera/error.hpp"

namespace tessera::learn {
namespace {

constexpr const char* kFormat = "tessera learn, answers";

/// Reads the whole document, including fields that this version does not know and must keep.
nlohmann::ordered_json read_document(const std::string& path) {
    std::error_code error;
    const bool there = std::filesystem::exists(path, error);
    if (error) throw Error(ErrorCode::cannot_open, path, error.message());
    if (!there) return {{"format", kFormat}, {"answers", nlohmann::ordered_json::array()}};
    std::ifstream file(path, std::ios::binary);
    if (!file) throw Error(ErrorCode::cannot_open, path, std::strerror(errno));
    const auto document = nlohmann::ordered_json::parse(file, nullptr, false);
    if (!document.is_object() || document.value("format", "") != kFormat || !document.contains("answers") ||
        !document["answers"].is_array()) {
        throw Error(ErrorCode::bad_data, path,
                    "expected the answers of tessera learn, got another document; the file is unchanged: move it away "
                    "to start again");
    }
    return document;
}

/// A file lock; other processes wait until it is destroyed.
class Lock {
 public:
    explicit Lock(const std::string& path) : descriptor_(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600)) {
        int result = descriptor_ < 0 ? -1 : 0;
        while (descriptor_ >= 0 && (result = ::flock(descriptor_, LOCK_EX)) != 0 && errno == EINTR) {
        }
        if (result == 0) return;
        const int reason = errno;
        if (descriptor_ >= 0) ::close(descriptor_);
        throw Error(ErrorCode::cannot_write, path, std::strerror(reason));
    }
    ~Lock() { ::close(descriptor_); }
    Lock(const Lock&) = delete;
    Lock& operator=(const Lock&) = delete;

 private:
    int descriptor_;
};

std::string now() {
    const std::time_t seconds = std::time(nullptr);
    std::tm utc{};
    ::gmtime_r(&seconds, &utc);
    char text[32];
    return {text, std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", &utc)};
}

}  // namespace

std::optional<std::string> progress_path() {
    const char* state = std::getenv("XDG_STATE_HOME");
    if (state != nullptr && state[0] == '/') return std::string(state) + "/tessera/learn.json";
    const char* home = std::getenv("HOME");
    if (home != nullptr && home[0] == '/') return std::string(home) + "/.local/state/tessera/learn.json";
    return {};
}

std::vector<SavedAnswer> read_progress(const std::string& path) {
    const auto document = read_document(path);
    std::vector<SavedAnswer> given;
    try {
        for (const auto& one : document["answers"]) {
            const std::string exercise = one.contains("exercise")
                                             ? one.at("exercise").get<std::string>()
                                             : exercise_of_first_edition(one.at("lesson").get<int>());
            if (exercise.empty()) continue;
            given.push_back({.exercise = exercise,
                             .answer = one.at("answer").get<std::string>(),
                             .right = one.at("right").get<bool>(),
                             .at = one.value("at", "")});
        }
    } catch (const nlohmann::json::exception& error) {
        throw Error(ErrorCode::bad_data, path,
                    fmt::format("expected answers of tessera learn, got an entry of another form ({}); the file is "
                                "unchanged",
                                error.what()));
    }
    return given;
}

void add_answer(const std::string& path, SavedAnswer given) {
    std::error_code error;
    std::filesystem::create_directories(std::filesystem::path(path).parent_path(), error);
    if (error) throw Error(ErrorCode::cannot_write, path, error.message());
    const Lock lock(path + ".lock");
    read_progress(path);  // rejects a damaged file before it is replaced
    auto document = read_document(path);
    if (given.at.empty()) given.at = now();
    document["answers"].push_back(
        {{"exercise", given.exercise}, {"answer", given.answer}, {"right", given.right}, {"at", given.at}});
    const std::string text = document.dump(1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
    io::AtomicFile file(path);
    file.write(std::as_bytes(std::span(text)));
    file.commit();
}

}  // namespace tessera::learn
