// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "io/tensor_file.hpp"

namespace tessera::io {

struct NpyOptions {
    /// NumPy has no bf16: programs store it as 2-byte blanks (`|V2`, `<V2`) or as `<u2`. Only the caller knows that
    /// such a file holds bf16, so these dtypes are refused unless this is set.
    bool bf16 = false;
};

/// Reads a .npy file of format 1, 2 or 3 as a TensorFile of one tensor, named by the file's stem. Fortran order becomes
/// a strided view, and big-endian data is swapped. Pickled objects and structured dtypes are refused. Memory for the
/// data is allocated only after the size of the file agrees with the header.
///
/// Throws Error(cannot_open), Error(bad_data) or Error(out_of_memory); the message names the file.
TensorFile read_npy(const std::string& path, const NpyOptions& options = {});

/// Reads a .npy file from its bytes.
TensorFile parse_npy(std::span<const std::byte> bytes, const NpyOptions& options = {},
                     const std::string& origin = "array.npy");

/// Writes one tensor in C order, format 1, atomically. bf16 becomes `|V2`. A rank of 0 with data is a scalar. Throws
/// Error(invalid_argument) if the view cannot be written, then Error(cannot_write).
void write_npy(const std::string& path, const TensorView& view);

/// Returns the bytes that write_npy() writes.
std::vector<std::byte> serialize_npy(const TensorView& view);

}  // namespace tessera::io
