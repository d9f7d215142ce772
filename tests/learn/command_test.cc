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
    EXPECT_NE(learn("").out.find("then tessera learn 1\n"), std::string::npos);
    EXPECT_FALSE(std::filesystem::exists(kept())) << "looking writes nothing";
    const Outcome wrong = learn("6 --answer 19/8");
    EXPECT_EQ(wrong.code, 1);
    EXPECT_NE(wrong.out.find("Not 19/8."), std::string::npos);
    EXPECT_EQ(wrong.out.find("23/16"), std::string::npos);
    const Outcome right = learn("6 --answer 23/16");
    EXPECT_EQ(right.code, 0) << right.err;
    EXPECT_EQ(right.out.rfind("Right: 23/16.", 0), 0U) << right.out;
    learn("1 --answer '12 MiB'");
    const auto list = learn("--json").json();
    ASSERT_EQ(list.at("lessons").size(), 14U);
    EXPECT_EQ(list.at("lessons")[5].at("done"), true);
    EXPECT_EQ(list.at("lessons")[5].at("tries"), 2);
    EXPECT_EQ(list.at("lessons")[1].at("done"), false);
    EXPECT_NE(learn("").out.find("then tessera learn 2\n"), std::string::npos);
    EXPECT_EQ(list.at("kept_in"), kept());
}

TEST_F(LearnTest, without_a_terminal_it_says_how_to_answer) {
    const Outcome outcome = learn("7");
    EXPECT_EQ(outcome.code, 0);
    EXPECT_NE(outcome.out.find("after the division by l?"), std::string::npos);
    EXPECT_NE(outcome.err.find("no terminal: answer with tessera learn 7 --answer"), std::string::npos) << outcome.err;
    EXPECT_EQ(learn("7 --show").err, "");
    const auto json = learn("7 --json").json();
    EXPECT_EQ(json.at("lesson"), 7);
    EXPECT_FALSE(json.contains("answer")) << "gives the answer away";
}

TEST_F(LearnTest, bad_calls_are_refused) {
    expect_error("learn 15", 2, "LESSON: expected 1 to 14, got \"15\"");
    expect_error("learn six", 2, "LESSON");
    expect_error("learn --answer 3", 2, "--answer: expected a lesson with it");
    expect_error("learn 6 --answer much", 2, "--answer: expected a number");
    expect_error("learn 1 --answer '12 miles'", 2, "a number of MiB");
    EXPECT_EQ(learn("6 --picture /nonexistent/p.svg").code, 73);
    expect_error("learn 6 --picture p.png", 2, "--picture: expected a name that ends in .svg");
    std::ofstream(path("notes.svg")) << "precious";
    expect_error("learn 6 --picture notes.svg", 73, "notes.svg: expected a new file or drawing written by tessera");
    EXPECT_EQ(text_of(path("notes.svg")), "precious");
}

TEST_F(LearnTest, what_cannot_be_kept_is_told_after_the_answer) {
    std::filesystem::create_directories(path("state/tessera"));
    std::ofstream(kept()) << "precious";
    const Outcome outcome = learn("6 --answer 23/16");
    EXPECT_EQ(outcome.code, 65);
    EXPECT_NE(outcome.out.find("Right"), std::string::npos);
    EXPECT_EQ(text_of(kept()), "precious");
    const Outcome nowhere = run("learn 6 --answer 23/16", "unset XDG_STATE_HOME HOME;");
    EXPECT_EQ(nowhere.code, 0);
    EXPECT_NE(nowhere.err.find("not saved"), std::string::npos);
}

TEST_F(LearnTest, pictures_are_written) {
    EXPECT_EQ(learn("9 --picture p.svg").code, 0);
    EXPECT_NE(text_of(path("p.svg")).find("28 full"), std::string::npos);
    for (int lesson = 1; lesson <= 14; ++lesson) {
        const std::string call = std::to_string(lesson) + " --picture p.svg";
        EXPECT_EQ(learn(call).code, 0) << "over the picture of another lesson: " << call;
    }
}

}  // namespace
}  // namespace tessera::learn_command_test
