// SPDX-License-Identifier: Apache-2.0
#include "io/npy.hpp"

#include <gtest/gtest.h>

#include <cstring>

#include "io_test_util.hpp"

namespace tessera::io::test::npy_test {
namespace {

constexpr NpyOptions kBf16{.bf16 = true};

Bytes file_of(const std::string& header, std::size_t payload = 0, int version = 1) {
    return to_bytes("\x93NUMPY" + std::string(1, static_cast<char>(version)) + '\0' +
                    little_endian(header.size(), version == 1 ? 2 : 4) + header + counting(payload));
}

std::string dict(const std::string& descr, const std::string& shape, const std::string& fortran = "False") {
    return "{'descr': '" + descr + "', 'fortran_order': " + fortran + ", 'shape': " + shape + ", }          \n";
}

void expect_bad(std::string_view words, const Bytes& bytes) {
    expect_error(ErrorCode::bad_data, words, [&] { parse_npy(bytes); });
}

void expect_bad(std::string_view words, const std::string& header, std::size_t payload = 0) {
    expect_bad(words, file_of(header, payload));
}

template <class T>
std::vector<T> elements(const TensorView& view) {
    const TensorFile file = parse_npy(serialize_npy(view), kBf16);
    std::vector<T> values(static_cast<std::size_t>(view.size()));
    std::memcpy(values.data(), file.bytes(file.tensors()[0]).data(), values.size() * sizeof(T));
    return values;
}

TEST(Npy, round_trip_of_every_dtype) {
    alignas(8) const std::uint8_t raw[24] = {1, 0, 0xa0, 0x7f, 0, 0, 0x80, 0xff, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 1, 2, 3};
    for (const DType dtype : {DType::fp64, DType::fp32, DType::fp16, DType::bf16, DType::int32, DType::int64}) {
        const TensorView view = dense_view(raw, dtype, {1, 3, 1});
        const TensorFile file = parse_npy(serialize_npy(view), kBf16, "some/where/q.npy");
        EXPECT_EQ(file.tensors()[0].name, "q");
        EXPECT_EQ(file.view("q").describe(), view.describe());
        EXPECT_EQ(std::memcmp(file.view("q").data, raw, static_cast<std::size_t>(3 * size_of(dtype))), 0);
    }
}

TEST(Npy, writes_what_numpy_writes) {
    const float values[2] = {1, 2};
    const Bytes bytes = serialize_npy(dense_view(values, DType::fp32, {2}));
    const std::string text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    const std::string expected = "{'descr': '<f4', 'fortran_order': False, 'shape': (2,), }";
    EXPECT_EQ(text.substr(0, 10), std::string("\x93NUMPY\1\0\x76\0", 10));
    EXPECT_EQ(text.substr(10, expected.size()), expected);
    EXPECT_EQ(text.substr(10 + expected.size(), 128 - 10 - expected.size()),
              std::string(117 - expected.size(), ' ') + "\n");
    EXPECT_EQ(bytes.size(), 128U + 8U);
}

TEST(Npy, files_scalars_and_zero_sizes) {
    const Folder folder;
    double value = 2.5;
    write_npy(folder.file("scalar.npy"), TensorView{.data = &value, .dtype = DType::fp64});
    const TensorFile scalar = read_npy(folder.file("scalar.npy"));
    EXPECT_TRUE(scalar.tensors()[0].shape.empty());
    EXPECT_EQ(*scalar.view("scalar").at<double>(0), 2.5);
    write_npy(folder.file("empty.npy"), dense_view(nullptr, DType::fp16, {3, 0}));
    EXPECT_EQ(read_npy(folder.file("empty.npy")).view("empty").describe(), "fp16 [3, 0] strides [1, 1]");
    EXPECT_EQ(folder.names().size(), 2U);
}

TEST(Npy, strided_views_are_written_in_c_order) {
    const std::vector<std::int32_t> values{0, 1, 2, 3, 4, 5};
    const TensorView dense = dense_view(values.data(), DType::int32, {2, 3});
    EXPECT_EQ(elements<std::int32_t>(transposed(dense, 0, 1)), (std::vector<std::int32_t>{0, 3, 1, 4, 2, 5}));
    const TensorView backward = strided_view(values.data() + 5, DType::int32, {2, 3}, {-3, -1});
    EXPECT_EQ(elements<std::int32_t>(backward), (std::vector<std::int32_t>{5, 4, 3, 2, 1, 0}));
    EXPECT_EQ(elements<std::int32_t>(strided_view(values.data() + 1, DType::int32, {3}, {0})),
              (std::vector<std::int32_t>{1, 1, 1}));
}

TEST(Npy, bf16_needs_the_option) {
    for (const char* descr : {"|V2", "<V2", "<u2"}) {
        const Bytes bytes = file_of(dict(descr, "(2,)"), 4);
        expect_bad("may be bf16", bytes);
        EXPECT_EQ(parse_npy(bytes, kBf16).view("array").dtype, DType::bf16);
    }
    EXPECT_EQ(parse_npy(file_of(dict("<f2", "(2,)"), 4), kBf16).view("array").dtype, DType::fp16);
}

TEST(Npy, bytes_are_read_but_not_viewed) {
    for (const char* descr : {"|u1", "|i1"}) {
        const TensorFile file = parse_npy(file_of(dict(descr, "(5,)"), 5));
        EXPECT_EQ(file.bytes(file.tensors()[0]).size(), 5U);
        expect_error(ErrorCode::bad_data, descr, [&] { file.view("array"); });
    }
    const TensorFile deep = parse_npy(file_of(dict("<f4", "(1, 1, 1, 1, 1)"), 4));
    expect_error(ErrorCode::bad_data, "rank <= 4", [&] { deep.view("array"); });
}

TEST(Npy, big_endian_data_is_swapped) {
    const auto read = [](const std::string& descr, const std::string& payload) {
        return parse_npy(to_bytes("\x93NUMPY\1" + std::string(1, '\0') + little_endian(dict(descr, "(2,)").size(), 2) +
                                  dict(descr, "(2,)") + payload),
                         kBf16);
    };
    const TensorFile singles = read(">f4", std::string("\x3f\x80\0\0\xc0\x20\0\0", 8));
    EXPECT_EQ(singles.tensors()[0].file_dtype, ">f4");
    EXPECT_EQ(*singles.view("array").at<float>(0), 1.0F);
    EXPECT_EQ(*singles.view("array").at<float>(1), -2.5F);
    EXPECT_EQ(*read(">f8", std::string("\x40\0\0\0\0\0\0\0\0\0\0\0\0\0\0\1", 16)).view("array").at<double>(0), 2.0);
    EXPECT_EQ(*read(">i8", std::string(15, '\0') + '\7').view("array").at<std::int64_t>(1), 7);
    const TensorFile bf16 = read(">u2", "\x3f\x80\x40\x20");
    EXPECT_EQ(bf16.view("array").dtype, DType::bf16);
    EXPECT_EQ(*bf16.view("array").at<std::uint16_t>(1), 0x4020);
    const TensorFile half = read(">f2", std::string("\x3c\0\x40\0", 4));
    EXPECT_EQ(*half.view("array").at<std::uint16_t>(0), 0x3c00);
}

TEST(Npy, python_2_writes_sizes_with_an_l) {
    EXPECT_EQ(parse_npy(file_of(dict("<f4", "(2L,)"), 8)).view("array").size(), 2);
    EXPECT_EQ(parse_npy(file_of(dict("<f4", "(1L, 2L)"), 8)).view("array").describe(), "fp32 [1, 2] strides [2, 1]");
}

TEST(Npy, versions_2_and_3_have_a_longer_length_field) {
    for (const int version : {1, 2, 3}) {
        EXPECT_EQ(parse_npy(file_of(dict("<f4", "(2,)"), 8, version)).view("array").size(), 2);
    }
}

TEST(Npy, the_grammar_takes_every_spelling_of_the_dict) {
    const auto parses = [](const std::string& header) {
        EXPECT_EQ(parse_npy(file_of(header, 8)).view("array").size(), 2) << header;
    };
    parses("{'descr':'<f4','fortran_order':False,'shape':(2,)}");
    parses(R"(  { "shape" : ( 2 , ) , "fortran_order" : True , "descr" : "<f4" , }  )");
    parses("{'shape': (1, 2), 'descr': '<f4', 'fortran_order': False}\n");
    parses("{'shape': (1, 2,), 'descr': '<f4', 'fortran_order': False}\n\n");
}

TEST(Npy, check_magic_and_version) {
    expect_bad("expected a .npy file, it is an empty file", Bytes{});
    expect_bad("magic", to_bytes("\x93NUMP"));
    expect_bad("expected a .npy file, it is a zip archive", to_bytes("PK\3\4 an npz archive"));
    for (const int version : {0, 4, 255})
        expect_bad("version 1.0, 2.0 or 3.0", file_of(dict("<f4", "(2,)"), 8, version));
    expect_bad("got 1.1", to_bytes(std::string("\x93NUMPY\1\1", 8) + "  "));
}

TEST(Npy, check_header_length) {
    expect_bad("at least 10 bytes, got 6", to_bytes("\x93NUMPY"));
    expect_bad("at least 10 bytes", to_bytes(std::string("\x93NUMPY\1\0\1", 9)));
    expect_bad("at least 12 bytes", to_bytes(std::string("\x93NUMPY\2\0\1\0\0", 11)));
    expect_bad("at most 3 bytes, got 65535", to_bytes(std::string("\x93NUMPY\1\0\xff\xff{  ", 13)));
    expect_bad("at most 65536 bytes, got 65537", file_of(std::string(65537, ' '), 0, 2));
    EXPECT_EQ(parse_npy(file_of(dict("<f4", "(2,)") + std::string(60000, ' '), 8)).view("array").size(), 2);
}

TEST(Npy, check_keys) {
    expect_bad("once each, got \"descr\"", "{'descr': '<f4', 'descr': '<f4', 'fortran_order': False, 'shape': (2,)}",
               8);
    expect_bad("once each, got \"x\"", "{'descr': '<f4', 'fortran_order': False, 'shape': (2,), 'x': 1}", 8);
    expect_bad("the keys descr, fortran_order and shape", "{'descr': '<f4', 'shape': (2,)}", 8);
    expect_bad("the keys descr, fortran_order and shape", "{}");
    expect_bad("spaces and a newline after the dict", dict("<f4", "(2,)") + "x", 8);
    expect_bad("expected '{'", "");
    expect_bad("expected ':'", "{'descr'}");
    expect_bad("expected ','", "{'descr': '<f4' 'shape': (2,)}");
    expect_bad("expected a string", "{, 'descr': '<f4'}");
    expect_bad("expected a string", "{descr: '<f4'}");
    expect_bad("True or False", "{'fortran_order': 1}");
    expect_bad("True or False", "{'fortran_order': 'False'}");
    expect_bad("without escapes", "{'descr': '\\x3cf4'}");
}

TEST(Npy, check_shape) {
    for (const char* shape : {"(2)",   "(,)",    "(2,,)",  "(2 2)",  "[2]",     "2",       "(2,",
                              "(-2,)", "(+2,)",  "(02,)",  "(2.0,)", "(2e0,)",  "(L,)",    "(2LL,)",
                              "(2l,)", "(0x2,)", "(2_0,)", "('2',)", "((2,),)", "(None,)", "(9223372036854775808,)"}) {
        expect_bad("header: expected", dict("<f4", shape), 8);
    }
    expect_bad("rank <= 8", dict("<f4", "(1, 1, 1, 1, 1, 1, 1, 1, 1)"), 4);
    expect_bad("header: expected", dict("<f4", std::string(60000, '(')), 4);
}

TEST(Npy, check_dtype) {
    for (const char* descr :
         {"", ">f3", "=f4", "f4", "<f16", "<c8", "|b1", "<U4", "|S4", "<M8[ns]", "|V4", "<f4 ", "<i2"}) {
        expect_bad("dtype: expected", dict(descr, "(2,)"), 8);
    }
    expect_bad("dtype: expected", dict(std::string("<f4\0", 4), "(2,)"), 8);
}

TEST(Npy, check_payload_size) {
    expect_bad("expected 16 bytes of data for [4] of <f4, got 12", dict("<f4", "(4,)"), 12);
    expect_bad("expected 16 bytes of data for [4] of <f4, got 17", dict("<f4", "(4,)"), 17);
    expect_bad("expected 0 bytes", dict("<f4", "(0,)"), 1);
    expect_bad("expected 4 bytes", dict("<f4", "()"));
}

// The failures of other readers; the numbers are those of their issue trackers.

TEST(Npy, bug_numpy_cve_2019_6446_pickled_objects) {
    expect_bad("got \"|O\"", dict("|O", "(1,)"), 20);
    expect_bad("expected a string", "{'descr': [('a', '|O')], 'fortran_order': False, 'shape': (1,)}", 20);
}

TEST(Npy, bug_numpy_literal_eval_of_a_hostile_header) {
    expect_bad("header: expected", dict("<f4", "(__import__('os').system('true'),)"), 4);
    expect_bad("header: expected", std::string(60000, '{'));
}

TEST(Npy, bug_numpy_header_limit_after_reading_the_header) {
    expect_bad("at most 0 bytes, got 4294967295", to_bytes(std::string("\x93NUMPY\2\0\xff\xff\xff\xff", 12)));
}

TEST(Npy, bug_numpy_80_bytes_allocate_32_gib) {
    expect_bad("expected 34359738368 bytes of data", dict("<f8", "(65536, 65536)"));
}

TEST(Npy, bug_cnpy_106_header_longer_than_the_file) {
    expect_bad("at most 2 bytes, got 118", to_bytes(std::string("\x93NUMPY\1\0\x76\0{}", 12)));
    expect_bad("expected a string", std::string("{"));
    expect_bad("end of this string", std::string("{'descr"));
}

TEST(Npy, bug_cnpy_version_2_header_read_as_version_1) {
    const TensorFile file = parse_npy(file_of(dict("<f4", "(2,)"), 8, 2));
    EXPECT_EQ(std::to_integer<int>(file.bytes(file.tensors()[0])[0]), 0);
    EXPECT_EQ(std::to_integer<int>(file.bytes(file.tensors()[0])[7]), 7);
}

TEST(Npy, bug_cnpy_fortran_order_ignored) {
    const TensorFile file = parse_npy(file_of(dict("<i4", "(2, 3, 4)", "True"), 96));
    const TensorView view = file.view("array");
    EXPECT_EQ(view.describe(), "int32 [2, 3, 4] strides [1, 2, 6]");
    const auto byte_at = [&](std::int64_t i, std::int64_t j, std::int64_t k) {
        return *view.at<std::int32_t>(i, j, k) & 0xff;
    };
    EXPECT_EQ(byte_at(1, 0, 0), 4);
    EXPECT_EQ(byte_at(0, 1, 0), 8);
    EXPECT_EQ(byte_at(1, 2, 3), 92);
    const TensorFile back = parse_npy(serialize_npy(view));
    EXPECT_EQ(back.view("array").describe(), "int32 [2, 3, 4] strides [12, 4, 1]");
    EXPECT_EQ(*back.view("array").at<std::int32_t>(1, 2, 3), *view.at<std::int32_t>(1, 2, 3));
}

TEST(Npy, bug_libnpy_44_twelve_bytes_allocate_4_gib) {
    expect_bad("expected a header of at most", to_bytes(std::string("\x93NUMPY\3\0\xff\xff\xff\xff", 12)));
}

TEST(Npy, bug_libnpy_44_product_wraps) {
    expect_bad("fewer than 2^60 bytes", dict("<f4", "(4294967296, 4294967296)"));
    expect_bad("fewer than 2^60 bytes", dict("<f8", "(2305843009213693953,)"), 8);
    expect_bad("fewer than 2^60 bytes", dict("<f4", "(0, 4294967296, 4294967296)"));
}

TEST(Npy, bug_openvino_6159_payload_longer_than_the_shape) {
    expect_bad("expected 4 bytes of data", dict("<f4", "(1,)"), 4096);
}

TEST(Npy, bug_stablehlo_2963_numbers_and_empty_descr) {
    expect_bad("below 2^63", dict("<f4", "(99999999999999999999999999,)"));
    expect_bad("non-negative integer", dict("<f4", "(x,)"));
    expect_bad("got \"\"", dict("", "(1,)"), 4);
    expect_bad("header: expected", std::string("'"));
}

TEST(Npy, bug_npy_rs_panic_on_truncation) {
    const Bytes whole = file_of(dict("<f4", "(2, 3)"), 24);
    for (std::size_t size = 0; size < whole.size(); ++size)
        expect_bad("", Bytes(whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(size)));
}

}  // namespace
}  // namespace tessera::io::test::npy_test
