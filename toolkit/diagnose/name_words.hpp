// SPDX-License-Identifier: Apache-2.0
//
// The words of a kernel's name. Of kernels that are in no table, words are all that can be read: who writes one says
// what it does.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "diagnose/name.hpp"

namespace tessera::diagnose {

/// The function of a kernel's name: without namespaces, arguments, ".kd", the choices that AOTriton
/// appends ("-Sig-F__..."), the signature that older releases of Triton
/// append ("_0d1d2d3de"), and the types that CuTe DSL appends.
std::string_view function_of(std::string_view name);

/// In lower case, without digits: "BatchPrefillWithPagedKVCache_v2" is batch, prefill, with, paged, kv, cache, v.
std::vector<std::string> words_of(std::string_view identifier);

/// What the words say about attention. `role` is unknown when they do not speak of it.
struct WordReading {
    Role role = Role::unknown;
    KernelPass pass = KernelPass::unknown;
    std::string found{};  ///< the word that says so
};

WordReading read_words(const std::vector<std::string>& words);

/// "combine", "preprocess", "metadata": what a small kernel beside an attention does.
bool speaks_of_help(const std::vector<std::string>& words);

/// They speak of the cache of keys and values.
bool speaks_of_cache(const std::vector<std::string>& words);

/// They speak of a phase of serving or of pages: what they then say besides may be of attention, too.
bool speaks_of_serving(const std::vector<std::string>& words);

/// They speak of moving or listing queries, keys, values or pages of a cache, and not of attention: the word for it,
/// else "".
std::string cache_word(const std::vector<std::string>& words);

}  // namespace tessera::diagnose
