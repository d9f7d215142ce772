// SPDX-License-Identifier: Apache-2.0
#include "plot/png.hpp"

#include <fmt/format.h>

#include "plot/mark.hpp"
#include "tessera/error.hpp"

#ifdef TESSERA_HAS_RSVG
#include <cairo.h>
#include <librsvg/rsvg.h>
#include <zlib.h>

#include <cmath>
#include <memory>
#endif

#if defined(__SANITIZE_ADDRESS__)
#define TESSERA_FINDS_LEAKS
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define TESSERA_FINDS_LEAKS
#endif
#endif

#if defined(TESSERA_HAS_RSVG) && defined(TESSERA_FINDS_LEAKS)
// Fontconfig keeps its tables until the process ends; this function tells the leak checker to ignore them.
extern "C" const char* __lsan_default_suppressions();
extern "C" const char* __lsan_default_suppressions() { return "leak:libfontconfig"; }
extern "C" const char* __lsan_default_options();
extern "C" const char* __lsan_default_options() { return "print_suppressions=0"; }
#endif

namespace tessera::plot {

#ifdef TESSERA_HAS_RSVG
namespace {

constexpr double kMostPixels = 16384;  // largest side in pixels

struct Unref {
    void operator()(RsvgHandle* handle) const { g_object_unref(handle); }
    void operator()(GError* error) const { g_error_free(error); }
    void operator()(cairo_surface_t* surface) const { cairo_surface_destroy(surface); }
    void operator()(cairo_t* context) const { cairo_destroy(context); }
};
template <class T>
using Owned = std::unique_ptr<T, Unref>;

[[noreturn]] void refuse(GError* error) {
    const Owned<GError> owned(error);
    throw Error(ErrorCode::invalid_argument, "svg", owned != nullptr ? owned->message : "librsvg can't draw it");
}

std::string big_endian(std::size_t value) {
    std::string bytes;
    for (const int shift : {24, 16, 8, 0}) bytes += static_cast<char>((value >> shift) & 0xFF);
    return bytes;
}

/// Inserts the mark as a text chunk after the header, which is the first chunk of every PNG file.
std::string marked(std::string picture) {
    constexpr std::size_t kSignatureAndHeader = 8 + 4 + 4 + 13 + 4;
    const std::string body = "tEXt" + std::string(kPngMark);
    const auto checksum = crc32(0, reinterpret_cast<const Bytef*>(body.data()), static_cast<uInt>(body.size()));
    return picture.insert(kSignatureAndHeader, big_endian(kPngMark.size()) + body + big_endian(checksum));
}

cairo_status_t append(void* to, const unsigned char* bytes, unsigned int count) {
    static_cast<std::string*>(to)->append(reinterpret_cast<const char*>(bytes), count);
    return CAIRO_STATUS_SUCCESS;
}

}  // namespace

bool can_draw_png() { return true; }

std::string png(std::string_view svg, double scale) {
    GError* error = nullptr;
    const Owned<RsvgHandle> handle(
        rsvg_handle_new_from_data(reinterpret_cast<const guint8*>(svg.data()), svg.size(), &error));
    if (handle == nullptr) refuse(error);
    double width = 0, height = 0;
    if (!rsvg_handle_get_intrinsic_size_in_pixels(handle.get(), &width, &height)) {
        throw Error(ErrorCode::invalid_argument, "svg", "expected a width and a height in pixels, got none");
    }
    width = std::ceil(width * scale);
    height = std::ceil(height * scale);
    if (!(width >= 1 && height >= 1 && width <= kMostPixels && height <= kMostPixels)) {
        throw Error(ErrorCode::invalid_argument, "svg",
                    fmt::format("expected 1 to {} pixels each way, got {} x {}", kMostPixels, width, height));
    }
    const Owned<cairo_surface_t> surface(
        cairo_image_surface_create(CAIRO_FORMAT_ARGB32, static_cast<int>(width), static_cast<int>(height)));
    const Owned<cairo_t> context(cairo_create(surface.get()));
    const RsvgRectangle all{0, 0, width, height};
    if (!rsvg_handle_render_document(handle.get(), context.get(), &all, &error)) refuse(error);
    std::string bytes;
    if (cairo_surface_write_to_png_stream(surface.get(), append, &bytes) != CAIRO_STATUS_SUCCESS) {
        throw Error(ErrorCode::out_of_memory, "png", "cairo could not make the picture");
    }
    return marked(std::move(bytes));
}

#else

bool can_draw_png() { return false; }

std::string png(std::string_view, double) {
    throw Error(ErrorCode::unsupported, "png",
                "this build has no librsvg: install librsvg2-dev and build again, or take SVG");
}

#endif

}  // namespace tessera::plot
