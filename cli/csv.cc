// SPDX-License-Identifier: Apache-2.0
#include "csv.hpp"

#include <algorithm>
#include <map>
#include <vector>

namespace tessera::cli {
namespace {

using CsvRow = std::map<std::string, std::string>;

std::string value_text(const Json& value) {
    if (value.is_null()) return "";
    if (value.is_string()) return value.get<std::string>();
    return value.dump(-1, ' ', false, Json::error_handler_t::replace);
}

/// A cell in quotes if it needs them.
std::string quoted(const std::string& text) {
    if (text.find_first_of(",\"\r\n") == std::string::npos) return text;
    std::string result = "\"";
    for (const char c : text) {
        if (c == '"') result += '"';
        result += c;
    }
    return result + '"';
}

/// Adds the columns of an object to `row`, and new names to `columns`.
void add_columns(const Json& object, const std::string& prefix, CsvRow& row, std::vector<std::string>& columns) {
    for (const auto& [key, value] : object.items()) {
        const std::string name = prefix + key;
        if (value.is_object()) {
            add_columns(value, name + ".", row, columns);
            continue;
        }
        std::string text;
        if (value.is_array())
            for (const Json& entry : value) text += (text.empty() ? "" : " ") + value_text(entry);
        else text = value_text(value);
        if (std::find(columns.begin(), columns.end(), name) == columns.end()) columns.push_back(name);
        row[name] = text;
    }
}

}  // namespace

std::string csv_text(const Json& rows) {
    std::vector<std::string> columns;
    std::vector<CsvRow> lines;
    for (const Json& object : rows) add_columns(object, "", lines.emplace_back(), columns);
    std::string text;
    for (const std::string& name : columns) text += (text.empty() ? "" : ",") + quoted(name);
    text += "\n";
    for (const CsvRow& line : lines) {
        std::string cells;
        for (const std::string& name : columns) {
            const auto cell = line.find(name);
            if (&name != &columns.front()) cells += ',';
            if (cell != line.end()) cells += quoted(cell->second);
        }
        text += cells + "\n";
    }
    return text;
}

}  // namespace tessera::cli
