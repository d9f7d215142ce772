// SPDX-License-Identifier: Apache-2.0
//
// The numbers of docs/numerics.md are those that the judge uses.
#include "check/tolerances.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <iterator>
#include <map>
#include <string>

namespace tessera::check::tolerances_test {
namespace {

/// "2e-6", "2^-20" or "1.5".
double number_of(const std::string& text) {
    if (text.rfind("2^", 0) == 0) return std::exp2(std::stod(text.substr(2)));
    return std::stod(text);
}

/// The rows of the table under "### Tolerances": | `name` | value |.
std::map<std::string, double> documented() {
    std::ifstream page(TESSERA_SOURCE_DIR "/docs/numerics.md");
    EXPECT_TRUE(page);
    std::map<std::string, double> rows;
    bool inside = false;
    for (std::string line; std::getline(page, line);) {
        if (line.rfind("##", 0) == 0) inside = line == "### Tolerances";
        if (!inside || line.rfind("| `", 0) != 0) continue;
        const std::size_t end = line.find('`', 3);
        const std::size_t value = line.find("| ", end) + 2;
        rows[line.substr(3, end - 3)] = number_of(line.substr(value, line.find(' ', value) - value));
    }
    return rows;
}

TEST(Tolerances, are_those_of_the_document) {
    const std::map<std::string, double> rows = documented();
    EXPECT_EQ(rows.size(), std::size(kTolerances));
    for (const Tolerance& t : kTolerances) {
        ASSERT_TRUE(rows.count(t.name)) << t.name;
        EXPECT_DOUBLE_EQ(rows.at(t.name), t.value) << t.name;
    }
}

/// The text above the table uses each name of the table. A number in the text alone could drift from the code.
TEST(Tolerances, each_is_used_by_the_rules) {
    std::ifstream page(TESSERA_SOURCE_DIR "/docs/numerics.md");
    const std::string text((std::istreambuf_iterator<char>(page)), {});
    const std::size_t rules = text.find("## Accuracy");
    const std::size_t table = text.find("### Tolerances");
    ASSERT_NE(rules, std::string::npos);
    ASSERT_NE(table, std::string::npos);
    for (const Tolerance& t : kTolerances) {
        if (std::string(t.name) == "block rows") continue;  // "64 neighbouring queries"
        EXPECT_NE(text.substr(rules, table - rules).find("`" + std::string(t.name) + "`"), std::string::npos) << t.name;
    }
}

}  // namespace
}  // namespace tessera::check::tolerances_test
