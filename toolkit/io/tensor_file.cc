// SPDX-License-Identifier: Apache-2.0
#include "io/tensor_file.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <utility>

#include "tessera/error.hpp"

namespace tessera::io {
namespace {

constexpr std::size_t aligned(std::size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

[[noreturn]] void invalid(const std::string& argument, const std::string& message) {
    throw Error(ErrorCode::invalid_argument, argument, message);
}

/// Copies the elements of a view to packed memory, a chunk at a time.
class Packer {
 public:
    Packer(ByteSink& sink, const TensorView& view)
        : sink_(sink), view_(view), element_(static_cast<std::size_t>(size_of(view.dtype))) {
        chunk_.reserve(kChunk);
    }

    void run() {
        pack(0, static_cast<const std::byte*>(view_.data));
        sink_.write(chunk_);
    }

 private:
    static constexpr std::size_t kChunk = std::size_t{1} << 18;

    void pack(int dimension, const std::byte* at) {
        const auto d = static_cast<std::size_t>(dimension);
        if (dimension == view_.rank || dimension == TensorView::kMaxRank)
            return put(at);  // the second bounds the recursion
        const auto step = view_.strides[d] * static_cast<std::int64_t>(element_);
        for (std::int64_t i = 0; i < view_.shape[d]; ++i) pack(dimension + 1, at + i * step);
    }

    void put(const std::byte* element) {
        if (chunk_.size() + element_ > kChunk) {
            sink_.write(chunk_);
            chunk_.clear();
        }
        chunk_.insert(chunk_.end(), element, element + element_);
    }

    ByteSink& sink_;
    const TensorView& view_;
    std::size_t element_;
    std::vector<std::byte> chunk_;
};

bool is_packed(const TensorView& view) {
    std::int64_t stride = 1;
    for (auto d = static_cast<std::size_t>(view.rank); d-- > 0;) {
        if (view.shape[d] != 1 && view.strides[d] != stride) return false;
        stride *= view.shape[d];
    }
    return true;
}

/// Reverses the bytes of each element.
void swap_elements(std::span<std::byte> bytes, std::size_t element) {
    for (std::size_t at = 0; at + element <= bytes.size(); at += element)
        std::reverse(bytes.begin() + static_cast<std::ptrdiff_t>(at),
                     bytes.begin() + static_cast<std::ptrdiff_t>(at + element));
}

}  // namespace

TensorFile::TensorFile(const ByteSource& source, std::vector<TensorSource> tensors,
                       std::map<std::string, std::string> metadata)
    : origin_(source.origin()), metadata_(std::move(metadata)) {
    std::size_t total = 0;  // at most the file's size plus kAlignment per tensor, so that it cannot overflow
    for (TensorSource& entry : tensors) {
        entry.tensor.offset = total;
        total += aligned(entry.tensor.bytes);
    }
    data_ = allocate(total, origin_);
    for (TensorSource& entry : tensors) {
        const std::span<std::byte> into(data_.get() + entry.tensor.offset, entry.tensor.bytes);
        source.read(entry.file_offset, into);
        if (entry.swapped_bytes > 1) swap_elements(into, entry.swapped_bytes);
        index_.emplace(entry.tensor.name, tensors_.size());
        tensors_.push_back(std::move(entry.tensor));
    }
}

const NamedTensor* TensorFile::find(std::string_view name) const {
    const auto found = index_.find(name);
    return found == index_.end() ? nullptr : &tensors_[found->second];
}

TensorView TensorFile::view(std::string_view name) const {
    const NamedTensor* tensor = find(name);
    if (tensor == nullptr) {
        constexpr std::size_t kListed = 8;
        std::string names;
        for (std::size_t i = 0; i < std::min(kListed, tensors_.size()); ++i) {
            names += (i == 0 ? "" : ", ") + printable(tensors_[i].name);
        }
        bad_data(origin_, fmt::format("expected a tensor {}, got {} tensors: {}{}", printable(name), tensors_.size(),
                                      names, tensors_.size() > kListed ? ", ..." : ""));
    }
    return view(*tensor);
}

TensorView TensorFile::view(const NamedTensor& tensor) const {
    if (!tensor.known_dtype) {
        bad_data(origin_, fmt::format("tensor {}: expected a dtype that tessera computes with (fp64, fp32, fp16, bf16, "
                                      "int32, int64), got {}",
                                      printable(tensor.name), tensor.file_dtype));
    }
    if (!tensor.viewable()) {
        bad_data(origin_, fmt::format("tensor {}: expected rank <= {}, got {}", printable(tensor.name),
                                      TensorView::kMaxRank, shape_text(tensor.shape)));
    }
    TensorView view{.data = data_.get() + tensor.offset, .dtype = tensor.dtype};
    view.rank = std::max(1, static_cast<int>(tensor.shape.size()));
    view.shape[0] = 1;  // a scalar gets shape [1]
    std::copy(tensor.shape.begin(), tensor.shape.end(), view.shape.begin());
    std::int64_t stride = 1;
    const auto rank = static_cast<std::size_t>(view.rank);
    for (std::size_t i = 0; i < rank; ++i) {
        const std::size_t d = tensor.fortran_order ? i : rank - 1 - i;
        view.strides[d] = stride;
        stride *= std::max<std::int64_t>(view.shape[d], 1);
    }
    return view;
}

bool checked_bits(std::span<const std::int64_t> shape, std::int64_t bits_per_element, std::int64_t& bits) {
    std::int64_t product = bits_per_element;
    bool empty = false;
    for (const std::int64_t size : shape) {
        if (size == 0) empty = true;
        if (__builtin_mul_overflow(product, std::max<std::int64_t>(size, 1), &product)) return false;
    }
    bits = empty ? 0 : product;
    return true;
}

std::string shape_text(std::span<const std::int64_t> shape) {
    return fmt::format("[{}]", fmt::join(shape.begin(), shape.end(), ", "));
}

std::string printable(std::string_view text) {
    constexpr std::size_t kPrinted = 128;
    std::string result = "\"";
    for (const char c : text.substr(0, kPrinted)) {
        if (c == '"' || c == '\\') {
            result += '\\';
            result += c;
        } else if (c >= ' ' && c <= '~') {
            result += c;
        } else {
            result += fmt::format("\\x{:02x}", static_cast<unsigned char>(c));
        }
    }
    result += '"';
    if (text.size() > kPrinted) result += fmt::format("... ({} bytes)", text.size());
    return result;
}

void bad_data(const std::string& origin, const std::string& message) {
    throw Error(ErrorCode::bad_data, "", origin + ": " + message);
}

std::int64_t checked_bytes(const TensorView& view, const std::string& argument) {
    if (view.device.type != DeviceType::cpu) invalid(argument, "expected a tensor in host memory, got one on a device");
    if (view.rank < 0 || view.rank > TensorView::kMaxRank) {
        invalid(argument, fmt::format("expected rank 0..{}, got {}", TensorView::kMaxRank, view.rank));
    }
    const std::span<const std::int64_t> shape(view.shape.data(), static_cast<std::size_t>(view.rank));
    if (std::any_of(shape.begin(), shape.end(), [](std::int64_t size) { return size < 0; })) {
        invalid(argument, fmt::format("expected sizes >= 0, got {}", shape_text(shape)));
    }
    std::int64_t bits = 0;
    if (!checked_bits(shape, size_of(view.dtype) * 8, bits)) {
        invalid(argument, fmt::format("expected fewer than 2^60 bytes, got {}", shape_text(shape)));
    }
    if (bits != 0 && view.data == nullptr) invalid(argument, "expected a tensor with data, got a null pointer");
    return bits / 8;
}

void write_elements(ByteSink& sink, const TensorView& view) {
    const std::int64_t bytes = checked_bytes(view, "view");
    if (bytes == 0) return;
    if (is_packed(view)) {
        sink.write({static_cast<const std::byte*>(view.data), static_cast<std::size_t>(bytes)});
    } else {
        Packer(sink, view).run();
    }
}

}  // namespace tessera::io
