// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "io/tensor_file.hpp"

namespace tessera::io {

struct SafetensorsLimits {
    static constexpr std::size_t kHardHeaderBytes = 100'000'000;  ///< the limit of the format's own implementation

    std::size_t header_bytes = kHardHeaderBytes;  ///< values over kHardHeaderBytes count as kHardHeaderBytes
    // A tensor takes 50 bytes of header or more, and an entry of __metadata__ 8, so that header_bytes bounds both.
    std::size_t tensors = std::size_t{1} << 21;
    std::size_t metadata = std::size_t{1} << 21;  ///< entries of __metadata__
    std::size_t name_bytes = 4'096;
};

/// Reads a .safetensors file. It is stricter than the format's Rust implementation and never laxer: duplicate keys,
/// unknown keys, numbers that are not plain non-negative integers, holes, overlaps and trailing bytes are refused.
/// Memory for the payload is allocated only after every size agrees with the size of the file.
///
/// Throws Error(cannot_open), Error(bad_data) or Error(out_of_memory); the message names the file and the tensor.
TensorFile read_safetensors(const std::string& path, const SafetensorsLimits& limits = {});

/// Reads a .safetensors file from its bytes.
TensorFile parse_safetensors(std::span<const std::byte> bytes, const std::string& origin = "<memory>",
                             const SafetensorsLimits& limits = {});

using NamedViews = std::span<const std::pair<std::string, TensorView>>;
using Metadata = std::map<std::string, std::string>;

/// Writes the tensors in C order, atomically. The file orders them by decreasing element size, then as given. So they
/// are contiguous and each is aligned to its element size, which readers that map the file rely on.
///
/// Throws Error(invalid_argument) if a name repeats, is not UTF-8 or exceeds a limit of SafetensorsLimits, or if a view
/// cannot be written; then Error(cannot_write).
void write_safetensors(const std::string& path, NamedViews tensors, const Metadata& metadata = {});

/// Returns the bytes that write_safetensors() writes.
std::vector<std::byte> serialize_safetensors(NamedViews tensors, const Metadata& metadata = {});

}  // namespace tessera::io
