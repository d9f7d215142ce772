// SPDX-License-Identifier: Apache-2.0
//
// The exercises: compares their answers with numbers worked out with a pencil, and tests how answers are read and kept.
#include "learn/lesson.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <thread>

#include "learn/answer.hpp"
#include "learn/expression.hpp"
#include "learn/pictures.hpp"
#include "learn/progress.hpp"
#include "plot/mark.hpp"
#include "plot/xml_check.hpp"
#include "tessera/error.hpp"

namespace tessera::learn::learn_test {
namespace {

TEST(Lessons, answers_are_those_of_a_pencil) {
    // Compares the engine's answers with those worked out by hand. Two are the model's (2 and 14); their arithmetic is
    // redone here.
    const char* pencil[] = {"12",    "132*", "64",   "2", "192", "23/16",     "21/4",
                            "11/16", "136",  "8.25", "2", "fa2", "efficient", "model"};
    ASSERT_EQ(lessons().size(), std::size(pencil));
    for (const Lesson& lesson : lessons()) {
        const Exercise exercise = lesson.exercise();
        std::string answer = pencil[lesson.number - 1];
        if (lesson.number == 2) answer = std::to_string(132 * 128 * 1.83 / 4800);
        if (lesson.number == 14) {
            // The task states the win with two digits.
            const auto at = exercise.task.find("gives ") + 6;
            const double win = std::stod(exercise.task.substr(at));
            EXPECT_GT(win, 3);
            answer = std::to_string(1 / (0.6 + 0.4 / win));
        }
        const Grade grade = grade_answer(exercise, answer);
        EXPECT_TRUE(grade.right) << lesson.number << ": " << answer << " is told to be wrong: " << exercise.answer;
        EXPECT_FALSE(exercise.why.empty());
        EXPECT_TRUE(grade_answer(exercise, exercise.answer).right) << lesson.number << ": the answer as it is told";
    }
}

TEST(Lessons, wrong_answers_are_told_from_right_ones) {
    for (const Lesson& lesson : lessons()) {
        const Exercise exercise = lesson.exercise();
        for (const Mistake& mistake : exercise.mistakes) {
            const Grade grade =
                grade_answer(exercise, mistake.word.empty() ? std::to_string(mistake.value) : mistake.word);
            EXPECT_FALSE(grade.right) << lesson.number << ": " << mistake.text;
            EXPECT_NE(grade.text.find(mistake.text), std::string::npos) << grade.text;
            EXPECT_EQ(grade.text.find(exercise.why), std::string::npos) << "gives the answer away";
        }
        if (!exercise.words.empty()) {
            EXPECT_FALSE(grade_answer(exercise, "none").right);
            continue;
        }
        EXPECT_FALSE(grade_answer(exercise, std::to_string(exercise.value * 1.05)).right) << lesson.number;
        EXPECT_THROW(grade_answer(exercise, "a lot"), Error) << lesson.number;
        EXPECT_THROW(grade_answer(exercise, "12 miles"), Error) << lesson.number;
    }
    EXPECT_THROW(grade_answer(lesson(1).exercise(), " "), Error);
    EXPECT_THROW(lesson(0), Error);
    EXPECT_THROW(lesson(15), Error);
}

/// Other ways to write the right answer are accepted, and a nearly right answer is distinguished from a wrong one.
TEST(Answer, other_words_and_units_are_understood) {
    for (const char* fa2 : {"FA2", "FlashAttention 2", "flash attention 2", "flash_attn 2", "FA-2", "v2"})
        EXPECT_TRUE(grade_answer(lesson(12).exercise(), fa2).right) << fa2;
    for (const char* efficient : {"Memory efficient", "mem_efficient", "EFFICIENT_ATTENTION"})
        EXPECT_TRUE(grade_answer(lesson(13).exercise(), efficient).right) << efficient;
    EXPECT_TRUE(grade_answer(lesson(8).exercise(), "+11/16").right);
    const std::pair<int, const char*> near[] = {{1, "12582912"}, {1, "12.58"}, {3, "68.72"}, {6, "1.44"}, {14, "1.67"}};
    const char* says[] = {"in bytes: a MiB is 2^20", "in MB", "in GB", "It is close", "no time at all"};
    for (std::size_t i = 0; i < std::size(near); ++i) {
        const Grade grade = grade_answer(lesson(near[i].first).exercise(), near[i].second);
        EXPECT_FALSE(grade.right) << near[i].second;
        EXPECT_NE(grade.text.find(says[i]), std::string::npos) << grade.text;
    }
}

TEST(Answer, numbers_are_read_as_people_write_them) {
    EXPECT_EQ(number_of("12"), 12);
    EXPECT_EQ(number_of(" 1,024 "), 1024);
    EXPECT_EQ(number_of("23/16"), 23.0 / 16);
    EXPECT_EQ(number_of("2^20"), 1048576);
    EXPECT_EQ(number_of("-9/4"), -2.25);
    EXPECT_EQ(number_of("+11/16"), 0.6875);
    EXPECT_EQ(number_of("1.5e3"), 1500);
    EXPECT_EQ(number_of("15E+2"), 1500);
    EXPECT_EQ(number_of(".5"), 0.5);
    for (const char* same : {"12,582,912", "12 582 912", "12'582'912", "12_582_912", "12\u202f582\u202f912"})
        EXPECT_EQ(number_of(same), 12582912) << same;
    for (const char* none : {"", "x", "1/0", "1,5", "0,176", "0 176", "1,0245", ",123", "nan", "inf", "3 4", "0x10",
                             "+-1", "1,024 512", "1.2.3", "1e", "5."})
        EXPECT_FALSE(number_of(none)) << none;
}

TEST(Answer, small_sums_are_worked_out) {
    EXPECT_EQ(number_of("12*16"), 192);
    EXPECT_EQ(number_of("12 x 16"), 192);
    EXPECT_EQ(number_of("12 \u00d7 16"), 192);
    EXPECT_EQ(number_of("1/2/3"), 1.0 / 2 / 3);
    EXPECT_EQ(number_of("1 + 2*3 - 4/8"), 6.5);
    EXPECT_EQ(number_of("(1 + 2) * (3 - 5)"), -6);
    EXPECT_EQ(number_of("2*2^3"), 16);
    EXPECT_EQ(number_of("2^-1"), 0.5);
    EXPECT_EQ(number_of("-(1 - 3)"), 2);
    EXPECT_EQ(number_of("4096*4096*2/2^20"), 32);
    for (const char* none : {"1+", "*2", "(1", "1)", "()", "1 2*3", "2**3", "1/(2-2)", "2^^3", "1+-2", "9^9^9", "a*2"})
        EXPECT_FALSE(number_of(none)) << none;
    EXPECT_FALSE(number_of(std::string(10000, '('))) << "too long";
}

TEST(Answer, numbers_come_with_their_unit_or_another_of_its_kind) {
    const auto right = [](int number, const char* text) { return grade_answer(lesson(number).exercise(), text).right; };
    for (const char* twelve : {"12", "12 MiB", "12MiB", "12 mib", "12,288 KiB", "12582912 B", "12 582 912 bytes",
                               "12*2^20 bytes", "12.583 MB", "3*4 MiB", "0.01171875 GiB", "12 MB", "12288 KB"})
        EXPECT_TRUE(right(1, twelve)) << twelve;
    EXPECT_NE(grade_answer(lesson(1).exercise(), "12 MB").text.find("Taking MB for MiB, which is 2^20 bytes."),
              std::string::npos);
    for (const char* wrong : {"12 KB", "12 GiB", "13 MB"}) EXPECT_FALSE(right(1, wrong)) << wrong;
    EXPECT_TRUE(right(11, "2x"));
    EXPECT_TRUE(right(5, "192 keys"));
    EXPECT_TRUE(right(5, "12*16"));
    EXPECT_TRUE(right(5, "192 key"));
    for (const char* none : {"192 KB", "192 %", "12 MiB 5", "MiB"})
        EXPECT_THROW(grade_answer(lesson(5).exercise(), none), Error) << none;
    try {
        grade_answer(lesson(5).exercise(), "1,5");
        ADD_FAILURE() << "1,5 is taken";
    } catch (const Error& error) {
        EXPECT_NE(std::string(error.what()).find("a point before decimals"), std::string::npos) << error.what();
    }
}

TEST(Pictures, are_whole_and_the_same_every_time) {
    for (const Lesson& lesson : lessons()) {
        const std::string svg = picture(lesson.number);
        EXPECT_EQ(svg, picture(lesson.number));
        EXPECT_EQ(plot::first_xml_error(svg), "") << lesson.number;
        EXPECT_NE(svg.find(plot::kSvgMark), std::string::npos) << lesson.number << ": would not be written over";
        EXPECT_EQ(svg.find("nan"), std::string::npos) << lesson.number;
        EXPECT_EQ(svg.find("xlink"), std::string::npos) << "refers to something outside";
    }
    EXPECT_THROW(picture(15), Error);
}

class ProgressTest : public testing::Test {
 protected:
    void SetUp() override {
        std::string pattern = (std::filesystem::temp_directory_path() / "tessera_learn_XXXXXX").string();
        ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
        folder_ = pattern;
    }
    void TearDown() override { std::filesystem::remove_all(folder_); }
    std::string path() const { return (folder_ / "state" / "learn.json").string(); }
    std::string text() const {
        std::ifstream file(path());
        return {std::istreambuf_iterator<char>(file), {}};
    }

    std::filesystem::path folder_;
};

TEST_F(ProgressTest, keeps_every_answer) {
    EXPECT_TRUE(read_progress(path()).empty());
    add_answer(path(), {.lesson = 6, .answer = "19/8", .right = false});
    add_answer(path(), {.lesson = 6, .answer = "23/16", .right = true});
    add_answer(path(), {.lesson = 6, .answer = "\xff", .right = false});
    const auto given = read_progress(path());
    ASSERT_EQ(given.size(), 3U);
    EXPECT_EQ(given[0].answer, "19/8");
    EXPECT_TRUE(done(given, 6));
    EXPECT_EQ(tries(given, 6), 2);  // a later slip takes nothing away
    EXPECT_FALSE(done(given, 7));
    EXPECT_EQ(given[0].at.size(), 20U);
}

TEST_F(ProgressTest, answers_at_the_same_time_are_all_kept) {
    std::vector<std::thread> threads;
    for (int i = 0; i < 8; ++i) {
        threads.emplace_back([this, i] {
            for (int n = 0; n < 5; ++n)
                add_answer(path(), {.lesson = i + 1, .answer = std::to_string(n), .right = true});
        });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(read_progress(path()).size(), 40U);
}

TEST_F(ProgressTest, a_file_of_others_is_left_as_it_is) {
    add_answer(path(), {.lesson = 1, .answer = "12", .right = true});
    for (const char* content : {"", "precious", "[1]", "{\"format\": \"other\", \"answers\": []}",
                                "{\"format\": \"tessera learn, answers\", \"answers\": [7]}"}) {
        std::ofstream(path()) << content;
        EXPECT_THROW(read_progress(path()), Error) << content;
        EXPECT_THROW(add_answer(path(), {.lesson = 1, .answer = "12", .right = true}), Error) << content;
        EXPECT_EQ(text(), content);
    }
}

TEST_F(ProgressTest, fields_of_a_later_version_stay) {
    std::filesystem::create_directories(folder_ / "state");
    std::ofstream(path()) << R"({"format": "tessera learn, answers", "color": "red", "answers": []})";
    add_answer(path(), {.lesson = 1, .answer = "12", .right = true});
    EXPECT_NE(text().find("red"), std::string::npos);
}

}  // namespace
}  // namespace tessera::learn::learn_test
