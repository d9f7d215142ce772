// SPDX-License-Identifier: Apache-2.0
//
// Splits a kernel's name into words. For a kernel that is in no table, the words that its author chose are the only
// evidence.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "diagnose/name.hpp"

namespace tessera::diagnose {

/// The function of a kernel's name. It drops namespaces, arguments, ".kd", the choices that AOTriton appends
/// ("-Sig-F__..."), the signature that older releases of Triton append ("_0d1d2d3de"), and the types that CuTe DSL
/// appends.
std::string_view function_of(std::string_view name);

/// Splits in lower case, without digits: "BatchPrefillWithPagedKVCache_v2" is batch, prefill, with, paged, kv, cache,
/// v.
std::vector<std::string> words_of(std::string_view identifier);

/// The evidence about attention in a name's words. `role` is unknown if they do not mention it.
struct WordReading {
    Role role = Role::unknown;
    KernelPass pass = KernelPass::unknown;
    std::string found{};  ///< the word that supports the reading
};

WordReading read_words(const std::vector<std::string>& words);

/// True if the words name the work of a helper kernel: "combine", "preprocess", "metadata".
bool mentions_helper(const std::vector<std::string>& words);

/// True if the words mention the cache of keys and values.
bool mentions_cache(const std::vector<std::string>& words);

/// True if the words mention pages or a phase of serving, so that other words may mean attention too.
bool mentions_serving(const std::vector<std::string>& words);

/// The word for moving or listing queries, keys, values or pages of a cache; "" if there is none or the words mention
/// attention.
std::string cache_word(const std::vector<std::string>& words);

}  // namespace tessera::diagnose
