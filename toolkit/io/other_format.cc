// SPDX-License-Identifier: Apache-2.0
#include "io/other_format.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <string_view>
#include <system_error>
#include <vector>

#include "io/tensor_file.hpp"

namespace tessera::io {
namespace {

using namespace std::string_view_literals;

constexpr const char* kTorchCure =
    "load it in Python (torch.load with weights_only=True) and write its tensors with safetensors.torch.save_file";
constexpr const char* kUnpack = "unpack it, and give the file that is in it";

struct Magic {
    std::string_view bytes;
    std::string_view what;
    std::string_view cure;
};

/// The formats that begin with fixed bytes.
constexpr Magic kMagics[] = {
    {"\x93NUMPY"sv, "a .npy file of NumPy", "give q, k and v as three .npy files whose names end in .npy"},
    {"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19"sv, "a file of torch.save (a pickle, not a zip)",
     kTorchCure},
    {"\x80\x02"sv, "a pickle of Python", "load it where it comes from, if you trust it, and write safetensors or .npy"},
    {"\x80\x03"sv, "a pickle of Python", "load it where it comes from, if you trust it, and write safetensors or .npy"},
    {"\x80\x04"sv, "a pickle of Python", "load it where it comes from, if you trust it, and write safetensors or .npy"},
    {"\x80\x05"sv, "a pickle of Python", "load it where it comes from, if you trust it, and write safetensors or .npy"},
    {"GGUF"sv, "a GGUF file of llama.cpp: weights, mostly quantised",
     "it has no q, k and v; take the activations from a run of the model"},
    {"lmgg"sv, "a GGML file of llama.cpp: weights", "take the activations from a run of the model"},
    {"tjgg"sv, "a GGML file of llama.cpp: weights", "take the activations from a run of the model"},
    {"\x89HDF\r\n\x1a\n"sv, "an HDF5 file (.h5, Keras)", "read it with h5py and write the tensors as safetensors"},
    {"\x1f\x8b"sv, "compressed by gzip", kUnpack},
    {"\x28\xb5\x2f\xfd"sv, "compressed by zstd", kUnpack},
    {"BZh"sv, "compressed by bzip2", kUnpack},
    {"\xfd"
     "7zXZ\0"sv,
     "compressed by xz", kUnpack},
    {"7z\xbc\xaf\x27\x1c"sv, "a 7z archive", kUnpack},
    {"MATLAB 5.0"sv, "a file of MATLAB (.mat)", "read it with scipy.io.loadmat and write the arrays as .npy"},
    {"PAR1"sv, "a Parquet table", "read its columns and write the arrays as .npy"},
    {"ARROW1\0\0"sv, "an Arrow or Feather table", "read its columns and write the arrays as .npy"},
    {"SQLite format 3\0"sv, "an SQLite database", "a profile of Nsight Systems belongs to tessera which"},
    {"version https://git-lfs"sv, "a pointer of git-lfs in place of the file", "git lfs pull fetches the file itself"},
    {"%PDF"sv, "a PDF document", "give a .safetensors file or .npy files"},
    {"\x89PNG"sv, "a PNG picture", "give a .safetensors file or .npy files"},
    {"\x7f"
     "ELF"sv,
     "a program or a library (ELF)", "give a .safetensors file or .npy files"},
};

/// The first bytes of a file, at most 64 KiB.
std::string head_of(const ByteSource& source) {
    constexpr std::uint64_t kHead = 64 * 1024;
    std::string head(std::min(source.size(), kHead), '\0');
    source.read(0, std::as_writable_bytes(std::span(head)));
    return head;
}

OtherFormat found(std::string_view what, std::string_view cure) { return {std::string(what), std::string(cure)}; }

/// A zip archive by the name of its first entry: torch.save and numpy.savez write such archives.
OtherFormat zip_format(std::string_view head) {
    constexpr std::size_t kNameLength = 26, kName = 30;  // offsets in a local file header
    std::string_view name;
    if (head.size() > kName) {
        std::uint16_t length = 0;
        std::memcpy(&length, head.data() + kNameLength, sizeof length);
        name = head.substr(kName, length);
    }
    if (name.ends_with("/data.pkl") || name.ends_with("/version") || name.ends_with("/byteorder"))
        return found("a zip archive of torch.save (.pt, .pth, .bin)", kTorchCure);
    if (name.ends_with(".npy"))
        return found("a zip archive of numpy.savez (.npz)",
                     "write each array with numpy.save, or all with safetensors.numpy.save_file");
    return found(name.empty() ? "a zip archive" : fmt::format("a zip archive that begins with {}", printable(name)),
                 kUnpack);
}

/// The first string that ends in ".safetensors" or ".bin" after "weight_map" in an index.
std::string first_shard(std::string_view head) {
    for (std::size_t at = head.find("\"weight_map\""); at != std::string_view::npos; at = head.find('"', at + 1)) {
        const std::size_t end = head.find('"', at + 1);
        if (end == std::string_view::npos) break;
        const std::string_view text = head.substr(at + 1, end - at - 1);
        if (text.ends_with(".safetensors") || text.ends_with(".bin")) return printable(text);
    }
    return "";
}

/// Follows a JSON text without keeping it, and remembers where its syntax breaks.
struct JsonSyntax final : nlohmann::json_sax<nlohmann::json> {
    std::size_t broken_at = 0;

    bool null() override { return true; }
    bool boolean(bool) override { return true; }
    bool number_integer(std::int64_t) override { return true; }
    bool number_unsigned(std::uint64_t) override { return true; }
    bool number_float(double, const std::string&) override { return true; }
    bool string(std::string&) override { return true; }
    bool binary(nlohmann::json::binary_t&) override { return true; }
    bool start_object(std::size_t) override { return true; }
    bool key(std::string&) override { return true; }
    bool end_object() override { return true; }
    bool start_array(std::size_t) override { return true; }
    bool end_array() override { return true; }
    bool parse_error(std::size_t position, const std::string&, const nlohmann::json::exception&) override {
        broken_at = position;
        return false;
    }
};

/// The byte at which JSON text has an error, counted from 1; nothing for valid JSON, and for files that are too large
/// to look through.
std::optional<std::size_t> json_error(const ByteSource& source) {
    constexpr std::uint64_t kMost = std::uint64_t{64} << 20;
    if (source.size() > kMost) return std::nullopt;
    std::string text(source.size(), '\0');
    source.read(0, std::as_writable_bytes(std::span(text)));
    JsonSyntax syntax;
    if (nlohmann::json::sax_parse(text, &syntax)) return std::nullopt;
    return syntax.broken_at;
}

OtherFormat json_format(std::string_view head, const ByteSource& source) {
    if (const auto error = json_error(source))
        return found(fmt::format("text that begins like JSON and has an error at byte {}", *error),
                     "repair it, or write or download it again");
    if (head.find("\"weight_map\"") != std::string_view::npos) {
        const std::string shard = first_shard(head);
        return found("the index of a model in several files, without tensors",
                     fmt::format("give one of the files that it names{}{}", shard.empty() ? "" : ", such as ", shard));
    }
    if (head.find("\"model_type\"") != std::string_view::npos ||
        head.find("\"architectures\"") != std::string_view::npos)
        return found("the config.json of a model, without tensors",
                     "tessera roofline --model takes it; for tensors give a .safetensors file");
    return found("JSON text", "give a .safetensors file or .npy files");
}

/// True for text: no control characters, and ASCII at its start.
bool is_text(std::string_view head) {
    constexpr std::size_t kAscii = 16;
    const auto is_control = [](char c) {
        const auto byte = static_cast<unsigned char>(c);
        return byte < ' ' && byte != '\n' && byte != '\r' && byte != '\t';
    };
    const auto is_ascii = [](char c) { return static_cast<unsigned char>(c) < 0x7f; };
    const std::string_view start = head.substr(0, kAscii);
    return std::all_of(start.begin(), start.end(), is_ascii) && std::none_of(head.begin(), head.end(), is_control);
}

OtherFormat text_format(std::string_view head) {
    constexpr std::size_t kStart = 512, kShown = 40;
    std::string lower(head.substr(0, kStart));
    for (char& c : lower) c = c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
    if (lower.find("<!doctype html") != std::string::npos || lower.find("<html") != std::string::npos)
        return found("a web page, so the download failed",
                     "download the file itself (on Hugging Face: /resolve/ instead of /blob/ in the address, and a "
                     "token for a gated model)");
    if (lower.starts_with("<?xml")) return found("XML text, perhaps the error of a server", "download it again");
    if (lower.starts_with("entry not found") || lower.starts_with("invalid username") ||
        lower.starts_with("access to model"))
        return found(fmt::format("the error of a server ({})", printable(head.substr(0, kShown))),
                     "check the address and the token, and download it again");
    return found(fmt::format("text that begins with {}", printable(head.substr(0, kShown))),
                 "give a .safetensors file or .npy files");
}

/// ONNX is a protobuf message whose first field is ir_version, a small number, and whose second is a text
/// (producer_name) or the graph.
bool is_onnx(std::string_view head) {
    constexpr std::size_t kLeast = 4;
    constexpr unsigned char kIrVersion = 0x08, kProducer = 0x12, kGraph = 0x3a, kMostVersion = 32;
    if (head.size() < kLeast) return false;
    const auto byte = [&](std::size_t at) { return static_cast<unsigned char>(head[at]); };
    return byte(0) == kIrVersion && byte(1) >= 1 && byte(1) <= kMostVersion &&
           (byte(2) == kProducer || byte(2) == kGraph);
}

bool is_tar(std::string_view head) {
    constexpr std::size_t kMagicAt = 257;
    return head.size() > kMagicAt && head.substr(kMagicAt).starts_with("ustar");
}

bool is_safetensors(std::string_view head) {
    constexpr std::size_t kLength = 8;
    constexpr std::uint64_t kMost = 100'000'000;
    if (head.size() <= kLength || head[kLength] != '{') return false;
    std::uint64_t length = 0;
    std::memcpy(&length, head.data(), kLength);
    return length <= kMost;
}

}  // namespace

OtherFormat other_format(const ByteSource& source) {
    const std::string head = head_of(source);
    if (head.empty()) return found("an empty file", "write or download it again");
    constexpr std::size_t kManyZeros = 64;
    if (head.size() >= kManyZeros && std::all_of(head.begin(), head.end(), [](char c) { return c == '\0'; }))
        return found("a file that begins with zeros only, so a write or a download was broken off",
                     "write or download it again");
    if (head.starts_with("PK\3\4") || head.starts_with("PK\5\6")) return zip_format(head);
    for (const Magic& magic : kMagics)
        if (head.starts_with(magic.bytes)) return found(magic.what, magic.cure);
    if (head.substr(0, 8).ends_with("TFL3"))
        return found("a TensorFlow Lite model", "give a .safetensors file or .npy files");
    if (is_tar(head)) return found("a tar archive", kUnpack);
    if (is_onnx(head))
        return found("an ONNX model", "it has no q, k and v; take them from a run, and write safetensors or .npy");
    if (is_safetensors(head)) return found("a .safetensors file", "give it alone, as one file with q, k and v");
    const std::size_t first = head.find_first_not_of(" \t\r\n");
    if (!is_text(head)) return {};
    if (first != std::string::npos && (head[first] == '{' || head[first] == '[')) return json_format(head, source);
    return text_format(head);
}

std::string not_wanted_text(const ByteSource& source, const std::string& wanted, const std::string& otherwise) {
    const OtherFormat format = other_format(source);
    return format.what.empty() ? otherwise : fmt::format("expected {}, it is {}: {}", wanted, format.what, format.cure);
}

std::string folder_text(const std::string& path) {
    constexpr std::size_t kMost = 3;
    std::vector<std::string> files;
    std::error_code failure;
    for (auto at = std::filesystem::directory_iterator(path, failure);
         !failure && at != std::filesystem::directory_iterator(); at.increment(failure)) {
        const std::string name = at->path().filename().string();
        if (name.ends_with(".safetensors") || name.ends_with(".npy")) files.push_back(name);
    }
    if (files.empty()) return "";
    std::sort(files.begin(), files.end());
    std::string text;
    for (std::size_t i = 0; i < std::min(files.size(), kMost); ++i) text += (i == 0 ? "" : ", ") + printable(files[i]);
    return fmt::format("; it has {}{}", text, files.size() > kMost ? ", ..." : "");
}

}  // namespace tessera::io
