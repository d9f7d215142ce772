// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "io/tensor_file.hpp"

namespace llama {

/// The tensors of a folder: those of model.safetensors, or, where there is none, those of the files that
/// model.safetensors.index.json names. An index and its files have to agree on every tensor.
class WeightFiles {
 public:
    /// Throws tessera::Error that names the file.
    explicit WeightFiles(const std::string& folder);

    const std::vector<tessera::io::TensorFile>& files() const { return files_; }
    /// The file of this tensor; the first one if there is none, whose view() throws.
    const tessera::io::TensorFile& holder(const std::string& name) const;

 private:
    void read_index(const std::string& folder, const std::string& index);

    std::vector<tessera::io::TensorFile> files_;
};

}  // namespace llama
