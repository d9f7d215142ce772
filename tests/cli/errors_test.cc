// SPDX-License-Identifier: Apache-2.0
//
// Every way to fail: the exit code, the message, and that nothing is left behind.
#include <pty.h>

#include <algorithm>
#include <csignal>
#include <map>
#include <thread>

#include "device/device_copy.hpp"
#include "io/safetensors.hpp"
#include "process.hpp"

namespace tessera::errors_test {
namespace {

class ErrorsTest : public CommandTest {
 protected:
    /// Gives tensors of a file in the work folder other names.
    void rename_tensors(const std::string& file, const std::map<std::string, std::string>& names) const {
        const io::TensorFile read = io::read_safetensors(path(file));
        std::vector<std::pair<std::string, TensorView>> views;
        for (const io::NamedTensor& tensor : read.tensors()) {
            const auto other = names.find(tensor.name);
            views.emplace_back(other == names.end() ? tensor.name : other->second, read.view(tensor));
        }
        io::write_safetensors(path(file), views);
    }
};

using Names = std::set<std::string>;

TEST_F(ErrorsTest, usage_is_two_and_names_the_option) {
    expect_error("", 2, "COMMAND: expected one of run");
    expect_error("help nosuch", 2, "COMMAND: expected one of run");
    expect_error("help nosuch", 2, "got \"nosuch\"");
    expect_says(run_ok("help"), "Usage: tessera COMMAND");
    expect_says(run_ok("help roofline"), "Usage: tessera roofline");
    expect_error("roofline --dev h200", 2, "--dev: expected an option of tessera roofline, perhaps --device");
    expect_error("frobnicate", 2, "got \"frobnicate\"");
    expect_error("list --bogus", 2, "--bogus: expected an option of tessera list");
    expect_error("roofline --lne 64", 2, "--lne: expected an option of tessera roofline, perhaps --len");
    expect_error("calibrate -o no/such/folder/x.json", 73, "no/such/folder");
    expect_error("run", 2, "FILE");
    expect_error("run a.npy b.npy", 2, "FILE: expected one .safetensors file, or .npy files q k v [do]");
    expect_error("why --heads 3/2", 2, "--heads: expected a multiple of heads_kv = 2, got 3");
    expect_error("why --head-dim 257", 2, "--head-dim: expected 1..256, got 257");
    expect_error("why --len 1,2", 2, "--len: expected one value, got \"1,2\"");
    expect_error("why --len 12x", 2, "--len: expected a whole number");
    expect_error("why --len", 2, "--len: expected a value, got nothing");
    expect_error("why --len 1 --len 2", 2, "--len: expected once");
    expect_error("why --ragged 5 --batch 2", 2, "--ragged: gives the batch");
    expect_error("why --dtype int8", 2, "--dtype: expected one of fp32");
    expect_error("bench --pass sideways", 2, "--pass: expected one of forward, backward");
    expect_error("bench --repeat 0", 2, "--repeat: expected 1..");
    expect_error("gen -o x.npy", 2, "--output: expected a name that ends in .safetensors");
    expect_error("gen", 2, "--output");
    expect_error("list --json=banana", 2, "--json: expected true, false or nothing after it, got \"banana\"");
    for (const char* command : {"bench --len 8", "calibrate", "report r.jsonl", "roofline --len 64 --svg"}) {
        std::ofstream(path("r.jsonl")) << "";
        const bool named = std::string(command).ends_with("--svg");
        expect_error(fmt::format("{} {}", command, named ? "-" : "-o -"), 2,
                     "-: expected a file; /dev/stdout is standard output");
        EXPECT_FALSE(std::filesystem::exists(path("-"))) << command;
    }
}

TEST_F(ErrorsTest, usage_of_run) {
    const std::string run = "run " + kSample + " --layout bhsd";
    expect_error(run + " --window -1,0", 2, "the negative -1");
    expect_error(run + " --window 5", 2, "--window: expected LEFT,RIGHT");
    expect_error(run + " --softcap -1", 2, "--softcap: expected 0 (none) or a finite number > 0, got -1");
    expect_error(run + " --scale abc", 2, "--scale: expected a number, got \"abc\"");
    expect_error(run + " --scale nan", 2, "--scale: ");
    expect_error(run + " --dropout 1", 2, "--dropout: expected a probability in [0, 1), got 1");
    expect_error(run + " --schedule fa9", 2, "--schedule: expected one of auto, standard, fa1, fa2, fa3");
    expect_error(run + " --threads 0", 2, "--threads: expected 1..1024, got \"0\"");
    expect_error(run + " --tile 64", 2, "--tile: expected Q,KV");
    expect_error(run + " --tile 0,64", 2, "--tile: expected 1..4096, got 0");
    expect_error(run + " --dlse q", 2, "--dlse: expected --backward with it");
    expect_error(run + " -o out.npy", 2, "--output: expected a name that ends in .safetensors");
    EXPECT_EQ(names(), Names{});
}

TEST_F(ErrorsTest, bad_data_is_65) {
    std::ofstream(path("garbage.safetensors")) << "not a tensor file at all";
    expect_error("run garbage.safetensors", 65, "garbage.safetensors");
    expect_error("run " + kSampleOptions + " --q nope", 65,
                 "expected a tensor \"nope\" (q), the file has \"do\", \"k\", \"o\", \"q\", \"v\"");
    expect_error("run garbage.safetensors", 65, "it is text that begins with \"not a tensor file");
    run_ok("gen --len 8 --heads 2 --head-dim 4 -o named.safetensors");
    rename_tensors("named.safetensors", {{"q", "layers.0.query"}, {"k", "layers.0.key"}, {"v", "w"}});
    expect_error("run named.safetensors", 65, "; name the tensors by --q layers.0.query --k layers.0.key --v NAME");
    run_ok("run named.safetensors --q layers.0.query --k layers.0.key --v w");
    std::filesystem::remove(path("named.safetensors"));
    expect_error("run " + kSampleOptions + " --k o --v do --bias q", 65, "bias: expected [1, 4, 1500, 1500]");
    expect_error("run " + kSample + " --cu-seqlens-q q --cu-seqlens-kv q", 65, "rank 3");
    run_ok("gen --len 8 --heads 2 --head-dim 4 -o a.safetensors");
    std::filesystem::resize_file(path("a.safetensors"), std::filesystem::file_size(path("a.safetensors")) - 1);
    expect_error("run a.safetensors", 65, "a.safetensors");
    EXPECT_EQ(names(), (Names{"a.safetensors", "garbage.safetensors"}));
}

TEST_F(ErrorsTest, cannot_open_is_66) {
    expect_error("run missing.safetensors", 66, "missing.safetensors: cannot open: No such file");
    expect_error("run " + folder().string(), 66, "directory");
    expect_error("run q.npy k.npy v.npy", 66, "q.npy");
}

TEST_F(ErrorsTest, what_is_not_built_is_69) {
    const auto list = run_ok("list --json").json();
    const auto has = [&](const std::string& field, const std::string& value) {
        for (const auto& kernel : list.at("kernels")) {
            if (kernel.at(field) == value) return true;
        }
        return false;
    };
    if (!has("backend", "cuda")) {
        expect_error("run " + kSampleOptions + " --backend cuda", 69, "--backend: this build has no cuda kernels");
    } else if (!device::cuda_available()) {
        expect_error("run " + kSampleOptions + " --backend cuda", 69, "--backend: no CUDA device: ");
        expect_error("why --backend cuda", 69, "--backend: no CUDA device: ");
        expect_error("check --backend cuda", 69, "--backend: no CUDA device");
        expect_error("check --kernel cuda.fa2.forward", 69, "--kernel: no CUDA device");
    }
    if (!has("schedule", "fa3"))
        expect_error("why --schedule fa3", 69, "--schedule: this build has no forward kernel of schedule fa3");
}

/// A kernel that refuses a case that it has to take fails the check, though it computed nothing wrong.
TEST_F(ErrorsTest, check_fails_when_a_kernel_refuses_what_it_takes) {
    const std::string check = "check --kernel cpu.fa2.forward --case causal_square";
    EXPECT_NE(run_ok(check).out.find("ok: 1 case"), std::string::npos);
    const Outcome outcome = run(check, "TESSERA_MAX_ISA=AVX9");
    EXPECT_EQ(outcome.code, 1);
    EXPECT_NE(outcome.out.find("refused a problem that it must take: "), std::string::npos) << outcome.out;
    EXPECT_NE(outcome.out.find("TESSERA_MAX_ISA: expected SSE4, AVX2, AVX3, AVX512-BF16 or AMX, got \"AVX9\""),
              std::string::npos)
        << outcome.out;
    EXPECT_NE(outcome.out.find("FAIL: 1 of the runs"), std::string::npos) << outcome.out;
}

TEST_F(ErrorsTest, out_of_memory_is_71) {
    expect_error("gen --len 60000000 --heads 64 --head-dim 256 -o big.safetensors", 71, "q");
    EXPECT_EQ(names(), Names{});
}

TEST_F(ErrorsTest, cannot_write_is_73) {
    expect_error("gen --len 8 -o no/such/folder.safetensors", 73, "no/such/folder.safetensors");
    expect_error("run " + kSampleOptions + " -o no/such/folder.safetensors", 73, "no/such/folder.safetensors");
    expect_error("bench --len 8 -o no/such/folder.jsonl", 73, "no/such/folder.jsonl");
    EXPECT_EQ(run("list", "", ">/dev/full").code, 73);
    EXPECT_EQ(run("list --json", "", ">&-").code, 73);
    EXPECT_EQ(run("gen --len 64 -o x.safetensors", "ulimit -f 1;").code, 73);
    EXPECT_EQ(run("bench --len 8 --json -o x.jsonl", "ulimit -f 0;").code, 73);  // stdout is written last
    EXPECT_EQ(names(), Names{});
}

TEST_F(ErrorsTest, a_newline_in_a_name_begins_no_line) {
    const Outcome outcome = run("run 'no such\nfile.safetensors'");
    EXPECT_EQ(outcome.code, 66);
    EXPECT_NE(outcome.err.find("no such\\x0afile.safetensors"), std::string::npos) << outcome.err;
    EXPECT_EQ(std::count(outcome.err.begin(), outcome.err.end(), '\n'), 1) << outcome.err;
}

TEST_F(ErrorsTest, an_output_may_be_a_link_to_no_file_yet) {
    std::filesystem::create_symlink("later.safetensors", path("link.safetensors"));
    run_ok("gen --len 8 --heads 2 --head-dim 4 -o link.safetensors");
    EXPECT_EQ(names(), (Names{"later.safetensors", "link.safetensors"}));
    EXPECT_TRUE(std::filesystem::is_symlink(path("link.safetensors")));
}

TEST_F(ErrorsTest, an_output_is_never_an_input) {
    run_ok("gen --len 8 --heads 2 --head-dim 4 -o a.safetensors");
    std::filesystem::create_symlink("a.safetensors", path("link.safetensors"));
    std::filesystem::create_hard_link(path("a.safetensors"), path("hard.safetensors"));
    const std::string before = text_of(path("a.safetensors"));
    expect_error("run link.safetensors -o a.safetensors", 2, "--output: expected another file than the input");
    expect_error("run a.safetensors -o link.safetensors", 2, "--output");
    expect_error("run a.safetensors -o hard.safetensors", 2, "--output");
    EXPECT_EQ(text_of(path("a.safetensors")), before);
}

TEST_F(ErrorsTest, closed_output_does_not_reach_files) {
    // With stdout closed, the output file must not become descriptor 1 and receive the report.
    const Outcome outcome = run("gen --len 8 --heads 2 --head-dim 4 -o a.safetensors", "", ">&-");
    EXPECT_EQ(outcome.code, 73);
    run_ok("run a.safetensors");
}

TEST_F(ErrorsTest, a_reader_that_leaves_ends_the_command_quietly) {
    int ends[2];
    ASSERT_EQ(::pipe(ends), 0);
    ::close(ends[0]);
    const Outcome outcome = run("list", "", fmt::format(">&{}", ends[1]));
    ::close(ends[1]);
    EXPECT_EQ(outcome.code, 128 + SIGPIPE);
    EXPECT_EQ(outcome.err, "");
}

/// Starts the command with nothing but the default reaction to signals.
pid_t start(const std::vector<std::string>& arguments) {
    const pid_t child = ::fork();
    if (child != 0) return child;
    ::signal(SIGINT, SIG_DFL);
    ::signal(SIGTERM, SIG_DFL);
    ::signal(SIGHUP, SIG_DFL);
    std::vector<char*> argv;
    for (const std::string& a : arguments) argv.push_back(const_cast<char*>(a.c_str()));
    argv.push_back(nullptr);
    if (::freopen("/dev/null", "w", stdout) != nullptr) ::execv(TESSERA_COMMAND, argv.data());
    ::_exit(99);
}

/// Sends a signal, and returns how the command ended: its exit code, or minus the signal that killed it.
int code_after_signal(pid_t child, int signal_number) {
    ::kill(child, signal_number);
    int status = 0;
    ::waitpid(child, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

TEST_F(ErrorsTest, interrupted_is_130_and_keeps_what_is_done) {
    const std::string records = path("r.jsonl");
    const std::vector<std::string> bench = {"tessera", "bench", "--len", "8,2048", "--repeat", "100000", "-o", records};
    for (const auto& [signal_number, code] : {std::pair{SIGINT, 130}, {SIGTERM, 143}, {SIGHUP, 129}}) {
        std::filesystem::remove(records);
        const pid_t child = start(bench);
        // The command creates the file when it begins to measure, which takes longer than any test.
        while (!std::filesystem::exists(records) && ::waitpid(child, nullptr, WNOHANG) == 0)
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
        EXPECT_EQ(code_after_signal(child, signal_number), code);
    }
    for (const std::string& name : names()) EXPECT_EQ(name, "r.jsonl");
}

/// The output of stderr within some time of a long run, to a terminal or to a pipe; "none" where neither can be made.
std::string stderr_of_a_long_run(bool terminal) {
    int ends[2];
    if ((terminal ? ::openpty(&ends[0], &ends[1], nullptr, nullptr, nullptr) : ::pipe(ends)) != 0) return "none";
    const pid_t child = ::fork();
    if (child == 0) {
        ::dup2(ends[1], STDERR_FILENO);
        ::close(ends[0]);
        ::setenv("TERM", "xterm", 1);
        if (::freopen("/dev/null", "w", stdout) != nullptr)
            ::execl(TESSERA_COMMAND, "tessera", "bench", "--len", "64", "--repeat", "1", "--warm-up", "1600",
                    "--backend", "reference", nullptr);
        ::_exit(99);
    }
    ::close(ends[1]);
    std::string text;
    char buffer[4096];
    for (ssize_t n = 0; (n = ::read(ends[0], buffer, sizeof buffer)) > 0;)
        text.append(buffer, static_cast<std::size_t>(n));
    ::close(ends[0]);
    int status = 0;
    ::waitpid(child, &status, 0);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << text;
    return text;
}

TEST_F(ErrorsTest, progress_is_for_terminals) {
    const std::string seen = stderr_of_a_long_run(true);
    if (seen == "none") GTEST_SKIP() << "no pseudo-terminal can be opened here (is /dev/pts mounted?)";
    EXPECT_NE(seen.find("\r\033[K["), std::string::npos) << "no bar after a second: " << seen;
    EXPECT_EQ(seen.rfind("\r\033[K"), seen.size() - 4) << "the bar stays: " << seen;
    EXPECT_EQ(stderr_of_a_long_run(false).find('\r'), std::string::npos);
}

TEST_F(ErrorsTest, interrupted_write_leaves_nothing) {
    const std::string target = path("big.safetensors");
    const pid_t child = start({"tessera", "gen", "--len", "20000", "--heads", "16", "-o", target});
    while (names().empty() && ::waitpid(child, nullptr, WNOHANG) == 0)
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    EXPECT_EQ(names().count("big.safetensors"), 0U);  // the temporary file is there, under a name of its own
    EXPECT_EQ(code_after_signal(child, SIGINT), 130);
    EXPECT_EQ(names(), Names{});
}

TEST_F(ErrorsTest, hostile_names_do_not_reach_the_terminal) {
    const Outcome outcome = run("run \"$(printf 'a\\033[31m\\nb')\"");
    EXPECT_EQ(outcome.code, 66);
    EXPECT_EQ(outcome.err.find('\033'), std::string::npos);
}

}  // namespace
}  // namespace tessera::errors_test
