// SPDX-License-Identifier: Apache-2.0
//
// The options that describe one call of attention in PyTorch's terms, for use without a trace.
#pragma once

#include <CLI/CLI.hpp>
#include <optional>
#include <string>
#include <utility>

#include "diagnose/call.hpp"

namespace tessera::cli {

struct CallOptions {
    std::string torch;
    std::string gpu;
    std::string shape;
    // The shape in the words of the other commands, in place of `shape`.
    std::string batch;
    std::string heads;
    std::string len;
    std::string len_q;
    std::string len_kv;
    std::string head_dim;
    std::string dtype;
    std::string mask;
    std::string dropout;
    std::string cudnn;
    std::string cuda;
    std::string off;
    bool grad = false;
    bool gqa = false;
    bool deterministic = false;

    void declare(CLI::App& command);

    /// Returns the first of these options that was given, such as "--torch"; empty: none.
    std::string first_given() const;
    bool given() const { return !first_given().empty(); }

    /// Returns the first given option of those that `--shape` stands for, such as "--len", and its text; empty: none.
    std::pair<std::string, std::string> first_size() const;

    /// Returns the call; options that were not given are unknown. Throws UsageError.
    diagnose::Call call() const;
};

}  // namespace tessera::cli
