// SPDX-License-Identifier: Apache-2.0
//
// The input files of `tessera run`: tensors found by name, seen in the canonical layout, in the dtype to compute in.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "io/tensor_file.hpp"
#include "options.hpp"
#include "tensors.hpp"
#include "tessera/attention.hpp"
#include "tessera/error.hpp"

namespace tessera::cli {

/// Which files, and what the tensors in them are called.
struct InputOptions {
    std::vector<std::string> files;
    std::map<std::string, std::string> names;  ///< role ("q", "bias", ...) to name, for the options that were given
    std::string layout = "bshd";
    std::string dtype = "keep";

    /// `required`: a file must be given.
    void declare(CLI::App& command, bool required = true);

    /// Throws UsageError when a tensor was named, though there is no file to have it.
    void expect_no_names() const;
};

/// The tensors that were read. Views point into `files` and `owned`.
struct Inputs {
    std::vector<io::TensorFile> files;
    std::vector<OwnedTensor> owned;  ///< tensors that had to change dtype
    FileLayout layout;
    Problem problem;       ///< shapes, dtype, raggedness, optional tensors; the scores are the caller's to set
    BackwardArgs tensors;  ///< the inputs, canonical; d_o and dlse for the backward only
    std::map<std::string, std::string> metadata;

    /// "qkv.safetensors", or the files' names with commas.
    std::string origin() const;
};

/// Reads and judges everything that `tessera run` needs; `backward`: d_o too. Throws Error(bad_data) for files that
/// don't hold what attention takes, UsageError for options that don't go together.
Inputs read_inputs(const InputOptions& options, bool backward);

/// An error about the tensors is one about the files; one about an option is about the command line.
[[noreturn]] void rethrow_for_files(const Error& error, const Inputs& inputs);

/// Sizes come from the files here, so that what is wrong with them is bad data and not bad usage.
void validate_problem_of(const Inputs& inputs);

/// Throws UsageError when `output` is one of the input files, under whatever name.
void expect_other_file(const std::string& output, const std::vector<std::string>& inputs);

}  // namespace tessera::cli
