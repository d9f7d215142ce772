// SPDX-License-Identifier: Apache-2.0
//
// tessera learn as a program.
#include "cli/process.hpp"

namespace tessera::learn_command_test {
namespace {

class LearnTest : public CommandTest {
 protected:
    Outcome learn(const std::string& arguments, const std::string& redirect = "</dev/null") const {
        return run("learn " + arguments, "export XDG_STATE_HOME=$PWD/state;", redirect);
    }
    std::string kept() const { return path("state/tessera/learn.json"); }
};

TEST_F(LearnTest, answers_are_judged_and_kept) {
    EXPECT_NE(learn("").out.find("then tessera learn 0\n"), std::string::npos);
    EXPECT_FALSE(std::filesystem::exists(kept())) << "looking writes nothing";
    const Outcome wrong = learn("6a --answer 19/8");
    EXPECT_EQ(wrong.code, 1);
    EXPECT_NE(wrong.out.find("Not 19/8."), std::string::npos);
    EXPECT_EQ(wrong.out.find("23/16"), std::string::npos);
    const Outcome right = learn("6a --answer 23/16");
    EXPECT_EQ(right.code, 0) << right.err;
    EXPECT_EQ(right.out.rfind("Right: 23/16.", 0), 0U) << right.out;
    for (const char* answer : {"0a --answer 1/2", "0b --answer 8/11", "0c --answer yes"}) learn(answer);
    const auto list = learn("--json").json();
    EXPECT_GE(list.at("lessons").size(), 17U);
    const auto& sixth = list.at("lessons")[6];
    EXPECT_EQ(sixth.at("lesson"), 6);
    EXPECT_EQ(sixth.at("done"), false) << "two more exercises";
    EXPECT_EQ(sixth.at("exercises")[0].at("done"), true);
    EXPECT_EQ(sixth.at("exercises")[0].at("tries"), 2);
    EXPECT_EQ(sixth.at("exercises")[0].at("again"), true);
    EXPECT_EQ(list.at("lessons")[0].at("done"), true);
    const std::string text = learn("").out;
    EXPECT_NE(text.find("then tessera learn 1\nMissed: 6a. To repeat: tessera learn again\n"), std::string::npos)
        << text;
    EXPECT_NE(learn("again").out.find("6a (compute)\nScores 1, 3, 2, 5"), std::string::npos);
    learn("6a --answer 23/16");
    EXPECT_EQ(learn("again").out, "Nothing was missed.\n");
    EXPECT_EQ(list.at("kept_in"), kept());
}

TEST_F(LearnTest, without_a_terminal_it_says_how_to_answer) {
    const Outcome outcome = learn("7");
    EXPECT_EQ(outcome.code, 0);
    EXPECT_NE(outcome.out.find("after the division by l?"), std::string::npos);
    EXPECT_NE(outcome.err.find("no terminal: answer with tessera learn 7a --answer"), std::string::npos) << outcome.err;
    EXPECT_EQ(learn("7 --show").err, "");
    const auto json = learn("7 --json").json();
    EXPECT_EQ(json.at("lesson"), 7);
    ASSERT_EQ(json.at("exercises").size(), 3U);
    EXPECT_EQ(json.at("exercises")[1].at("kind"), "predict, then run");
    EXPECT_FALSE(json.at("exercises")[0].contains("answer")) << "gives the answer away";
}

TEST_F(LearnTest, hints_come_at_once_and_solutions_after_two_misses) {
    EXPECT_NE(learn("6a --hint").out.find("First the new m."), std::string::npos);
    expect_error("learn 6a --solution", 2, "--solution: expected 2 wrong answers to 6a first, got 0");
    learn("6a --answer 1"), learn("6a --answer 2");
    EXPECT_EQ(learn("6a --solution").out.rfind("23/16. m rises", 0), 0U);
    const auto given = learn("--json").json().at("lessons")[6].at("exercises")[0];
    EXPECT_EQ(given.at("done"), false);
    EXPECT_EQ(given.at("tries"), 3) << "the solution counts as a miss";
    // An explanation is judged by the learner, so its model answer comes at once and counts as nothing.
    EXPECT_NE(learn("6c --solution").out.find("m cancels"), std::string::npos);
    EXPECT_EQ(learn("6c --answer no").code, 1);
    EXPECT_EQ(learn("6c --answer yes").code, 0);
    EXPECT_NE(learn("7b --answer 2").out.find("\nNow run it: build/tessera walk --by-hand --tile 1,1\n"),
              std::string::npos);
}

TEST_F(LearnTest, recaps_and_the_exam_are_asked_and_come_again) {
    EXPECT_NE(learn("recap 2").out.find("recap 2b (compute)\nThe weights are powers of two"), std::string::npos);
    EXPECT_EQ(learn("recap 2b --answer 1/4").out.rfind("Right: 1/4.", 0), 0U);
    EXPECT_EQ(learn("exam --json").json().at("exercises").size(), 20U);
    EXPECT_NE(learn("exam 7 --solution").out.find("LSE = m + ln l"), std::string::npos);
    EXPECT_EQ(learn("exam 7 --answer no").code, 1);
    learn("6a --answer 1");
    EXPECT_NE(learn("").out.find("\nMissed: 6a, exam 7. To repeat"), std::string::npos);
    expect_error("learn recap 9", 2, "LESSON: expected 0 to ");
    expect_error("learn exam --answer yes", 2, "--answer: expected one exercise with it");
    expect_error("learn exam --picture p.svg", 2, "--picture: expected a lesson with it, got \"exam\"");
}

TEST_F(LearnTest, estimates_are_for_the_learners_model) {
    EXPECT_NE(learn("estimate").out.find("Your model has 32 layers and 32/8 heads of 128. It reads 8192"),
              std::string::npos);
    const std::string mine = "--device h100 --layers 12 --heads 16 --head-dim 64 --len 4096 --causal bottom-right ";
    EXPECT_NE(learn("estimate " + mine + "--share 0.5 --show").out.find("takes 0.5 of its time"), std::string::npos);
    EXPECT_EQ(learn("estimate a " + mine + "--answer '12 * 4096^2 / 2 * 16 * 12 / 10^9'").code, 0);
    EXPECT_EQ(learn("estimate d " + mine + "--answer 1").code, 1);
    EXPECT_NE(learn("").out.find("1 of 5"), std::string::npos);
    EXPECT_NE(learn("").out.find("Missed: estimate d. To repeat"), std::string::npos);
    EXPECT_NE(learn("again").out.find("estimate d (compute)"), std::string::npos);
    EXPECT_EQ(learn("--json").json().at("quizzes").size(), 7U);
    expect_error("learn estimate --heads 32/5", 2, "--heads: expected a number of query heads that is a multiple");
    expect_error("learn estimate --device h300", 2, "--device: expected a GPU that computes in bf16");
    expect_error("learn estimate --head-dim 300", 2, "--head-dim: expected 1 to 256, got 300");
    expect_error("learn 6 --len 5", 2, "expected estimate with them, got 6");
}

TEST_F(LearnTest, bad_calls_are_refused) {
    expect_error("learn 99", 2, "LESSON: expected 0 to ");
    expect_error("learn 6d", 2, "LESSON: expected 6a to 6c, got \"6d\"");
    expect_error("learn 06", 2, "LESSON");
    expect_error("learn 6 --answer 3", 2, "--answer: expected one exercise with it, such as 6a, got \"6\"");
    expect_error("learn again --hint", 2, "--hint: expected one exercise with it");
    expect_error("learn 6c --answer perhaps", 2, "--answer: expected yes or no");
    expect_error("learn six", 2, "LESSON");
    expect_error("learn --answer 3", 2, "--answer: expected an exercise with it: tessera learn 6a --answer");
    expect_error("learn 6a --answer much", 2, "--answer: expected a number");
    expect_error("learn 1a --answer '12 miles'", 2, "a number of MiB");
    EXPECT_EQ(learn("6 --picture /nonexistent/p.svg").code, 73);
    expect_error("learn 6 --picture p.png", 2, "--picture: expected a name that ends in .svg");
    std::ofstream(path("notes.svg")) << "precious";
    expect_error("learn 6 --picture notes.svg", 73, "notes.svg: expected a new file or drawing written by tessera");
    EXPECT_EQ(text_of(path("notes.svg")), "precious");
}

TEST_F(LearnTest, what_cannot_be_kept_is_told_after_the_answer) {
    std::filesystem::create_directories(path("state/tessera"));
    std::ofstream(kept()) << "precious";
    const Outcome outcome = learn("6a --answer 23/16");
    EXPECT_EQ(outcome.code, 65);
    EXPECT_NE(outcome.out.find("Right"), std::string::npos);
    EXPECT_EQ(text_of(kept()), "precious");
    const Outcome nowhere = run("learn 6a --answer 23/16", "unset XDG_STATE_HOME HOME;");
    EXPECT_EQ(nowhere.code, 0);
    EXPECT_NE(nowhere.err.find("not saved"), std::string::npos);
}

TEST_F(LearnTest, pictures_are_written) {
    EXPECT_EQ(learn("10 --picture p.svg").code, 0);
    EXPECT_NE(text_of(path("p.svg")).find("28 full"), std::string::npos);
    for (int lesson = 0; lesson <= 22; ++lesson) {
        const std::string call = std::to_string(lesson) + " --picture p.svg";
        EXPECT_EQ(learn(call).code, 0) << "over the picture of another lesson: " << call;
    }
}

}  // namespace
}  // namespace tessera::learn_command_test
