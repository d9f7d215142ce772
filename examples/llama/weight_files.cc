// SPDX-License-Identifier: Apache-2.0
#include "llama/weight_files.hpp"

#include <fmt/format.h>

#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>

#include "io/safetensors.hpp"
#include "llama/json_file.hpp"

namespace llama {
namespace {

using tessera::io::bad_data;
using tessera::io::printable;

constexpr std::uint64_t kMostBytesOfIndex = std::uint64_t{16} << 20;

/// The name of a file in an index. Paths would lead out of the folder.
std::string file_name(const nlohmann::json& value, const std::string& tensor, const std::string& index) {
    const std::string name = value.is_string() ? value.get<std::string>() : "";
    if (!name.ends_with(".safetensors") || name.find('/') != std::string::npos)
        bad_data(index, fmt::format("weight_map: expected the name of a .safetensors file in this folder for tensor "
                                    "{}, got {}",
                                    printable(tensor), printable(value.is_string() ? name : value.dump())));
    return name;
}

}  // namespace

WeightFiles::WeightFiles(const std::string& folder) {
    const std::string one = folder + "/model.safetensors", index = one + ".index.json";
    std::error_code none;
    if (!std::filesystem::exists(one, none) && std::filesystem::exists(index, none)) read_index(folder, index);
    else files_.push_back(tessera::io::read_safetensors(one));
}

void WeightFiles::read_index(const std::string& folder, const std::string& index) {
    const nlohmann::json json = read_json_file(index, kMostBytesOfIndex);
    if (!json.is_object() || !json.contains("weight_map") || !json["weight_map"].is_object() ||
        json["weight_map"].empty())
        bad_data(index, "expected an object whose weight_map has a file for each tensor");
    std::map<std::string, std::vector<std::string>> tensors_of;
    for (const auto& [tensor, file] : json["weight_map"].items())
        tensors_of[file_name(file, tensor, index)].push_back(tensor);
    for (const auto& [name, tensors] : tensors_of) {
        files_.push_back(tessera::io::read_safetensors(folder + "/" + name));
        const tessera::io::TensorFile& file = files_.back();
        for (const std::string& tensor : tensors)
            if (file.find(tensor) == nullptr)
                bad_data(file.origin(),
                         fmt::format("expected tensor {}, which {} says is here, got none", printable(tensor),
                                     std::filesystem::path(index).filename().string()));
        if (file.tensors().size() != tensors.size())
            bad_data(file.origin(),
                     fmt::format("expected the {} tensors of {}, got {}", tensors.size(),
                                 std::filesystem::path(index).filename().string(), file.tensors().size()));
    }
}

const tessera::io::TensorFile& WeightFiles::holder(const std::string& name) const {
    for (const tessera::io::TensorFile& file : files_)
        if (file.find(name) != nullptr) return file;
    return files_.front();
}

}  // namespace llama
