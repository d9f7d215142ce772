// SPDX-License-Identifier: Apache-2.0
#include "walk_numbers.hpp"

#include <algorithm>
#include <charconv>
#include <map>
#include <sstream>

#include "parse.hpp"
#include "tessera/error.hpp"

namespace tessera::cli {
namespace {

constexpr const char* kForm = "\"q 1 0, 0 1; k 1 1, 0 2; v 4 0, 0 4\", two whole numbers in a row";

std::vector<std::string> split_at(const std::string& text, char separator) {
    std::vector<std::string> parts;
    std::istringstream stream(text);
    for (std::string part; std::getline(stream, part, separator);) parts.push_back(part);
    return parts;
}

std::array<std::int64_t, walk::kHandDim> row_of(const std::string& option, const std::string& text) {
    std::array<std::int64_t, walk::kHandDim> row{};
    std::istringstream words(text);
    std::string word;
    for (std::int64_t& x : row) {
        if (!(words >> word)) unexpected(option, kForm, text);
        const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), x);
        if (error != std::errc() || end != word.data() + word.size()) unexpected(option, kForm, text);
    }
    if (words >> word) unexpected(option, kForm, text);
    return row;
}

std::map<std::string, walk::HandMatrix> matrices_of(const std::string& option, const std::string& text) {
    std::map<std::string, walk::HandMatrix> matrices;
    for (const std::string& part : split_at(text, ';')) {
        std::istringstream words(part);
        std::string name;
        words >> name;
        if (name != "q" && name != "k" && name != "v" && name != "do") unexpected(option, kForm, part);
        if (matrices.count(name) != 0) throw UsageError(option, "expected " + name + " once, got it twice");
        std::string rest;
        std::getline(words, rest);
        for (const std::string& row : split_at(rest, ',')) matrices[name].push_back(row_of(option, row));
    }
    for (const char* name : {"q", "k", "v"}) {
        if (matrices.count(name) == 0) throw UsageError(option, std::string("expected ") + kForm + ": no " + name);
    }
    return matrices;
}

}  // namespace

walk::HandExample hand_example(const std::string& numbers_option, const std::string& numbers,
                               const std::string& tile_option, const std::string& tile, bool backward) {
    walk::HandExample example;
    if (!numbers.empty()) {
        const auto given = matrices_of(numbers_option, numbers);
        example.q = given.at("q");
        example.k = given.at("k");
        example.v = given.at("v");
        const auto d_o = given.find("do");
        if (d_o != given.end() && !backward)
            throw UsageError(numbers_option, "do has no effect without --backward: expected with it");
        example.d_o = d_o != given.end() ? d_o->second : walk::HandMatrix(example.q.size(), {1, 0});
    }
    if (!tile.empty()) {
        const auto [block_q, block_kv] = parse_pair(tile_option, tile, ',');
        example.tile = {block_q, block_kv};
    }
    try {
        example.validate();
    } catch (const Error& error) {
        if (error.argument() == "tile") unexpected(tile_option, "1 or more of both", tile);
        throw UsageError(numbers_option, error.what());
    }
    return example;
}

}  // namespace tessera::cli
