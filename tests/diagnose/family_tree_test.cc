// SPDX-License-Identifier: Apache-2.0
#include "diagnose/family_tree.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <fstream>
#include <set>
#include <sstream>
#include <string>

namespace tessera::diagnose::family_tree_test {
namespace {

std::set<std::string> names() {
    std::set<std::string> found;
    for (const Relative& r : relatives()) found.insert(r.name);
    return found;
}

TEST(FamilyTree, parents_stand_before_their_children) {
    std::set<std::string> before = {""};
    for (const Relative& r : relatives()) {
        EXPECT_EQ(1U, before.count(r.parent)) << r.name;
        EXPECT_TRUE(before.insert(r.name).second) << r.name << " stands twice";
    }
}

TEST(FamilyTree, libraries_end_in_relatives) {
    const std::set<std::string> known = names();
    for (const Chooser& chooser : choosers()) {
        std::istringstream list(chooser.ends_in);
        for (std::string name; std::getline(list >> std::ws, name, ',');)
            EXPECT_EQ(1U, known.count(name)) << chooser.name << ": " << name;
    }
}

TEST(FamilyTree, text_fits_a_terminal_and_holds_every_kernel) {
    const std::string text = family_text();
    std::istringstream lines(text);
    for (std::string line; std::getline(lines, line);) EXPECT_LE(line.size(), 80U) << line;
    for (const Relative& r : relatives())
        EXPECT_NE(std::string::npos, text.find(fmt::format("{}\n", r.kernel))) << r.name;
}

/// `tessera which -` knows the kernel name of every family.
TEST(FamilyTree, reader_of_names_knows_every_kernel) {
    for (const Relative& r : relatives()) {
        const NameReading reading = read_name(r.kernel);
        EXPECT_GE(reading.confidence, Confidence::likely) << r.name << ": " << r.kernel;
        if (r.family == Family::eager) {
            EXPECT_EQ(Role::softmax, reading.role) << r.name;
            continue;
        }
        EXPECT_STREQ(name_of(r.family), name_of(reading.family)) << r.name << ": " << r.kernel;
        EXPECT_EQ(Role::attention, reading.role) << r.name << ": " << r.kernel;
    }
}

/// docs/family.md is drawn from the same data.
TEST(FamilyTree, the_page_is_its_data) {
    std::ifstream file(TESSERA_SOURCE_DIR "/docs/family.md");
    std::ostringstream page;
    page << file.rdbuf();
    EXPECT_EQ(family_markdown(), page.str());
}

}  // namespace
}  // namespace tessera::diagnose::family_tree_test
