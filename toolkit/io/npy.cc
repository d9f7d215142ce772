// SPDX-License-Identifier: Apache-2.0
// The format starts with the 6 bytes "\x93NUMPY", a major and a minor version, and the header's length (2 bytes in
// version 1, else 4, little endian). The header (a Python dict literal) follows, then the data up to the end of the
// file.
#include "io/npy.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <filesystem>
#include <optional>
#include <string_view>
#include <utility>

#include "io/atomic_file.hpp"
#include "io/npy_header.hpp"
#include "io/other_format.hpp"
#include "tessera/error.hpp"

namespace tessera::io {
namespace {

static_assert(std::endian::native == std::endian::little, "big-endian data is swapped, little-endian data is not");

constexpr std::string_view kMagic = "\x93NUMPY";
constexpr std::uint64_t kMaxHeaderBytes = 64 * 1024;

struct NpyDtype {
    std::string_view name;
    std::int64_t bytes;
    std::optional<DType> known;  // its counterpart in tessera
    bool bf16 = false;           // only with NpyOptions::bf16
};

constexpr std::array<NpyDtype, 10> kDtypes{{{"<f2", 2, DType::fp16},
                                            {"<f4", 4, DType::fp32},
                                            {"<f8", 8, DType::fp64},
                                            {"<i4", 4, DType::int32},
                                            {"<i8", 8, DType::int64},
                                            {"|u1", 1, {}},
                                            {"|i1", 1, {}},
                                            {"|V2", 2, DType::bf16, true},
                                            {"<V2", 2, DType::bf16, true},
                                            {"<u2", 2, DType::bf16, true}}};

bool is_big_endian(const std::string& descr) { return descr.starts_with('>'); }

const NpyDtype& find_dtype(const std::string& descr, const NpyOptions& options, const std::string& origin) {
    std::string name = descr;
    if (is_big_endian(descr)) name.front() = '<';
    for (const NpyDtype& dtype : kDtypes) {
        if (dtype.name != name) continue;
        if (dtype.bf16 && !options.bf16) {
            bad_data(origin, fmt::format("dtype: {} may be bf16; expected the option that says so (--dtype bf16)",
                                         printable(descr)));
        }
        return dtype;
    }
    bad_data(origin, fmt::format("dtype: expected <f2, <f4, <f8, <i4, <i8 (or these with >), |u1 or |i1, got {}",
                                 printable(descr)));
}

std::string_view dtype_name(DType dtype) {
    for (const NpyDtype& row : kDtypes) {
        if (row.known == dtype) return row.name;
    }
    return {};
}

struct HeaderText {
    std::string text;
    std::uint64_t data_offset = 0;
};

HeaderText read_header_text(const ByteSource& source) {
    const std::string& origin = source.origin();
    std::array<char, 12> start{};  // magic, version, header length
    const std::uint64_t available = std::min<std::uint64_t>(source.size(), start.size());
    source.read(0, std::as_writable_bytes(std::span(start)).first(available));
    if (std::string_view(start.data(), kMagic.size()) != kMagic)
        bad_data(origin, not_wanted_text(source, "a .npy file", "expected the magic bytes of .npy"));
    const auto expect_bytes = [&](std::uint64_t least) {
        if (available < least)
            bad_data(origin, fmt::format("expected at least {} bytes, got {}", least, source.size()));
    };
    expect_bytes(10);
    const int major = static_cast<unsigned char>(start[6]);
    const int minor = static_cast<unsigned char>(start[7]);
    if (major < 1 || major > 3 || minor != 0) {
        bad_data(origin, fmt::format("expected version 1.0, 2.0 or 3.0, got {}.{}", major, minor));
    }
    HeaderText header;
    header.data_offset = major == 1 ? 10 : 12;
    expect_bytes(header.data_offset);
    std::uint32_t length = 0;
    std::memcpy(&length, start.data() + 8, header.data_offset - 8);
    const std::uint64_t rest = source.size() - header.data_offset;
    if (length > std::min(rest, kMaxHeaderBytes)) {
        bad_data(origin,
                 fmt::format("expected a header of at most {} bytes, got {}", std::min(rest, kMaxHeaderBytes), length));
    }
    header.text.resize(length);
    source.read(header.data_offset, std::as_writable_bytes(std::span(header.text)));
    header.data_offset += length;
    return header;
}

TensorFile parse(const ByteSource& source, const NpyOptions& options) {
    const std::string& origin = source.origin();
    const HeaderText text = read_header_text(source);
    NpyHeader header = parse_npy_header(text.text, origin);
    const NpyDtype& dtype = find_dtype(header.descr, options, origin);
    std::int64_t bits = 0;
    if (!checked_bits(header.shape, dtype.bytes * 8, bits)) {
        bad_data(origin, fmt::format("shape: expected fewer than 2^60 bytes, got {} of {}", shape_text(header.shape),
                                     dtype.name));
    }
    const auto bytes = static_cast<std::uint64_t>(bits / 8);
    if (bytes != source.size() - text.data_offset) {
        bad_data(origin, fmt::format("expected {} bytes of data for {} of {}, got {}", bytes, shape_text(header.shape),
                                     dtype.name, source.size() - text.data_offset));
    }
    NamedTensor tensor;
    tensor.name = std::filesystem::path(origin).stem().string();
    tensor.file_dtype = header.descr;
    tensor.known_dtype = dtype.known.has_value();
    if (tensor.known_dtype) tensor.dtype = *dtype.known;
    tensor.fortran_order = header.fortran_order;
    tensor.shape = std::move(header.shape);
    tensor.bytes = static_cast<std::size_t>(bytes);
    std::vector<TensorSource> tensors;
    const std::size_t swapped = is_big_endian(header.descr) ? static_cast<std::size_t>(dtype.bytes) : 1;
    tensors.push_back({std::move(tensor), text.data_offset, swapped});
    return TensorFile(source, std::move(tensors), {});
}

std::string header_text(const TensorView& view) {
    checked_bytes(view, "view");
    std::string text = fmt::format("{{'descr': '{}', 'fortran_order': False, 'shape': (", dtype_name(view.dtype));
    for (int d = 0; d < view.rank; ++d) {
        // The comma after a single size makes it a tuple.
        text += fmt::format("{}{}", view.shape[static_cast<std::size_t>(d)],
                            d + 1 < view.rank ? ", "
                            : view.rank == 1  ? ","
                                              : "");
    }
    text += "), }";
    constexpr std::size_t kStart = 10;  // bytes before the text, in version 1
    while ((kStart + text.size() + 1) % kAlignment != 0) text += ' ';
    return text + '\n';
}

void serialize(ByteSink& sink, const TensorView& view, const std::string& header) {
    std::string start(kMagic);
    start += {'\1', '\0', static_cast<char>(header.size() & 0xff), static_cast<char>(header.size() >> 8)};
    sink.write(std::as_bytes(std::span(start)));
    sink.write(std::as_bytes(std::span(header)));
    write_elements(sink, view);
}

}  // namespace

TensorFile read_npy(const std::string& path, const NpyOptions& options) { return parse(InputFile(path), options); }

TensorFile parse_npy(std::span<const std::byte> bytes, const NpyOptions& options, const std::string& origin) {
    return parse(MemorySource(bytes, origin), options);
}

void write_npy(const std::string& path, const TensorView& view) {
    const std::string header = header_text(view);
    AtomicFile file(path);
    serialize(file, view, header);
    file.commit();
}

std::vector<std::byte> serialize_npy(const TensorView& view) {
    MemorySink sink;
    serialize(sink, view, header_text(view));
    return sink.take();
}

}  // namespace tessera::io
