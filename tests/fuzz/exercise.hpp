// SPDX-License-Identifier: Apache-2.0 Checks a reader with any bytes: it throws Error(bad_data), or everything that it
// returns can be read and written again. The fuzz targets and the mutation test use it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "io/npy.hpp"
#include "io/safetensors.hpp"
#include "tessera/error.hpp"

namespace tessera::io::fuzz {

inline void require(bool condition, const char* what) {
    if (!condition) throw std::logic_error(what);
}

/// The result of `parse`, or none when it threw Error(bad_data); anything else that it throws passes through.
template <class Parse>
std::optional<TensorFile> parsed(Parse parse) {
    try {
        return parse();
    } catch (const Error& error) {
        if (error.code() != ErrorCode::bad_data) throw;
        require(std::string_view(error.what()).size() > 10, "an error says what is wrong");
        return std::nullopt;
    }
}

/// Reads every byte, so that a sanitizer sees each access.
inline void touch(const TensorFile& file) {
    unsigned sum = 0;
    for (const NamedTensor& tensor : file.tensors()) {
        for (const std::byte byte : file.bytes(tensor)) sum += std::to_integer<unsigned>(byte);
        require(file.find(tensor.name) == &tensor, "a tensor is found by its name");
        if (!tensor.viewable()) continue;
        const TensorView view = file.view(tensor);
        const auto address = reinterpret_cast<std::uintptr_t>(view.data);
        require(address % static_cast<std::uintptr_t>(size_of(view.dtype)) == 0, "elements are aligned");
    }
    volatile unsigned sink = sum;
    static_cast<void>(sink);
}

/// True when the bytes were a file.
inline bool exercise_safetensors(std::span<const std::byte> bytes) {
    const auto file = parsed([&] { return parse_safetensors(bytes); });
    if (!file) return false;
    touch(*file);
    std::vector<std::pair<std::string, TensorView>> views;
    for (const NamedTensor& tensor : file->tensors()) {
        if (tensor.viewable()) views.emplace_back(tensor.name, file->view(tensor));
    }
    const auto written = serialize_safetensors(views, file->metadata());
    const TensorFile again = parse_safetensors(written);
    require(again.tensors().size() == views.size(), "every tensor is written");
    require(again.metadata() == file->metadata(), "the metadata is kept");
    for (const auto& [name, view] : views) {
        const auto before = file->bytes(*file->find(name));
        const auto after = again.bytes(*again.find(name));
        require(std::equal(before.begin(), before.end(), after.begin(), after.end()), "the bytes are kept");
    }
    return true;
}

/// True when the bytes were a file.
inline bool exercise_npy(std::span<const std::byte> bytes) {
    const bool plain = parsed([&] { return parse_npy(bytes); }).has_value();
    const NpyOptions options{.bf16 = true};
    const auto file = parsed([&] { return parse_npy(bytes, options); });
    require(!plain || file, "the option only adds dtypes");
    if (!file) return false;
    touch(*file);
    const NamedTensor& tensor = file->tensors().at(0);
    if (!tensor.viewable()) return true;
    const auto written = serialize_npy(file->view(tensor));
    const TensorFile again = parse_npy(written, options);
    require(serialize_npy(again.view(again.tensors().at(0))) == written, "writing is idempotent");
    require(again.tensors().at(0).bytes == tensor.bytes, "the size is kept");
    return true;
}

}  // namespace tessera::io::fuzz
