// SPDX-License-Identifier: Apache-2.0
#include "io/safetensors.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <bit>
#include <cstring>
#include <limits>

#include "io_test_util.hpp"

namespace tessera::io::test::safetensors_test {
namespace {

using Named = std::vector<std::pair<std::string, TensorView>>;

Bytes file_of(std::string_view header, std::size_t payload = 0) {
    return to_bytes(little_endian(header.size(), 8) + std::string(header) + counting(payload));
}

/// The header of one tensor "a".
std::string one(const std::string& dtype, const std::string& shape, const std::string& offsets) {
    return R"({"a":{"dtype":")" + dtype + R"(","shape":)" + shape + R"(,"data_offsets":)" + offsets + "}}";
}

std::string list_of(const char* first, const char* second = "") {
    return std::string("[").append(first).append(second).append("]");
}

void expect_bad(std::string_view words, const Bytes& bytes) {
    expect_error(ErrorCode::bad_data, words, [&] { parse_safetensors(bytes); });
}

void expect_bad(std::string_view words, std::string_view header, std::size_t payload = 0) {
    expect_bad(words, file_of(header, payload));
}

template <class T>
std::vector<T> elements(const TensorFile& file, std::string_view name) {
    const auto bytes = file.bytes(*file.find(name));
    std::vector<T> values(bytes.size() / sizeof(T));
    std::copy(bytes.begin(), bytes.end(), std::as_writable_bytes(std::span(values)).begin());
    return values;
}

TEST(Safetensors, round_trip_of_every_dtype_aligned_by_falling_size) {
    const std::vector<std::uint16_t> half{0x3c00, 0x7e01, 0xfc00};  // 1, NaN with payload, -inf
    const std::vector<float> single{1.0F, -0.0F, std::bit_cast<float>(0x7fa00001U)};
    const std::vector<double> twice{std::numeric_limits<double>::denorm_min(), 2.0};
    const std::vector<std::int32_t> int32{-1, 2};
    const std::vector<std::int64_t> int64{std::numeric_limits<std::int64_t>::min()};
    const Named tensors{
        {"h", dense_view(half.data(), DType::fp16, {3})},      {"b", dense_view(half.data(), DType::bf16, {3, 1})},
        {"s", dense_view(single.data(), DType::fp32, {1, 3})}, {"d", dense_view(twice.data(), DType::fp64, {2})},
        {"i", dense_view(int32.data(), DType::int32, {2})},    {"l", dense_view(int64.data(), DType::int64, {1})}};
    const Bytes bytes = serialize_safetensors(tensors);
    const TensorFile file = parse_safetensors(bytes);
    std::string order;
    for (const NamedTensor& tensor : file.tensors()) order += tensor.name;
    EXPECT_EQ(order, "dlsihb");
    std::uint64_t header = 0;
    std::memcpy(&header, bytes.data(), 8);
    EXPECT_EQ(header % 8, 0U);
    for (const auto& [name, view] : tensors) {
        const TensorView back = file.view(name);
        EXPECT_EQ(back.describe(), view.describe());
        EXPECT_EQ(std::memcmp(back.data, view.data, file.find(name)->bytes), 0) << name;
        EXPECT_EQ(reinterpret_cast<std::uintptr_t>(back.data) % kAlignment, 0U);
    }
}

TEST(Safetensors, strided_views_are_written_in_c_order) {
    std::vector<float> values(24);
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i);
    const TensorView dense = dense_view(values.data(), DType::fp32, {2, 3, 4});
    const Named tensors{{"transposed", transposed(dense, 0, 2)},
                        {"expanded", strided_view(values.data(), DType::fp32, {2, 3}, {0, 1})},
                        {"backward", strided_view(values.data() + 3, DType::fp32, {4}, {-1})}};
    const TensorFile file = parse_safetensors(serialize_safetensors(tensors));
    EXPECT_EQ(file.view("transposed").describe(), "fp32 [4, 3, 2] strides [6, 2, 1]");
    const auto transposed_values = elements<float>(file, "transposed");
    EXPECT_EQ(std::vector(transposed_values.begin(), transposed_values.begin() + 7),
              (std::vector<float>{0, 12, 4, 16, 8, 20, 1}));
    EXPECT_EQ(elements<float>(file, "expanded"), (std::vector<float>{0, 1, 2, 0, 1, 2}));
    EXPECT_EQ(elements<float>(file, "backward"), (std::vector<float>{3, 2, 1, 0}));
}

TEST(Safetensors, a_strided_view_larger_than_the_write_buffer) {
    std::vector<double> values(200 * 300);
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<double>(i);
    const Named tensors{{"x", transposed(dense_view(values.data(), DType::fp64, {200, 300}), 0, 1)}};
    const auto back = elements<double>(parse_safetensors(serialize_safetensors(tensors)), "x");
    for (std::size_t i = 0; i < back.size(); ++i) ASSERT_EQ(back[i], values[i % 200 * 300 + i / 200]);
}

TEST(Safetensors, scalars_and_zero_sizes) {
    float value = 3;
    const Named tensors{{"scalar", TensorView{.data = &value, .dtype = DType::fp32}},
                        {"empty", dense_view(nullptr, DType::fp32, {2, 0, 3})}};
    const TensorFile file = parse_safetensors(serialize_safetensors(tensors));
    EXPECT_TRUE(file.find("scalar")->shape.empty());
    EXPECT_EQ(file.view("scalar").describe(), "fp32 [1] strides [1]");
    EXPECT_EQ(*file.view("scalar").at<float>(0), 3);
    EXPECT_EQ(file.find("empty")->shape, (std::vector<std::int64_t>{2, 0, 3}));
    EXPECT_EQ(file.view("empty").size(), 0);
    EXPECT_TRUE(parse_safetensors(serialize_safetensors({})).tensors().empty());
}

TEST(Safetensors, metadata_and_odd_names_are_kept) {
    const float value = 1;
    const std::string odd("\"\\\n\x1b\0\xc3\xa9", 7);
    const Named tensors{{odd, dense_view(&value, DType::fp32, {1})}, {"", dense_view(&value, DType::fp32, {1})}};
    const Metadata metadata{{"scale", "0.125"}, {"", ""}, {"\xf0\x9f\x98\x80", odd}};
    const TensorFile file = parse_safetensors(serialize_safetensors(tensors, metadata));
    EXPECT_EQ(file.metadata(), metadata);
    EXPECT_NE(file.find(odd), nullptr);
    EXPECT_NE(file.find(""), nullptr);
}

TEST(Safetensors, files_are_written_and_read_in_place) {
    const Folder folder;
    std::vector<float> values{1, 2, 3, 4, 5, 6};
    const Named tensors{{"q", dense_view(values.data(), DType::fp32, {2, 3})}};
    write_safetensors(folder.file("a.safetensors"), tensors, {{"causal", "1"}});
    const TensorFile file = read_safetensors(folder.file("a.safetensors"));
    EXPECT_EQ(elements<float>(file, "q"), values);
    EXPECT_EQ(file.metadata().at("causal"), "1");
    write_safetensors(folder.file("a.safetensors"), Named{{"q", transposed(file.view("q"), 0, 1)}});
    EXPECT_EQ(elements<float>(read_safetensors(folder.file("a.safetensors")), "q"),
              (std::vector<float>{1, 4, 2, 5, 3, 6}));
    expect_error(ErrorCode::bad_data, folder.file("bad"), [&] {
        put_file(folder.file("bad"), "x");
        read_safetensors(folder.file("bad"));
    });
}

TEST(Safetensors, tensors_out_of_order_and_unaligned_are_read) {
    const TensorFile file = parse_safetensors(file_of(R"({"b":{"dtype":"F64","shape":[1],"data_offsets":[1,9]},)"
                                                      R"("a":{"data_offsets":[0,1],"shape":[1],"dtype":"U8"}}  )",
                                                      9));
    EXPECT_EQ(file.tensors()[0].name, "a");
    EXPECT_EQ(elements<std::uint64_t>(file, "b")[0], 0x0807060504030201U);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(file.view("b").data) % 8, 0U);
}

// An empty tensor ends where it begins. If another one begins at that place, the empty one comes first, whatever their
// order in the header.
TEST(Safetensors, an_empty_tensor_may_be_named_behind_the_one_that_begins_there) {
    const TensorFile file = parse_safetensors(file_of(R"({"full":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},)"
                                                      R"("empty":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}})",
                                                      4));
    EXPECT_EQ(file.find("full")->bytes, 4U);
    EXPECT_EQ(file.find("empty")->bytes, 0U);
}

TEST(Safetensors, known_dtypes_without_a_view) {
    for (const char* dtype : {"BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"}) {
        const TensorFile file = parse_safetensors(file_of(one(dtype, "[4]", "[0,4]"), 4));
        expect_error(ErrorCode::bad_data, dtype, [&] { file.view("a"); });
    }
    for (const char* dtype : {"I16", "U16"}) parse_safetensors(file_of(one(dtype, "[2]", "[0,4]"), 4));
    parse_safetensors(file_of(one("U32", "[1]", "[0,4]"), 4));
    for (const char* dtype : {"U64", "C64"}) parse_safetensors(file_of(one(dtype, "[1]", "[0,8]"), 8));
    for (const char* dtype : {"F6_E2M3", "F6_E3M2"}) parse_safetensors(file_of(one(dtype, "[4]", "[0,3]"), 3));
    EXPECT_EQ(parse_safetensors(file_of(one("F4", "[8]", "[0,4]"), 4)).find("a")->bytes, 4U);
}

TEST(Safetensors, views_of_missing_names_and_high_ranks_are_refused) {
    const TensorFile file = parse_safetensors(file_of(one("F32", "[1,1,1,1,2]", "[0,8]"), 8));
    expect_error(ErrorCode::bad_data, "expected rank <= 4, got [1, 1, 1, 1, 2]", [&] { file.view("a"); });
    expect_error(ErrorCode::bad_data, "expected a tensor \"q\", got 1 tensors: \"a\"", [&] { file.view("q"); });
}

TEST(Safetensors, check_length_of_file) {
    expect_bad("it is an empty file", Bytes{});
    expect_bad("at least 8 bytes, got 7", Bytes(7));
}

TEST(Safetensors, check_header_length) {
    const std::string rest = "{}";
    expect_bad("at most 100000000 bytes, got 100000001", to_bytes(little_endian(100'000'001, 8) + rest));
    expect_bad("the rest of the file, got 3: the file was cut off", to_bytes(little_endian(3, 8) + rest));
    // 8 + n wraps to 0 and to 1.
    expect_bad("at most 100000000 bytes", to_bytes(little_endian(~std::uint64_t{7}, 8) + rest));
    expect_bad("at most 100000000 bytes", to_bytes(little_endian(~std::uint64_t{6}, 8) + rest));
    const auto bytes = file_of(one("F32", "[2]", "[0,8]"), 8);
    expect_error(ErrorCode::bad_data, "at most 10 bytes", [&] { parse_safetensors(bytes, "x", {.header_bytes = 10}); });
    const auto hard = to_bytes(little_endian(100'000'001, 8) + rest);
    expect_error(ErrorCode::bad_data, "at most 100000000 bytes",
                 [&] { parse_safetensors(hard, "x", {.header_bytes = 1'000'000'000}); });
}

TEST(Safetensors, check_start_and_padding) {
    expect_bad("starts with '{'", file_of(""));
    expect_bad("starts with '{'", file_of(" {}"));
    expect_bad("starts with '{'", file_of("\xef\xbb\xbf{}"));
    expect_bad("starts with '{'", file_of("[]"));
    EXPECT_TRUE(parse_safetensors(file_of("{}      ")).tensors().empty());
    expect_bad("ends with '}'", file_of("{}\n"));
    expect_bad("ends with '}'", file_of("{} x"));
    expect_bad("without NUL", file_of(std::string_view("{}\0}", 4)));
    expect_bad("valid JSON", file_of("{}{}"));
    expect_bad("valid JSON", file_of("{/**/}"));
}

TEST(Safetensors, check_utf8) {
    expect_bad("valid JSON in UTF-8", "{\"\xff\":{}}");
    expect_bad("valid JSON in UTF-8", "{\"\xc0\xaf\":{}}");
    expect_bad("valid JSON in UTF-8", "{\"\xed\xa0\x80\":{}}");
    expect_bad("valid JSON in UTF-8", "{\"\\ud800\":{}}");
}

TEST(Safetensors, check_duplicate_keys) {
    const std::string tensor = R"({"dtype":"F32","shape":[2],"data_offsets":[0,8]})";
    expect_bad("got \"a\" twice", R"({"a":)" + tensor + R"(,"a":)" + tensor + "}", 8);
    expect_bad("got \"a\" twice", R"({"a":)" + tensor + R"(,"\u0061":)" + tensor + "}", 8);
    expect_bad("got \"shape\" twice", R"({"a":{"dtype":"F32","shape":[2],"shape":[2],"data_offsets":[0,8]}})", 8);
    expect_bad("got \"k\" twice", R"({"__metadata__":{"k":"1","k":"2"}})");
    expect_bad("got \"__metadata__\" twice", R"({"__metadata__":{},"__metadata__":{}})");
}

TEST(Safetensors, check_metadata_is_strings) {
    for (const char* value : {"1", "null", "true", "[]", "{}", "1.5", "-1"}) {
        expect_bad("of __metadata__", R"({"__metadata__":{"k":)" + std::string(value) + "}}");
    }
    expect_bad("expected an object", R"({"__metadata__":"x"})");
}

TEST(Safetensors, check_fields) {
    expect_bad("got fewer", R"({"a":{"dtype":"F32","shape":[2]}})", 8);
    expect_bad("got fewer", R"({"a":{}})");
    expect_bad("got \"stride\"", R"({"a":{"stride":1}})");
    expect_bad("expected a string for dtype", R"({"a":{"dtype":1}})");
    expect_bad("expected an array for shape", R"({"a":{"shape":2}})");
    expect_bad("expected an array for shape", R"({"a":{"shape":{}}})");
    expect_bad("expected an object for \"a\"", R"({"a":[]})");
    expect_bad("expected an object for \"a\"", R"({"a":null})");
    expect_bad("expected 2 data_offsets, got 1", one("F32", "[2]", "[8]"), 8);
    expect_bad("expected 2 data_offsets, got more", one("F32", "[2]", "[0,8,8]"), 8);
    expect_bad("got \"Q4\"", one("Q4", "[2]", "[0,8]"), 8);
    expect_bad("got \"f32\"", one("f32", "[2]", "[0,8]"), 8);
}

TEST(Safetensors, check_numbers) {
    for (const char* number : {"-2", "-0", "2.0", "2e0", "2E0", "99999999999999999999", "null", "\"2\"", "true"}) {
        expect_bad("non-negative integers", one("F32", list_of(number), "[0,8]"), 8);
        expect_bad("non-negative integers", one("F32", "[2]", list_of("0,", number)), 8);
    }
    expect_bad("below 2^63", one("F32", "[9223372036854775808]", "[0,8]"), 8);
    expect_bad("below 2^63", one("F32", "[2]", "[0,9223372036854775808]"), 8);
    for (const char* number : {"1e999", "+2", "02", "0x2", "NaN", "2.", ".2"}) {
        expect_bad("valid JSON", one("F32", list_of(number), "[0,8]"), 8);
    }
}

TEST(Safetensors, check_limits) {
    expect_bad("rank <= 8", one("F32", "[1,1,1,1,1,1,1,1,1]", "[0,4]"), 4);
    parse_safetensors(file_of(one("F32", "[1,1,1,1,1,1,1,1]", "[0,4]"), 4));
    expect_bad("at most 4096 bytes", R"({")" + std::string(4097, 'n') + R"(":{}})");
    const std::string many = R"({"a":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},"b":{}})";
    expect_error(ErrorCode::bad_data, "at most 1 tensors",
                 [&] { parse_safetensors(file_of(many), "x", {.tensors = 1}); });
    expect_error(ErrorCode::bad_data, "at most 1 entries",
                 [&] { parse_safetensors(file_of(R"({"__metadata__":{"a":"","b":""}})"), "x", {.metadata = 1}); });
}

TEST(Safetensors, check_depth) {
    expect_bad("got an array", R"({"a":{"shape":[[1]]}})");
    expect_bad("got an object", R"({"a":{"shape":[{"b":1}]}})");
    // A recursive reader would overflow its stack here.
    expect_bad("expected an object for \"a\"",
               R"({"a":)" + std::string(1 << 20, '[') + std::string(1 << 20, ']') + "}");
}

TEST(Safetensors, check_layout) {
    expect_bad("got [4, 12]", one("F32", "[2]", "[4,12]"), 12);
    expect_bad("up to at most 8, got [0, 16]", one("F32", "[4]", "[0,16]"), 8);
    expect_bad("got [8, 0]", one("F32", "[2]", "[8,0]"), 8);
    expect_bad("expected 8 bytes of tensors after the header, got 9", one("F32", "[2]", "[0,8]"), 9);
    expect_bad("expected 0 bytes of tensors", "{}", 1);
    expect_bad("expected 8 bytes for [2] of F32", one("F32", "[2]", "[0,4]"), 4);
    expect_bad("expected 8 bytes for [2] of F32", one("F32", "[2]", "[0,12]"), 12);
    const std::string a = R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"b":)";
    expect_bad("expected data_offsets from 4", a + R"({"dtype":"F32","shape":[1],"data_offsets":[8,12]}})", 12);
    expect_bad("expected data_offsets from 4", a + R"({"dtype":"F32","shape":[1],"data_offsets":[0,4]}})", 4);
    expect_bad("expected data_offsets from 4", a + R"({"dtype":"F32","shape":[1],"data_offsets":[2,6]}})", 6);
}

TEST(Safetensors, check_sub_byte_sizes) {
    expect_bad("whole bytes", one("F4", "[3]", "[0,1]"), 1);
    expect_bad("whole bytes", one("F6_E2M3", "[1]", "[0,1]"), 1);
}

TEST(Safetensors, a_hostile_name_is_printed_escaped_and_cut) {
    try {
        parse_safetensors(file_of("{\"\\u001b[2J\\u0007" + std::string(1000, 'n') + "\":1}"));
        ADD_FAILURE();
    } catch (const Error& error) {
        const std::string text = error.what();
        EXPECT_EQ(text.find('\x1b'), std::string::npos);
        EXPECT_NE(text.find("\\x1b[2J\\x07"), std::string::npos) << text;
        EXPECT_LT(text.size(), 400U);
    }
}

TEST(Safetensors, more_than_65536_tensors_are_read) {
    constexpr int kTensors = 70'000;
    std::string header = "{";
    for (int i = 0; i < kTensors; ++i)
        header += fmt::format("{}\"{}\":{{\"dtype\":\"U8\",\"shape\":[],\"data_offsets\":[{},{}]}}", i == 0 ? "" : ",",
                              i, i, i + 1);
    const TensorFile file = parse_safetensors(file_of(header + "}", kTensors));
    ASSERT_EQ(file.tensors().size(), static_cast<std::size_t>(kTensors));
    EXPECT_EQ(std::to_integer<int>(file.bytes(*file.find("69999"))[0]), 69'999 % 256);
}

// The failures of other readers; the numbers are those of their issue trackers.

TEST(Safetensors, bug_litert_9255_product_wraps_to_zero) {
    expect_bad("fewer than 2^63 bits", one("F32", "[4294967296,4294967296]", "[0,0]"));
    expect_bad("fewer than 2^63 bits", one("U8", "[4611686018427387904,4]", "[0,0]"));
}

TEST(Safetensors, bug_litert_9254_wrapped_size_with_a_payload) {
    expect_bad("fewer than 2^63 bits", one("F32", "[4294967296,4294967297]", "[0,16]"), 16);
    // A zero among the sizes does not excuse the others: strides would wrap.
    expect_bad("fewer than 2^63 bits", one("F32", "[0,4294967296,4294967296]", "[0,0]"));
    expect_bad("fewer than 2^63 bits", one("F32", "[4294967296,4294967296,0]", "[0,0]"));
}

TEST(Safetensors, bug_fastllm_712_buffer_from_shape_length_from_offsets) {
    expect_bad("expected 4 bytes for [1] of F32", one("F32", "[1]", "[0,64]"), 64);
    expect_bad("expected 400 bytes for [100] of F32", one("F32", "[100]", "[0,64]"), 64);
}

TEST(Safetensors, bug_fastllm_712_header_length_wraps) {
    expect_bad("expected a header of at most", to_bytes(little_endian(~std::uint64_t{0}, 8) + "{}"));
    expect_bad("expected a header of at most", to_bytes(little_endian(std::uint64_t{1} << 63, 8) + "{}"));
}

TEST(Safetensors, bug_mlx_4244_product_in_32_bits) {
    expect_bad("expected 17179869184 bytes", one("F32", "[65536,65536]", "[0,0]"));
    expect_bad("expected 4294967296 bytes", one("U8", "[4294967296]", "[0,0]"));
}

TEST(Safetensors, bug_llama_cpp_2025_53630_sum_of_sizes_wraps) {
    expect_bad("up to at most 0, got [0, 9223372036854775800]",
               R"({"a":{"dtype":"U8","shape":[9223372036854775800],"data_offsets":[0,9223372036854775800]},)"
               R"("b":{"dtype":"U8","shape":[9223372036854775800],"data_offsets":[9223372036854775800,1]}})");
}

TEST(Safetensors, bug_llama_cpp_2026_27940_bytes_of_a_tensor_wrap) {
    expect_bad("fewer than 2^63 bits", one("F64", "[1152921504606846977]", "[0,8]"), 8);
}

TEST(Safetensors, bug_llama_cpp_2026_33298_largest_sizes) {
    expect_bad("fewer than 2^63 bits", one("F32", "[9223372036854775807,9223372036854775807]", "[0,4]"), 4);
}

TEST(Safetensors, attack_overlap_as_a_memory_bomb) {
    std::string header = "{";
    for (int i = 0; i < 1000; ++i) {
        header += (i == 0 ? "\"" : ",\"") + std::to_string(i) + R"(":{"dtype":"F32","shape":[2],"data_offsets":[0,8]})";
    }
    expect_bad("expected data_offsets from 8", header + "}", 8);
}

TEST(Safetensors, the_writer_refuses_what_the_reader_would) {
    const float value = 1;
    const TensorView view = dense_view(&value, DType::fp32, {1});
    const auto expect_invalid = [](std::string_view words, const Named& tensors, const Metadata& metadata = {}) {
        expect_error(ErrorCode::invalid_argument, words, [&] { serialize_safetensors(tensors, metadata); });
    };
    expect_invalid("\"a\" twice", {{"a", view}, {"a", view}});
    expect_invalid("__metadata__", {{"__metadata__", view}});
    expect_invalid("at most 4096 bytes", {{std::string(4097, 'n'), view}});
    expect_invalid("UTF-8", {{"\xff", view}});
    expect_invalid("UTF-8", {{"a", view}}, {{"k", "\xff"}});
    expect_invalid("null pointer", {{"a", TensorView{}}});
    expect_invalid("host memory", {{"a", dense_view(&value, DType::fp32, {1}, {DeviceType::cuda, 0})}});
    expect_invalid("fewer than 2^60 bytes",
                   {{"a", strided_view(&value, DType::fp32, {std::int64_t{1} << 40, std::int64_t{1} << 40}, {0, 0})}});
    expect_invalid("at most 100000000 bytes", {{"a", view}}, {{"k", std::string(100'000'000, 'x')}});
}

}  // namespace
}  // namespace tessera::io::test::safetensors_test
