// SPDX-License-Identifier: Apache-2.0
#include "input_names.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <string_view>

namespace tessera::cli {
namespace {

/// True if a shell takes the name as one word, and no command takes it for an option.
bool is_one_word(const std::string& name) {
    return !name.starts_with('-') && std::all_of(name.begin(), name.end(), [](char c) {
        return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') ||
               std::string_view("._/-").find(c) != std::string_view::npos;
    });
}

/// The one tensor that is probably `role`, by the last word of its name: "query", "layers.0.q". Else an empty text.
std::string likely_name(const io::TensorFile& file, const std::string& role) {
    const std::string word = role == "q" ? "query" : role == "k" ? "key" : "value";
    std::string likely;
    for (const io::NamedTensor& t : file.tensors()) {
        std::string last = t.name.substr(t.name.find_last_of("./") + 1);
        for (char& c : last) c = c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
        const bool is_role =
            last == role || last == "x" + role || last == word || last == role + "_states" || last == word + "_states";
        if (!is_role || !is_one_word(t.name)) continue;
        if (!likely.empty()) return "";
        likely = t.name;
    }
    return likely;
}

}  // namespace

std::string naming_text(const io::TensorFile& file, const std::map<std::string, std::string>& names) {
    const auto is_weight = [](const io::NamedTensor& t) { return t.name.ends_with(".weight"); };
    std::string options;
    bool all_likely = true;
    for (const char* role : {"q", "k", "v"}) {
        const auto named = names.find(role);
        if (file.find(named == names.end() ? role : named->second) != nullptr) continue;
        const std::string likely = likely_name(file, role);
        all_likely = all_likely && !likely.empty();
        options += fmt::format(" --{} {}", role, likely.empty() ? "NAME" : likely);
    }
    if (options.empty() || file.tensors().empty()) return "";
    if (!all_likely && std::any_of(file.tensors().begin(), file.tensors().end(), is_weight))
        return "; these are the weights of a model, and attention takes the q, k and v that are computed from them";
    return "; name the tensors by" + options;
}

}  // namespace tessera::cli
