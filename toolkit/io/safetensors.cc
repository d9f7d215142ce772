// SPDX-License-Identifier: Apache-2.0
// The format: 8 bytes N, little endian; N bytes of JSON {"name": {"dtype", "shape", "data_offsets": [begin, end]}, ...,
// "__metadata__": {string: string}}, padded with spaces; then the payload that the offsets count from.
#include "io/safetensors.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <nlohmann/json.hpp>
#include <set>
#include <string_view>
#include <tuple>

#include "io/atomic_file.hpp"
#include "io/other_format.hpp"
#include "io/safetensors_header.hpp"
#include "tessera/error.hpp"

namespace tessera::io {
namespace {

static_assert(std::endian::native == std::endian::little, "the format is little endian, and so is this code");

constexpr std::uint64_t kPrefix = 8;  // bytes before the header

/// True if the file begins as the format does, so that a wrong length means a damaged file.
bool begins_as_header(const ByteSource& source) {
    if (source.size() <= kPrefix) return false;
    std::uint64_t length = 0;
    char first = '\0';
    source.read(0, std::as_writable_bytes(std::span(&length, 1)));
    source.read(kPrefix, std::as_writable_bytes(std::span(&first, 1)));
    return length <= SafetensorsLimits::kHardHeaderBytes && first == '{';
}

/// Refuses a file that does not begin as the format does: names its own format if it has one, else says `otherwise`.
[[noreturn]] void not_safetensors(const ByteSource& source, const std::string& otherwise) {
    bad_data(source.origin(),
             begins_as_header(source) ? otherwise : not_wanted_text(source, "a .safetensors file", otherwise));
}

/// Returns the bytes of the header, checked to be inside the file and under the limit.
std::uint64_t read_header_length(const ByteSource& source, const SafetensorsLimits& limits) {
    if (source.size() < kPrefix) {
        not_safetensors(source, fmt::format("expected at least {} bytes, got {}", kPrefix, source.size()));
    }
    std::uint64_t length = 0;
    source.read(0, std::as_writable_bytes(std::span(&length, 1)));
    const std::uint64_t limit = std::min(limits.header_bytes, SafetensorsLimits::kHardHeaderBytes);
    if (length > limit)
        not_safetensors(source, fmt::format("expected a header of at most {} bytes, got {} in the first 8 bytes: the "
                                            "file is damaged, or of another kind than .safetensors",
                                            limit, length));
    if (length > source.size() - kPrefix) {
        not_safetensors(source, fmt::format("expected a header of at most {} bytes, the rest of the file, got {}{}",
                                            source.size() - kPrefix, length,
                                            begins_as_header(source) ? ": the file was cut off" : ""));
    }
    return length;
}

/// Returns the header's text without its padding, after the checks that need no JSON.
std::string read_header_text(const ByteSource& source, std::uint64_t length) {
    const std::string& origin = source.origin();
    std::string text(length, '\0');
    source.read(kPrefix, std::as_writable_bytes(std::span(text)));
    if (text.empty() || text.front() != '{') not_safetensors(source, "expected a header that starts with '{'");
    // The JSON parser takes a NUL for the end of its input and ignores the rest.
    if (text.find('\0') != std::string::npos) bad_data(origin, "expected a header without NUL bytes");
    text.resize(text.find_last_not_of(' ') + 1);
    if (text.back() != '}') bad_data(origin, "expected a header that ends with '}' and spaces");
    return text;
}

/// Compares a tensor's header entry with its bytes, and fills the fields that follow from it.
void check_tensor(const std::string& origin, NamedTensor& tensor, std::uint64_t begin, std::uint64_t end) {
    const SafetensorsDtype* dtype = find_dtype(tensor.file_dtype);
    if (dtype == nullptr) {
        bad_data(origin, fmt::format("tensor {}: expected a dtype of the format, got {}", printable(tensor.name),
                                     printable(tensor.file_dtype)));
    }
    std::int64_t bits = 0;
    if (!checked_bits(tensor.shape, dtype->bits, bits)) {
        bad_data(origin, fmt::format("tensor {}: expected fewer than 2^63 bits, got {} of {}", printable(tensor.name),
                                     shape_text(tensor.shape), tensor.file_dtype));
    }
    if (bits % 8 != 0) {
        bad_data(origin, fmt::format("tensor {}: expected whole bytes, got {} of {}", printable(tensor.name),
                                     shape_text(tensor.shape), tensor.file_dtype));
    }
    if (end - begin != static_cast<std::uint64_t>(bits / 8)) {
        bad_data(origin, fmt::format("tensor {}: expected {} bytes for {} of {}, got data_offsets [{}, {}]",
                                     printable(tensor.name), bits / 8, shape_text(tensor.shape), tensor.file_dtype,
                                     begin, end));
    }
    tensor.known_dtype = dtype->known.has_value();
    if (tensor.known_dtype) tensor.dtype = *dtype->known;
    tensor.bytes = static_cast<std::size_t>(bits / 8);
}

/// Checks that the tensors fill the payload from its first to its last byte, without holes or overlaps.
std::vector<TensorSource> check_layout(const ByteSource& source, std::vector<HeaderEntry> entries,
                                       std::uint64_t payload) {
    std::stable_sort(entries.begin(), entries.end(), [](const HeaderEntry& a, const HeaderEntry& b) {
        return std::tie(a.begin, a.end) < std::tie(b.begin, b.end);
    });
    const std::uint64_t payload_bytes = source.size() - payload;
    std::vector<TensorSource> tensors;
    std::uint64_t position = 0;
    for (HeaderEntry& entry : entries) {
        const std::string& origin = source.origin();
        if (entry.begin != position || entry.end < entry.begin || entry.end > payload_bytes) {
            bad_data(origin,
                     fmt::format("tensor {}: expected data_offsets from {} up to at most {}, got [{}, {}]",
                                 printable(entry.tensor.name), position, payload_bytes, entry.begin, entry.end));
        }
        check_tensor(origin, entry.tensor, entry.begin, entry.end);
        tensors.push_back({std::move(entry.tensor), payload + entry.begin});
        position = entry.end;
    }
    if (position != payload_bytes) {
        bad_data(source.origin(),
                 fmt::format("expected {} bytes of tensors after the header, got {}", position, payload_bytes));
    }
    return tensors;
}

TensorFile parse(const ByteSource& source, const SafetensorsLimits& limits) {
    const std::uint64_t header_bytes = read_header_length(source, limits);
    Header header = parse_header(read_header_text(source, header_bytes), source.origin(), limits);
    auto tensors = check_layout(source, std::move(header.entries), kPrefix + header_bytes);
    return TensorFile(source, std::move(tensors), std::move(header.metadata));
}

void check_name(const std::string& name, std::set<std::string_view>& names) {
    const SafetensorsLimits limits;
    if (name == "__metadata__") {
        throw Error(ErrorCode::invalid_argument, "tensors", "expected a name other than \"__metadata__\"");
    }
    if (name.size() > limits.name_bytes) {
        throw Error(ErrorCode::invalid_argument, "tensors",
                    fmt::format("expected names of at most {} bytes, got {}", limits.name_bytes, printable(name)));
    }
    if (!names.insert(name).second) {
        throw Error(ErrorCode::invalid_argument, "tensors",
                    fmt::format("expected each name once, got {} twice", printable(name)));
    }
}

/// Returns a JSON string literal.
std::string literal(const std::string& text) {
    try {
        return nlohmann::json(text).dump();
    } catch (const nlohmann::json::exception&) {
        throw Error(ErrorCode::invalid_argument, "tensors", fmt::format("expected UTF-8, got {}", printable(text)));
    }
}

/// Returns the tensors in the order of their bytes in the file.
std::vector<const std::pair<std::string, TensorView>*> file_order(NamedViews tensors) {
    std::vector<const std::pair<std::string, TensorView>*> order;
    for (const auto& tensor : tensors) order.push_back(&tensor);
    std::stable_sort(order.begin(), order.end(),
                     [](const auto* a, const auto* b) { return size_of(a->second.dtype) > size_of(b->second.dtype); });
    return order;
}

std::string metadata_text(const Metadata& metadata) {
    const SafetensorsLimits limits;
    std::string text;
    for (const auto& [key, value] : metadata) {
        if (key.size() > limits.name_bytes) {
            throw Error(ErrorCode::invalid_argument, "metadata",
                        fmt::format("expected keys of at most {} bytes, got {}", limits.name_bytes, printable(key)));
        }
        text += fmt::format("{}{}:{}", text.empty() ? "" : ",", literal(key), literal(value));
    }
    return text.empty() ? text : fmt::format("\"__metadata__\":{{{}}}", text);
}

std::string header_text(NamedViews tensors, const Metadata& metadata) {
    const SafetensorsLimits limits;
    if (tensors.size() > limits.tensors) {
        throw Error(ErrorCode::invalid_argument, "tensors",
                    fmt::format("expected at most {}, got {}", limits.tensors, tensors.size()));
    }
    std::string text = fmt::format("{{{}", metadata_text(metadata));
    std::set<std::string_view> names;
    std::int64_t position = 0;
    for (const auto* tensor : file_order(tensors)) {
        const auto& [name, view] = *tensor;
        check_name(name, names);
        const std::int64_t bytes = checked_bytes(view, fmt::format("tensors[{}]", printable(name)));
        std::int64_t end = 0;
        if (__builtin_add_overflow(position, bytes, &end)) {
            throw Error(ErrorCode::invalid_argument, "tensors", "expected fewer than 2^63 bytes in all");
        }
        text += fmt::format("{}{}:{{\"dtype\":\"{}\",\"shape\":[{}],\"data_offsets\":[{},{}]}}",
                            text.size() > 1 ? "," : "", literal(name), dtype_name(view.dtype),
                            fmt::join(view.shape.begin(), view.shape.begin() + view.rank, ","), position, end);
        position = end;
    }
    text += "}";
    text.resize((text.size() + 7) / 8 * 8, ' ');
    if (text.size() > limits.header_bytes) {
        throw Error(ErrorCode::invalid_argument, "tensors",
                    fmt::format("expected a header of at most {} bytes, got {}", limits.header_bytes, text.size()));
    }
    return text;
}

void serialize(ByteSink& sink, NamedViews tensors, const std::string& header) {
    const std::uint64_t length = header.size();
    sink.write(std::as_bytes(std::span(&length, 1)));
    sink.write(std::as_bytes(std::span(header)));
    for (const auto* tensor : file_order(tensors)) write_elements(sink, tensor->second);
}

}  // namespace

TensorFile read_safetensors(const std::string& path, const SafetensorsLimits& limits) {
    return parse(InputFile(path), limits);
}

TensorFile parse_safetensors(std::span<const std::byte> bytes, const std::string& origin,
                             const SafetensorsLimits& limits) {
    return parse(MemorySource(bytes, origin), limits);
}

void write_safetensors(const std::string& path, NamedViews tensors, const Metadata& metadata) {
    const std::string header = header_text(tensors, metadata);
    AtomicFile file(path);
    serialize(file, tensors, header);
    file.commit();
}

std::vector<std::byte> serialize_safetensors(NamedViews tensors, const Metadata& metadata) {
    MemorySink sink;
    serialize(sink, tensors, header_text(tensors, metadata));
    return sink.take();
}

}  // namespace tessera::io
