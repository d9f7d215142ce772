// SPDX-License-Identifier: Apache-2.0
//
// The input files of `tessera run`: tensors found by name, viewed in the canonical layout, in the dtype of the
// computation.
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

/// The input files, and the names of the tensors in them.
struct InputOptions {
    std::vector<std::string> files;
    std::map<std::string, std::string> names;  ///< role ("q", "bias", ...) to name, for the options that were given
    std::string layout = "bshd";
    std::string dtype = "keep";

    /// If `required`, a file must be given.
    void declare(CLI::App& command, bool required = true);

    /// Throws UsageError if a tensor was named but no file was given.
    void expect_no_names() const;
};

/// The tensors that were read. Views point into `files` and `owned`.
struct Inputs {
    std::vector<io::TensorFile> files;
    std::vector<OwnedTensor> owned;  ///< tensors converted to another dtype
    FileLayout layout;
    Problem problem;       ///< shapes, dtype, raggedness, optional tensors; the caller sets the scores' options
    BackwardArgs tensors;  ///< the inputs, canonical; d_o and dlse for the backward only
    std::map<std::string, std::string> metadata;

    /// "qkv.safetensors", or the files' names with commas.
    std::string origin() const;
};

/// Reads and checks everything that `tessera run` needs; with `backward`, d_o too. Throws Error(bad_data) for files
/// with unsuitable tensors, and UsageError for options that exclude each other.
Inputs read_inputs(const InputOptions& options, bool backward);

/// Rethrows an error: one about a tensor becomes an error about the files, one about an option about the command line.
[[noreturn]] void rethrow_for_files(const Error& error, const Inputs& inputs);

/// Validates the Problem. Its sizes come from the files, so an error in them is bad data, not bad usage.
void validate_problem_of(const Inputs& inputs);

/// Throws UsageError if `output` is one of the input files, also under another path.
void expect_other_file(const std::string& output, const std::vector<std::string>& inputs);

}  // namespace tessera::cli
