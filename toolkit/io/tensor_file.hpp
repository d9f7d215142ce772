// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "io/file.hpp"
#include "tessera/dtype.hpp"
#include "tessera/tensor.hpp"

namespace tessera::io {

/// The largest rank that a reader accepts; views have at most TensorView::kMaxRank.
inline constexpr std::size_t kMaxFileRank = 8;

/// One tensor of a file. A file may hold tensors that tessera does not compute with (int8, bool, rank 5, ...). They are
/// listed and their bytes can be read; only a view of them is refused.
struct NamedTensor {
    std::string name;
    std::string file_dtype;           ///< as the file spells it: "BF16", "<f4"
    bool known_dtype = false;         ///< `file_dtype` has a counterpart in DType
    DType dtype = DType::fp32;        ///< that counterpart; meaningless unless `known_dtype`
    bool fortran_order = false;       ///< the first dimension has stride 1 (.npy only)
    std::vector<std::int64_t> shape;  ///< sizes >= 0; empty for a scalar
    std::size_t offset = 0;           ///< first byte in the memory of the TensorFile; a multiple of kAlignment
    std::size_t bytes = 0;

    bool viewable() const { return known_dtype && shape.size() <= static_cast<std::size_t>(TensorView::kMaxRank); }
};

/// A tensor whose offsets in the file are checked, not yet read.
struct TensorSource {
    NamedTensor tensor;             // its `offset` is not set yet
    std::uint64_t file_offset = 0;  // first byte in the file
    std::size_t swapped_bytes = 1;  // bytes of an element that the file holds big-endian; 1: nothing to swap
};

/// The tensors of a file in their own memory. Every tensor is copied to a multiple of kAlignment, because both formats
/// align to one byte only.
class TensorFile {
 public:
    TensorFile() = default;

    /// Reads the payload of each tensor. The format readers call it after all their checks.
    TensorFile(const ByteSource& source, std::vector<TensorSource> tensors,
               std::map<std::string, std::string> metadata);

    /// Returns the tensors in the order of their bytes in the file.
    const std::vector<NamedTensor>& tensors() const { return tensors_; }
    const std::map<std::string, std::string>& metadata() const { return metadata_; }

    /// Returns the file's name in messages.
    const std::string& origin() const { return origin_; }

    /// Returns the tensor of that name, or null if there is none.
    const NamedTensor* find(std::string_view name) const;

    /// Returns a view of the tensor, valid as long as this object. A scalar becomes shape [1], because rank 0 means
    /// "not given". Throws Error(bad_data) if there is no such tensor, or a view cannot express its dtype or rank.
    TensorView view(std::string_view name) const;
    TensorView view(const NamedTensor& tensor) const;

    /// Returns the tensor's bytes, little-endian.
    std::span<const std::byte> bytes(const NamedTensor& tensor) const {
        return {data_.get() + tensor.offset, tensor.bytes};
    }

 private:
    std::string origin_;
    std::vector<NamedTensor> tensors_;
    std::map<std::string, std::size_t, std::less<>> index_;
    std::map<std::string, std::string> metadata_;
    AlignedBytes data_;
};

/// Computes the bits of a tensor: `shape` times `bits_per_element`. Returns false if the product over the nonzero sizes
/// exceeds 2^63. Leaving the zeros out makes the answer independent of their position and keeps strides exact.
bool checked_bits(std::span<const std::int64_t> shape, std::int64_t bits_per_element, std::int64_t& bits);

/// Formats a shape as "[2, 128, 8, 64]".
std::string shape_text(std::span<const std::int64_t> shape);

/// Returns a name from a file as printable ASCII in quotes. Control characters, non-ASCII bytes, quotes and backslashes
/// are escaped, and a long name is cut, so that a hostile file cannot steer the terminal or flood the log.
std::string printable(std::string_view text);

/// Throws Error(bad_data) with the text "origin: message".
[[noreturn]] void bad_data(const std::string& origin, const std::string& message);

/// Returns the bytes of a view's elements as packed memory. Throws Error(invalid_argument) naming `argument` if the
/// view is not in host memory, has no data, a negative size, or too many elements. A rank of 0 with data is a scalar.
std::int64_t checked_bytes(const TensorView& view, const std::string& argument);

/// Writes the elements in C order, bit for bit, for any strides. The view must have passed checked_bytes().
void write_elements(ByteSink& sink, const TensorView& view);

}  // namespace tessera::io
