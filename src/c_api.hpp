// SPDX-License-Identifier: Apache-2.0
//
// The files of the C ABI share this: exceptions become a status and a message, C structs become those of the C++ API.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <new>
#include <string>
#include <string_view>

#include "core/invalid.hpp"
#include "tessera/tessera.h"
#include "tessera/tessera.hpp"

namespace tessera {

/// Keeps the message for tessera_last_error.
tessera_status fail(ErrorCode code, const char* message, const char* argument) noexcept;

template <class Body>
tessera_status guarded(const Body& body) noexcept {
    try {
        body();
        return TESSERA_OK;
    } catch (const Error& error) {
        return fail(error.code(), error.what(), error.argument().c_str());
    } catch (const std::bad_alloc&) {
        return fail(ErrorCode::out_of_memory, "out of memory", "");
    } catch (const std::exception& error) {
        return fail(ErrorCode::internal, error.what(), "");
    } catch (...) {
        return fail(ErrorCode::internal, "an exception of an unknown type", "");
    }
}

inline void expect_address(const char* name, const void* address) {
    if (address == nullptr) invalid(name, "expected an address, got null");
}

/// The least size that a caller's struct can have: that of its first version.
template <class T>
inline constexpr std::size_t kFirstSize = sizeof(T);
template <>
inline constexpr std::size_t kFirstSize<tessera_forward_args> = offsetof(tessera_forward_args, o_residual);
template <>
inline constexpr std::size_t kFirstSize<tessera_backward_args> = offsetof(tessera_backward_args, o_residual);
template <>
inline constexpr std::size_t kFirstSize<tessera_problem> = offsetof(tessera_problem, page_size);
template <>
inline constexpr std::size_t kFirstSize<tessera_plan_info> = offsetof(tessera_plan_info, o_residual);
template <>
inline constexpr std::size_t kFirstSize<tessera_prediction> = offsetof(tessera_prediction, error);

/// Checks struct_size before all bytes of the struct are read or set: an uninitialised one must not lead far beyond it.
/// `name` is that of the struct, or "".
template <class T>
void expect_struct_size(const char* name, std::size_t size) {
    static_assert(sizeof(T) <= TESSERA_MAX_STRUCT_SIZE);
    if (size >= kFirstSize<T> && size <= TESSERA_MAX_STRUCT_SIZE) return;
    invalid(fmt::format("{}{}struct_size", name, *name == '\0' ? "" : "."),
            fmt::format("expected {}..{}, got {}", kFirstSize<T>, TESSERA_MAX_STRUCT_SIZE, size));
}

/// Reads a struct that begins with struct_size; fields beyond that are 0.
template <class T>
T read_struct(const char* name, const T* from) {
    expect_address(name, from);
    const std::size_t size = from->struct_size;
    expect_struct_size<T>(name, size);
    const auto* bytes = reinterpret_cast<const unsigned char*>(from);
    const std::size_t known = std::min(size, sizeof(T));
    if (std::any_of(bytes + known, bytes + size, [](unsigned char b) { return b != 0; })) {
        invalid(
            fmt::format("{}.struct_size", name),
            fmt::format(
                "expected zeros after the {} bytes that this version of tessera knows, got {} bytes with a field set",
                sizeof(T), size));
    }
    T read{};
    std::memcpy(static_cast<void*>(&read), bytes, known);
    return read;
}

/// Checks a struct that the library fills in, and sets everything after struct_size to 0.
template <class T>
void clear_struct(const char* name, T* to) {
    expect_address(name, to);
    const std::size_t size = to->struct_size;
    expect_struct_size<T>(name, size);
    std::memset(static_cast<void*>(to), 0, size);
    to->struct_size = size;
}

/// Cuts the text off if it is too long.
template <std::size_t N>
void copy_text(char (&to)[N], std::string_view from) noexcept {
    const std::size_t length = std::min(from.size(), N - 1);
    std::memcpy(to, from.data(), length);
    to[length] = '\0';
}

/// Each throws Error(invalid_argument) naming the field.
Problem problem_of(const tessera_problem* problem);
tessera_options read_options(const tessera_options* options);
Plan plan_of(const tessera_problem* problem, const tessera_options* options, std::int32_t pass);
/// A tensor of rank 0 is not given: none of its other fields is read.
TensorView tensor_of(const char* name, const tessera_tensor& tensor);

Execution execution_of(const tessera_options& options, void* stream);

}  // namespace tessera
