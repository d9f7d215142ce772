// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/error.hpp"

namespace tessera::io::test {

using Bytes = std::vector<std::byte>;

inline Bytes to_bytes(std::string_view text) {
    const auto bytes = std::as_bytes(std::span(text));
    return {bytes.begin(), bytes.end()};
}

/// `count` bytes 0, 1, 2, ...
inline std::string counting(std::size_t count) {
    std::string text;
    for (std::size_t i = 0; i < count; ++i) text += static_cast<char>(i);
    return text;
}

/// An unsigned number of `width` bytes, little endian.
inline std::string little_endian(std::uint64_t value, int width) {
    std::string text;
    for (int i = 0; i < width; ++i) text += static_cast<char>(value >> (8 * i) & 0xff);
    return text;
}

/// Expects Error(`code`) whose message contains `words`.
inline void expect_error(ErrorCode code, std::string_view words, const std::function<void()>& call) {
    try {
        call();
        ADD_FAILURE() << "expected an error that says: " << words;
    } catch (const Error& error) {
        EXPECT_EQ(static_cast<int>(error.code()), static_cast<int>(code)) << error.what();
        EXPECT_NE(std::string_view(error.what()).find(words), std::string_view::npos)
            << "expected: " << words << "\n  got: " << error.what();
    }
}

/// A folder that lives as long as the test.
class Folder {
 public:
    Folder() {
        std::string name = (std::filesystem::temp_directory_path() / "tessera_io_XXXXXX").string();
        if (::mkdtemp(name.data()) == nullptr) throw std::runtime_error("mkdtemp");
        path_ = name;
    }
    ~Folder() { std::filesystem::remove_all(path_); }
    Folder(const Folder&) = delete;
    Folder& operator=(const Folder&) = delete;

    std::string path() const { return path_.string(); }
    std::string file(const std::string& name) const { return (path_ / name).string(); }

    /// Names of everything inside, hidden files included.
    std::vector<std::string> names() const {
        std::vector<std::string> names;
        for (const auto& entry : std::filesystem::directory_iterator(path_)) names.push_back(entry.path().filename());
        return names;
    }

 private:
    std::filesystem::path path_;
};

inline void put_file(const std::string& path, std::string_view text) { std::ofstream(path, std::ios::binary) << text; }

inline std::string get_file(const std::string& path) {
    std::ifstream stream(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(stream), std::istreambuf_iterator<char>()};
}

}  // namespace tessera::io::test
