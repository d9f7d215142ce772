// SPDX-License-Identifier: Apache-2.0
//
// Reads the input files of `tessera run`: tensors found by name, in canonical layout and the dtype to compute in.
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

/// The input files and the names of the tensors in them.
struct InputOptions {
    std::vector<std::string> files;
    std::map<std::string, std::string> names;  ///< role ("q", "bias", ...) to name, for the options that were given
    std::string layout = "bshd";
    std::string dtype = "keep";

    /// `required`: a file must be given.
    void declare(CLI::App& command, bool required = true);

    /// Throws UsageError if a tensor was named but no file was given.
    void expect_no_names() const;
};

/// The tensors that were read. Views point into `files` and `owned`.
struct Inputs {
    std::vector<io::TensorFile> files;
    std::vector<OwnedTensor> owned;  ///< tensors that were converted to another dtype
    FileLayout layout;
    Problem problem;       ///< shapes, dtype, raggedness, optional tensors; the caller sets the score options
    BackwardArgs tensors;  ///< the inputs, canonical; d_o and dlse for the backward only
    ForwardArgs cache{};   ///< of a cache of keys: the tensors that only a forward has
    std::map<std::string, std::string> metadata;

    /// The inputs of a forward.
    ForwardArgs forward_args() const;
    /// Returns "qkv.safetensors", or the files' names with commas.
    std::string origin() const;
};

/// Reads and checks everything that `tessera run` needs; `backward` includes d_o. Throws Error(bad_data) for files that
/// do not hold the inputs of attention, UsageError for options that conflict.
Inputs read_inputs(const InputOptions& options, bool backward);

/// Rethrows an error about a tensor as one about the files, and one about an option as one about the command line.
[[noreturn]] void rethrow_for_files(const Error& error, const Inputs& inputs);

/// Validates the Problem. Sizes come from the files here, so that an error in them is bad data instead of bad usage.
void validate_problem_of(const Inputs& inputs);

/// Throws UsageError if `output` is one of the input files, under any name.
void expect_other_file(const std::string& output, const std::vector<std::string>& inputs);

}  // namespace tessera::cli
