// SPDX-License-Identifier: Apache-2.0
//
// Runs the command as a shell user does, and returns its exit code and output.
#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "measure/record.hpp"

namespace tessera {

inline const std::string kSample = TESSERA_SOURCE_DIR "/examples/data/kjv-layer2.safetensors";
inline const std::string kSampleOptions = kSample + " --layout bhsd --causal bottom-right --scale 0.125";

/// Hosts for TESSERA_FAKE_HOST (measure/host.hpp). The model knows the last one.
inline const std::string kUnknownHost =
    "cpu=a processor that no machine has; isa=AVX2; matrix_unit=; cores=3; cache_mib=7";
inline const std::string kCloudXeon2 = "cpu=Intel(R) Xeon(R) Processor; isa=AVX3; matrix_unit=; cores=2; cache_mib=300";
inline const std::string kXeon16 = "cpu=Intel(R) Xeon(R) Processor; isa=AVX3; matrix_unit=AMX; cores=16; cache_mib=300";

struct Outcome {
    int code = -1;  ///< exit code; 128 + n when signal n ended it
    std::string out;
    std::string err;

    nlohmann::json json() const { return nlohmann::json::parse(out); }
};

inline std::string text_of(const std::filesystem::path& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
}

/// Each test works in an empty folder of its own.
class CommandTest : public testing::Test {
 protected:
    void SetUp() override {
        std::string pattern = (std::filesystem::temp_directory_path() / "tessera_cli_XXXXXX").string();
        ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
        root_ = pattern;
        std::filesystem::create_directory(folder());
    }
    void TearDown() override { std::filesystem::remove_all(root_); }

    std::filesystem::path folder() const { return root_ / "work"; }
    std::string path(const std::string& name) const { return (folder() / name).string(); }

    /// `tessera ARGUMENTS` in folder(); `shell` is put before it ("ulimit -f 1;"), `redirect` after it.
    Outcome run(const std::string& arguments, const std::string& shell = "", const std::string& redirect = "") const {
        const std::string script = fmt::format("cd {0}/work || exit 99\n{{ {1} {2} {3}; }} >{0}/out 2>{0}/err {4}",
                                               root_.string(), shell, TESSERA_COMMAND, arguments, redirect);
        const int status = std::system(script.c_str());
        const int code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
        return {code, text_of(root_ / "out"), text_of(root_ / "err")};
    }

    /// run() on a faked host, expecting success.
    Outcome run_on(const std::string& host, const std::string& arguments) const {
        Outcome outcome = run(arguments, fmt::format("TESSERA_FAKE_HOST='{}'", host));
        EXPECT_EQ(outcome.code, 0) << "tessera " << arguments << " on " << host << "\n" << outcome.err;
        return outcome;
    }

    /// run(), expecting success.
    Outcome run_ok(const std::string& arguments) const {
        Outcome outcome = run(arguments);
        EXPECT_EQ(outcome.code, 0) << "tessera " << arguments << "\n" << outcome.err;
        return outcome;
    }

    /// Expects this exit code, one line "tessera: error: ..." that holds `message`, nothing on stdout.
    void expect_error(const std::string& arguments, int code, const std::string& message) const {
        const Outcome outcome = run(arguments);
        EXPECT_EQ(outcome.code, code) << "tessera " << arguments << "\n" << outcome.err;
        EXPECT_EQ(outcome.out, "") << arguments;
        EXPECT_NE(outcome.err.find("tessera: error: "), std::string::npos) << arguments << "\n" << outcome.err;
        EXPECT_NE(outcome.err.find(message), std::string::npos) << arguments << "\n" << outcome.err;
    }

    /// Expects `text` on stdout; expect_note() expects it on stderr.
    static void expect_says(const Outcome& outcome, const std::string& text) {
        EXPECT_NE(outcome.out.find(text), std::string::npos) << text << "\n" << outcome.out;
    }
    static void expect_note(const Outcome& outcome, const std::string& text) {
        EXPECT_NE(outcome.err.find(text), std::string::npos) << text << "\n" << outcome.err;
    }

    /// The Records of a file without predictions, which exist only on a machine that the model knows.
    std::vector<measure::Record> measured_records(const std::string& name) const {
        std::vector<measure::Record> records = measure::read_records(path(name));
        std::erase_if(records, [](const measure::Record& record) { return record.what != "measured"; });
        return records;
    }

    /// The names in folder().
    std::set<std::string> names() const {
        std::set<std::string> result;
        for (const auto& entry : std::filesystem::directory_iterator(folder()))
            result.insert(entry.path().filename().string());
        return result;
    }

 private:
    std::filesystem::path root_;
};

}  // namespace tessera
