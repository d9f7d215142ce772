// SPDX-License-Identifier: Apache-2.0
//
// The exercises: compares their answers with numbers worked out with a pencil, and tests how answers are read and kept.
#include "learn/lesson.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <thread>

#include "learn/answer.hpp"
#include "learn/expression.hpp"
#include "learn/pictures.hpp"
#include "learn/progress.hpp"
#include "learn/quiz.hpp"
#include "plot/mark.hpp"
#include "plot/xml_check.hpp"
#include "tessera/error.hpp"

namespace tessera::learn::learn_test {
namespace {

/// The answers worked out with a pencil, apart from the engine. "model" marks answers of the model of the time, whose
/// arithmetic a test below redoes.
const std::map<std::string, std::string> kPencil = {{"0a", "4/8"},
                                                    {"0b", "16/22"},
                                                    {"1a", "4*2^20*12/2^20"},
                                                    {"1b", "16*4096^2*12/2039/10^6"},
                                                    {"2a", "108*128*1.41/2039"},
                                                    {"2b", "241"},
                                                    {"3a", "64"},
                                                    {"3b", "64*1.566"},
                                                    {"4a", "2"},
                                                    {"4b", "1"},
                                                    {"5a", "192"},
                                                    {"5b", "512 + 128*516/1024"},
                                                    {"6a", "23/16"},
                                                    {"6b", "1 + 1/16 + 1/4 + 1/8"},
                                                    {"7a", "(1/2*2 + 1/4*2 + 8)/2"},
                                                    {"7b", "2"},
                                                    {"8a", "1/4"},
                                                    {"8b", "4096*2/4"},
                                                    {"9a", "-11/16"},
                                                    {"9b", "3/4"},
                                                    {"10a", "8*(25 + 32)/2"},
                                                    {"10b", "10"},
                                                    {"11a", "2*(128*4 + 8)*2048*16/2^20"},
                                                    {"11b", "8*53 + 49.25"},
                                                    {"12a", "2"},
                                                    {"12b", "model"},
                                                    {"13a", "fa2"},
                                                    {"13b", "32"},
                                                    {"14a", "efficient"},
                                                    {"14b", "efficient"},
                                                    {"15a", "model"},
                                                    {"15b", "model"},
                                                    {"16a", "100*(1 - 320/396)"},
                                                    {"16b", "2*0.217"},
                                                    {"17a", "16/13"},
                                                    {"17b", "100 * 4*129*4*2 / (512*128*4)"},
                                                    {"18a", "(4 + 2 + 20) * 32"},
                                                    {"18b", "207"},
                                                    {"19a", "2^(40 * (1.125 - 1.1))"},
                                                    {"19b", "64/8"},
                                                    {"20a", "5/4 + 1/2 + 4"},
                                                    {"20b", "1 - 512/1024"},
                                                    {"21a", "5 / (2 + 1/2)"},
                                                    {"21b", "16*3 - 3"},
                                                    {"22a", "88.08 / 4800 * 1000"},
                                                    {"22b", "100 * (27.7 - 19.6) / (27.7 - 5.3)"}};

TEST(Lessons, answers_are_those_of_a_pencil) {
    int judged = 0;
    for (const ExerciseId& id : all_exercises()) {
        const Exercise exercise = id.make();
        if (exercise.kind == Kind::explain) continue;
        ++judged;
        ASSERT_TRUE(kPencil.contains(id.text())) << id.text();
        const std::string& answer = kPencil.at(id.text());
        if (answer != "model") {
            EXPECT_TRUE(grade_answer(exercise, answer).right)
                << id.text() << ": " << answer << " is told to be wrong: " << exercise.answer;
        }
        EXPECT_FALSE(exercise.why.empty());
        std::string printed = exercise.answer;
        if (printed.starts_with("about ")) printed = printed.substr(6);
        EXPECT_TRUE(grade_answer(exercise, printed).right) << id.text() << ": the answer as it is told";
    }
    EXPECT_EQ(judged, static_cast<int>(kPencil.size()));
}

/// The number after `words` in `text`.
double number_after(const std::string& text, const std::string& words) {
    const auto at = text.find(words);
    EXPECT_NE(at, std::string::npos) << words << " in: " << text;
    return at == std::string::npos ? 0 : std::stod(text.substr(at + words.size()));
}

TEST(Lessons, answers_of_the_model_follow_from_their_tasks) {
    const Exercise amdahl = exercise_of("15a").make();
    const double win = number_after(amdahl.task, "gives ");
    EXPECT_GT(win, 3);
    EXPECT_NEAR(amdahl.value, 1 / (0.75 + 0.25 / win), 0.005);
    const Exercise a100 = exercise_of("15b").make();
    const double slope = 0.7 * 43 * number_after(a100.task, "TFLOP/s and ") / 1000;
    EXPECT_NEAR(a100.value, 0.6 * number_after(a100.task, "A100 has ") / slope, 0.2 * a100.value)
        << "the rule of thumb";
    // A kernel that the tensor cores bound: between no loss and that of the memory, and nearer to no loss.
    const Exercise slower = exercise_of("12b").make();
    const double memory = number_after(slower.task, "instead of ") / number_after(slower.task, "H200, but ");
    EXPECT_GE(slower.value, 1);
    EXPECT_LT(slower.value, 1 + (memory - 1) / 2);
}

TEST(Lessons, each_has_two_exercises_or_three_and_one_asks_to_explain) {
    int number = 0;
    for (const Lesson& lesson : lessons()) {
        EXPECT_EQ(lesson.number, number++);
        EXPECT_GE(lesson.exercise_count(), 2) << lesson.slug;
        EXPECT_EQ(std::stoi(lesson.slug), lesson.number);
        int explain = 0;
        for (const ExerciseId& id : exercises_of(lesson)) {
            const Exercise exercise = id.make();
            explain += exercise.kind == Kind::explain ? 1 : 0;
            EXPECT_EQ(exercise.kind == Kind::predict, !exercise.command.empty()) << id.text();
            EXPECT_FALSE(exercise.hint.empty()) << id.text();
            EXPECT_FALSE(exercise.answer.empty()) << id.text();
            EXPECT_EQ(exercise_of(id.text()), id);
        }
        EXPECT_EQ(explain, 1) << lesson.slug;
    }
    for (const char* none : {"", "6", "6d", "a", "99a", "6aa"}) EXPECT_THROW(exercise_of(none), Error) << none;
}

TEST(Quizzes, have_five_questions_a_recap_and_twenty_in_the_exam) {
    ASSERT_EQ(quizzes().size(), 7U);
    const std::map<std::string, std::string> numbers = {
        {"recap 1d", "2^2"}, {"recap 2b", "2^(3 - 5)"}, {"recap 4d", "1/(9/10 + 1/10/4)"}};
    std::size_t judged = 0;
    for (const Quiz& quiz : quizzes().first(6)) {
        const std::vector<ExerciseId> ids = exercises_of(quiz);
        EXPECT_EQ(ids.size(), std::string(quiz.name) == "exam" ? 20U : 5U);
        for (const ExerciseId& id : ids) {
            EXPECT_EQ(id.text(), id.saved());
            EXPECT_EQ(exercise_of(id.text()), id);
            const Exercise exercise = id.make();
            EXPECT_FALSE(exercise.hint.empty());
            if (exercise.kind == Kind::explain) continue;
            ++judged;
            ASSERT_TRUE(numbers.contains(id.text())) << id.text();
            EXPECT_TRUE(grade_answer(exercise, numbers.at(id.text())).right) << id.text();
            EXPECT_TRUE(grade_answer(exercise, exercise.answer).right) << id.text();
        }
    }
    EXPECT_EQ(judged, numbers.size());
    EXPECT_EQ(exercises_of(quizzes()[5])[6].text(), "exam 7");
}

TEST(Lessons, wrong_answers_are_told_from_right_ones) {
    for (const ExerciseId& id : all_exercises()) {
        const Exercise exercise = id.make();
        if (exercise.kind == Kind::explain) continue;
        for (const Mistake& mistake : exercise.mistakes) {
            const Grade grade =
                grade_answer(exercise, mistake.word.empty() ? std::to_string(mistake.value) : mistake.word);
            EXPECT_FALSE(grade.right) << id.text() << ": " << mistake.text;
            EXPECT_NE(grade.text.find(mistake.text), std::string::npos) << grade.text;
            EXPECT_EQ(grade.text.find(exercise.why), std::string::npos) << "gives the answer away";
        }
        if (!exercise.words.empty()) {
            EXPECT_FALSE(grade_answer(exercise, "none").right);
            continue;
        }
        const double far = exercise.value * (1 + 2 * std::max(exercise.tolerance, 0.005));
        EXPECT_FALSE(grade_answer(exercise, std::to_string(far)).right) << id.text();
        EXPECT_THROW(grade_answer(exercise, "a lot"), Error) << id.text();
        EXPECT_THROW(grade_answer(exercise, "12 miles"), Error) << id.text();
    }
    EXPECT_THROW(grade_answer(exercise_of("1a").make(), " "), Error);
    EXPECT_THROW(lesson(-1), Error);
    EXPECT_THROW(lesson(static_cast<int>(lessons().size())), Error);
}

TEST(Answer, of_an_explanation_is_the_learners_own_verdict) {
    const Exercise exercise = exercise_of("6c").make();
    for (const char* yes : {"yes", "Y", " Yes "}) EXPECT_TRUE(grade_answer(exercise, yes).right) << yes;
    for (const char* no : {"no", "N"}) EXPECT_FALSE(grade_answer(exercise, no).right) << no;
    for (const char* none : {"", "m cancels", "1"}) EXPECT_THROW(grade_answer(exercise, none), Error) << none;
    EXPECT_EQ(solution_of(exercise), exercise.answer);
}

/// Other ways to write the right answer are accepted, and a nearly right answer is distinguished from a wrong one.
TEST(Answer, other_words_and_units_are_understood) {
    for (const char* fa2 : {"FA2", "FlashAttention 2", "flash attention 2", "flash_attn 2", "FA-2", "v2"})
        EXPECT_TRUE(grade_answer(exercise_of("13a").make(), fa2).right) << fa2;
    for (const char* efficient : {"Memory efficient", "mem_efficient", "EFFICIENT_ATTENTION"})
        EXPECT_TRUE(grade_answer(exercise_of("14a").make(), efficient).right) << efficient;
    EXPECT_TRUE(grade_answer(exercise_of("8a").make(), "+1/4").right);
    const std::pair<const char*, const char*> near[] = {
        {"1a", "50331648"}, {"1a", "50.33"}, {"3a", "68.72"}, {"6a", "1.44"}, {"15a", "1.333"}};
    const char* says[] = {"in bytes: a MiB is 2^20", "in MB", "in GB", "It is close", "no time at all"};
    for (std::size_t i = 0; i < std::size(near); ++i) {
        const Grade grade = grade_answer(exercise_of(near[i].first).make(), near[i].second);
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
    const auto right = [](const char* exercise, const char* text) {
        return grade_answer(exercise_of(exercise).make(), text).right;
    };
    for (const char* same : {"48", "48 MiB", "48MiB", "48 mib", "49,152 KiB", "50331648 B", "50 331 648 bytes",
                             "48*2^20 bytes", "50.332 MB", "3*16 MiB", "0.046875 GiB", "48 MB", "49152 KB"})
        EXPECT_TRUE(right("1a", same)) << same;
    EXPECT_NE(grade_answer(exercise_of("1a").make(), "48 MB").text.find("Taking MB for MiB, which is 2^20 bytes."),
              std::string::npos);
    for (const char* wrong : {"48 KB", "48 GiB", "52 MB"}) EXPECT_FALSE(right("1a", wrong)) << wrong;
    EXPECT_TRUE(right("12a", "2x"));
    EXPECT_TRUE(right("5a", "192 keys"));
    for (const char* same : {"19.2", "19.2 %", "19.2%"}) EXPECT_TRUE(right("16a", same)) << same;
    EXPECT_TRUE(right("5a", "12*16"));
    EXPECT_TRUE(right("5a", "192 key"));
    for (const char* none : {"192 KB", "192 %", "12 MiB 5", "MiB"})
        EXPECT_THROW(grade_answer(exercise_of("5a").make(), none), Error) << none;
    try {
        grade_answer(exercise_of("5a").make(), "1,5");
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
    EXPECT_THROW(picture(static_cast<int>(lessons().size())), Error);
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
    const std::string saved = exercise_of("6a").saved();
    EXPECT_EQ(saved, "running-maximum a");
    add_answer(path(), {.exercise = saved, .answer = "19/8", .right = false});
    add_answer(path(), {.exercise = saved, .answer = "23/16", .right = true});
    add_answer(path(), {.exercise = saved, .answer = "\xff", .right = false});
    const auto given = read_progress(path());
    ASSERT_EQ(given.size(), 3U);
    EXPECT_EQ(given[0].answer, "19/8");
    const Standing standing = standing_of(given, exercise_of("6a"));
    EXPECT_TRUE(standing.done);  // a later slip takes nothing away
    EXPECT_EQ(standing.tries, 2);
    EXPECT_EQ(standing.misses, 1);
    EXPECT_EQ(standing_of(given, exercise_of("6b")).tries, 0);
    EXPECT_FALSE(done(given, lesson(6)));
    EXPECT_EQ(given[0].at.size(), 20U);
}

TEST_F(ProgressTest, what_was_missed_comes_again_until_it_is_right_twice) {
    const auto answer = [&](const char* exercise, bool right) {
        add_answer(path(), {.exercise = exercise_of(exercise).saved(), .answer = "1", .right = right});
    };
    const auto missed = [&] {
        std::string text;
        for (const ExerciseId& id : missed_exercises(read_progress(path()))) text += id.text() + " ";
        return text;
    };
    answer("7a", true);
    answer("2b", false);
    EXPECT_EQ(missed(), "2b ");
    answer("2b", true);  // at once, with the slip explained: it comes again
    answer("7b", false);
    EXPECT_EQ(missed(), "2b 7b ");
    answer("2b", true);
    EXPECT_EQ(missed(), "7b ");
    answer("7b", true), answer("7b", false), answer("7b", true);
    EXPECT_EQ(missed(), "7b ");
    EXPECT_FALSE(done(read_progress(path()), lesson(7)));
    answer("7c", true);
    EXPECT_TRUE(done(read_progress(path()), lesson(7)));
}

TEST_F(ProgressTest, answers_to_the_first_edition_are_not_misread) {
    std::filesystem::create_directories(folder_ / "state");
    // Its lesson 8 asked for dS and is gone; its lessons 11 and 13 are 12a and 14b.
    std::ofstream(path()) << R"({"format": "tessera learn, answers", "answers": [
        {"lesson": 8, "answer": "11/16", "right": true}, {"lesson": 11, "answer": "2", "right": true},
        {"lesson": 13, "answer": "math", "right": false}, {"lesson": 77, "answer": "1", "right": true}]})";
    add_answer(path(), {.exercise = exercise_of("9a").saved(), .answer = "1", .right = false});
    const auto given = read_progress(path());
    ASSERT_EQ(given.size(), 3U);
    EXPECT_TRUE(standing_of(given, exercise_of("12a")).done);
    EXPECT_TRUE(standing_of(given, exercise_of("14b")).again);
    for (const char* other : {"8a", "11a", "13a", "14a"})
        EXPECT_EQ(standing_of(given, exercise_of(other)).tries, 0) << other;
    for (int number = 1; number <= 14; ++number) {
        const std::string saved = exercise_of_first_edition(number);
        const auto all = all_exercises();
        EXPECT_TRUE(saved.empty() ||
                    std::any_of(all.begin(), all.end(), [&](const ExerciseId& id) { return id.saved() == saved; }))
            << saved;
    }
    EXPECT_NE(text().find("11/16"), std::string::npos) << "the file keeps every answer";
}

TEST_F(ProgressTest, answers_at_the_same_time_are_all_kept) {
    std::vector<std::thread> threads;
    for (int i = 0; i < 8; ++i) {
        threads.emplace_back([this, i] {
            for (int n = 0; n < 5; ++n)
                add_answer(path(), {.exercise = "tiles a", .answer = std::to_string(8 * i + n), .right = true});
        });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(read_progress(path()).size(), 40U);
}

TEST_F(ProgressTest, a_file_of_others_is_left_as_it_is) {
    add_answer(path(), {.exercise = "tiles a", .answer = "12", .right = true});
    for (const char* content : {"", "precious", "[1]", "{\"format\": \"other\", \"answers\": []}",
                                "{\"format\": \"tessera learn, answers\", \"answers\": [7]}",
                                "{\"format\": \"tessera learn, answers\", \"answers\": [{\"answer\": \"7\"}]}"}) {
        std::ofstream(path()) << content;
        EXPECT_THROW(read_progress(path()), Error) << content;
        EXPECT_THROW(add_answer(path(), {.exercise = "tiles a", .answer = "12", .right = true}), Error) << content;
        EXPECT_EQ(text(), content);
    }
}

TEST_F(ProgressTest, fields_of_a_later_version_stay) {
    std::filesystem::create_directories(folder_ / "state");
    std::ofstream(path()) << R"({"format": "tessera learn, answers", "color": "red", "answers": []})";
    add_answer(path(), {.exercise = "tiles a", .answer = "12", .right = true});
    EXPECT_NE(text().find("red"), std::string::npos);
}

}  // namespace
}  // namespace tessera::learn::learn_test
