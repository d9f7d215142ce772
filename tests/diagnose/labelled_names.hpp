// SPDX-License-Identifier: Apache-2.0
//
// Names of kernels with the readings that are expected of them (names.tsv, names_public.tsv).
#pragma once

#include <fmt/format.h>

#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "diagnose/name.hpp"

namespace tessera::diagnose {

struct LabelledName {
    std::string set, family, pass, role;
    std::string exactness = "-";  ///< "-": not scored
    int arch = 0;
    int head_dim = 0;  ///< 0: not scored
    std::string source, name;
};

/// How differences() scores a pass "unknown" and an arch of 0: as a reading of their own, or as not scored.
enum class Unsaid { scored, not_scored };

/// The rows of a set of a file in tests/diagnose. Its first line begins with # and has the titles of the columns, which
/// may go on after the words that are known here.
inline std::vector<LabelledName> labelled_names(const std::string& file, const std::string& set) {
    std::ifstream stream(TESSERA_SOURCE_DIR "/tests/diagnose/" + file);
    const auto cells_of = [](const std::string& line) {
        std::vector<std::string> cells;
        std::istringstream text(line);
        for (std::string cell; std::getline(text, cell, '\t');) cells.push_back(cell);
        return cells;
    };
    const char* known[] = {"#set",         "family",   "pass",     "role", "exactness",
                           "compiled for", "head_dim", "found in", "name"};
    std::vector<std::string> titles;
    std::vector<LabelledName> rows;
    for (std::string line; std::getline(stream, line);) {
        if (titles.empty()) titles = cells_of(line);
        if (line.empty() || line[0] == '#') continue;
        std::map<std::string, std::string> cell;
        const std::vector<std::string> cells = cells_of(line);
        for (std::size_t i = 0; i < cells.size() && i < titles.size(); ++i)
            for (const char* title : known)
                if (titles[i].rfind(title, 0) == 0) cell[title] = cells[i];
        if (cell["#set"] != set) continue;
        LabelledName row{cell["#set"],     cell["family"], cell["pass"], cell["role"], {}, 0, 0,
                         cell["found in"], cell["name"]};
        row.exactness = cell.count("exactness") > 0 ? cell["exactness"] : "-";
        row.arch = std::stoi(cell["compiled for"]);
        row.head_dim = std::stoi(cell["head_dim"]);
        rows.push_back(row);
    }
    return rows;
}

/// The fields that a reading has wrong, as text; empty: none.
inline std::string differences(const LabelledName& row, const NameReading& got, Unsaid unsaid) {
    std::string text;
    const auto compare = [&](const char* what, const std::string& expected, const std::string& actual) {
        if (expected != actual) text += fmt::format(" {}: expected {}, got {};", what, expected, actual);
    };
    const bool all = unsaid == Unsaid::scored;
    compare("family", row.family, name_of(got.family));
    if (all || row.pass != "unknown") compare("pass", row.pass, name_of(got.pass));
    compare("role", row.role, name_of(got.role));
    if (row.exactness != "-") compare("exactness", row.exactness, name_of(got.exactness));
    if (all || row.arch != 0) compare("arch", std::to_string(row.arch), std::to_string(got.arch));
    if (row.head_dim != 0) compare("head_dim", std::to_string(row.head_dim), std::to_string(got.head_dim));
    return text;
}

}  // namespace tessera::diagnose
