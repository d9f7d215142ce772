// SPDX-License-Identifier: Apache-2.0
#include "io/other_format.hpp"

#include <gtest/gtest.h>

#include "io/npy.hpp"
#include "io/safetensors.hpp"
#include "io_test_util.hpp"

namespace tessera::io::test::other_format_test {
namespace {

/// Bytes of a file, and what both readers say about it: its format, and what to do.
struct Case {
    std::string bytes;
    std::string what;
    std::string cure;
};

/// The start of a zip archive whose first entry has this name.
std::string zip(const std::string& name) {
    return "PK\3\4" + std::string(22, '\0') + little_endian(name.size(), 2) + little_endian(0, 2) + name + "content";
}

const std::string kRest(200, '\7');

const Case kCases[] = {
    {zip("archive/data.pkl"), "a zip archive of torch.save", "safetensors.torch.save_file"},
    {zip("pytorch_model/data.pkl"), "a zip archive of torch.save", "safetensors.torch.save_file"},
    {zip("q.npy"), "numpy.savez (.npz)", "numpy.save"},
    {zip("word/document.xml"), "a zip archive that begins with \"word/document.xml\"", "unpack"},
    {"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19" + kRest, "torch.save", "torch.load"},
    {"\x80\x04\x95" + kRest, "a pickle of Python", "if you trust it"},
    {"GGUF\3" + kRest, "GGUF", "activations"},
    {"\x89HDF\r\n\x1a\n" + kRest, "HDF5", "h5py"},
    {"\x1f\x8b\x08" + kRest, "gzip", "unpack"},
    {"\x28\xb5\x2f\xfd" + kRest, "zstd", "unpack"},
    {std::string("\x08\x08\x12\x07pytorch\x1a\x05", 14) + kRest, "ONNX", "take them from a run"},
    {std::string("\x1c\0\0\0TFL3", 8) + kRest, "TensorFlow Lite", ".npy"},
    {std::string(257, 'a') + "ustar" + kRest, "tar", "unpack"},
    {"<!DOCTYPE html>\n<html><head><title>Log in</title>", "a web page", "/resolve/"},
    {"<html lang=\"en\">", "a web page", "download the file itself"},
    {"Entry not found", "the error of a server", "download it again"},
    {"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "git-lfs", "git lfs pull"},
    {R"({"metadata": {"total_size": 9}, "weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}})",
     "the index of a model", "such as \"model-00001-of-00002.safetensors\""},
    {R"({"architectures": ["LlamaForCausalLM"], "model_type": "llama"})", "the config.json of a model", "--model"},
    {R"(  [1, 2, 3])", "JSON text", ".safetensors"},
    {"[[[[", "text that begins like JSON and has an error at byte 5", "repair it"},
    {R"({"model_type": "llama",)", "text that begins like JSON and has an error at byte 24", "repair it"},
    {"q,k,v\n1,2,3\n", "text that begins with \"q,k,v", ".npy"},
    {"", "an empty file", "again"},
    {std::string(4096, '\0'), "zeros only", "again"},
};

TEST(OtherFormat, both_readers_name_it_and_say_what_to_do) {
    for (const Case& one : kCases) {
        SCOPED_TRACE(one.what);
        for (const std::string& words : {one.what, one.cure}) {
            expect_error(ErrorCode::bad_data, words, [&] { parse_safetensors(to_bytes(one.bytes)); });
            expect_error(ErrorCode::bad_data, words, [&] { parse_npy(to_bytes(one.bytes)); });
        }
    }
}

TEST(OtherFormat, each_reader_names_the_format_of_the_other) {
    const float value = 1;
    const TensorView view = dense_view(&value, DType::fp32, {1});
    const std::pair<std::string, TensorView> named[] = {{"q", view}};
    expect_error(ErrorCode::bad_data, "expected a .safetensors file, it is a .npy file",
                 [&] { parse_safetensors(serialize_npy(view)); });
    expect_error(ErrorCode::bad_data, "expected a .npy file, it is a .safetensors file",
                 [&] { parse_npy(serialize_safetensors(named)); });
}

TEST(OtherFormat, an_unknown_format_has_no_name) {
    const Bytes bytes = to_bytes("\1\2\3\4\5\6\7\x10\x11\xff\xfe unknown");
    EXPECT_EQ(other_format(MemorySource(bytes, "x")).what, "");
    expect_error(ErrorCode::bad_data, "expected a header of at most", [&] { parse_safetensors(bytes); });
}

// The length of this header is 0x04034b50, the first bytes of a zip archive.
TEST(OtherFormat, a_valid_file_is_read_whatever_its_first_bytes) {
    std::string header = "{}";
    header.resize(0x04034b50, ' ');
    EXPECT_TRUE(parse_safetensors(to_bytes(little_endian(header.size(), 8) + header)).tensors().empty());
}

TEST(OtherFormat, a_hostile_file_cannot_steer_the_terminal) {
    const OtherFormat format = other_format(MemorySource(to_bytes(zip("\x1b[2J.npy\x1b.x")), "x"));
    EXPECT_EQ(format.what.find('\x1b'), std::string::npos) << format.what;
}

TEST(OtherFormat, a_folder_is_told_with_its_files) {
    const Folder folder;
    for (const char* name : {"b.safetensors", "a.safetensors", "notes.txt", "c.npy", "d.npy"})
        put_file(folder.file(name), "");
    expect_error(ErrorCode::cannot_open,
                 "it is a directory; it has \"a.safetensors\", \"b.safetensors\", \"c.npy\", ...",
                 [&] { read_safetensors(folder.path()); });
}

}  // namespace
}  // namespace tessera::io::test::other_format_test
