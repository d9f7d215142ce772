// SPDX-License-Identifier: Apache-2.0
#include "io/file.hpp"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <memory>

#include "io/atomic_file.hpp"
#include "io/memory.hpp"
#include "io/npy.hpp"
#include "io/safetensors.hpp"
#include "io_test_util.hpp"

namespace tessera::io::test::file_test {
namespace {

std::string text_of(const FileBytes& bytes) { return {reinterpret_cast<const char*>(bytes.data.get()), bytes.size}; }

TEST(ReadFile, gives_every_byte_aligned) {
    const Folder folder;
    put_file(folder.file("a"), counting(1000));
    const FileBytes bytes = read_file(folder.file("a"));
    EXPECT_EQ(text_of(bytes), counting(1000));
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(bytes.data.get()) % kAlignment, 0U);
}

TEST(ReadFile, takes_an_empty_file) {
    const Folder folder;
    put_file(folder.file("a"), "");
    EXPECT_EQ(read_file(folder.file("a")).size, 0U);
}

TEST(ReadFile, refuses_a_missing_file) {
    const Folder folder;
    expect_error(ErrorCode::cannot_open, "No such file", [&] { read_file(folder.file("missing")); });
}

TEST(ReadFile, refuses_a_folder) {
    const Folder folder;
    expect_error(ErrorCode::cannot_open, "it is a directory", [&] { read_file(folder.path()); });
}

TEST(ReadFile, refuses_a_fifo_without_waiting) {
    const Folder folder;
    ASSERT_EQ(::mkfifo(folder.file("fifo").c_str(), 0600), 0);
    expect_error(ErrorCode::cannot_open, "it is a FIFO", [&] { read_file(folder.file("fifo")); });
    expect_error(ErrorCode::cannot_open, "it is a FIFO", [&] { read_npy(folder.file("fifo")); });
    expect_error(ErrorCode::cannot_open, "it is a FIFO", [&] { read_safetensors(folder.file("fifo")); });
}

TEST(ReadFile, refuses_a_device) {
    expect_error(ErrorCode::cannot_open, "/dev/zero: expected a regular file, it is a device",
                 [] { read_file("/dev/zero"); });
}

TEST(ReadFile, refuses_a_file_over_the_memory_limit) {
    const Folder folder;
    put_file(folder.file("a"), counting(100));
    expect_error(ErrorCode::out_of_memory, "at most 99 bytes", [&] { read_file(folder.file("a"), 99); });
    EXPECT_EQ(read_file(folder.file("a"), 100).size, 100U);
}

TEST(ReadFile, refuses_a_sparse_file_larger_than_the_machine) {
    const Folder folder;
    const std::string path = folder.file("sparse.npy");
    constexpr std::uint64_t kSize = std::uint64_t{1} << 42;
    std::string start = "\x93NUMPY";
    const std::string dict = "{'descr': '|u1', 'fortran_order': False, 'shape': (" + std::to_string(kSize) + ",), }\n";
    put_file(path, start + '\1' + '\0' + little_endian(dict.size(), 2) + dict);
    const auto size = static_cast<off_t>(10 + dict.size() + kSize);
    if (::truncate(path.c_str(), size) != 0 || memory_state().left > kSize)
        GTEST_SKIP() << "no sparse file of 4 TiB here";
    expect_error(ErrorCode::out_of_memory, path, [&] { read_npy(path); });
}

TEST(ReadFile, reports_a_file_that_shrinks_while_it_is_read) {
    const Folder folder;
    put_file(folder.file("a"), counting(100));
    const InputFile file(folder.file("a"));
    ASSERT_EQ(::truncate(folder.file("a").c_str(), 50), 0);
    Bytes bytes(100);
    expect_error(ErrorCode::bad_data, "expected 100 bytes at offset 0, got 50", [&] { file.read(0, bytes); });
}

TEST(AtomicFile, appears_only_when_committed) {
    const Folder folder;
    AtomicFile file(folder.file("out"));
    file.write(to_bytes("hello "));
    file.write(to_bytes("world"));
    EXPECT_FALSE(std::filesystem::exists(folder.file("out")));
    ASSERT_EQ(folder.names().size(), 1U);
    EXPECT_EQ(folder.names()[0].find(".out.tmp." + std::to_string(::getpid()) + "."), 0U) << folder.names()[0];
    file.commit();
    EXPECT_EQ(folder.names(), std::vector<std::string>{"out"});
    EXPECT_EQ(get_file(folder.file("out")), "hello world");
    EXPECT_THROW(file.commit(), Error);
}

TEST(AtomicFile, leaves_nothing_without_commit_and_keeps_the_old_content) {
    const Folder folder;
    put_file(folder.file("out"), "old");
    { AtomicFile(folder.file("out")).write(to_bytes("new")); }
    EXPECT_EQ(folder.names(), std::vector<std::string>{"out"});
    EXPECT_EQ(get_file(folder.file("out")), "old");
}

TEST(AtomicFile, replaces_a_file_and_keeps_its_permissions) {
    const Folder folder;
    put_file(folder.file("out"), "old");
    std::filesystem::permissions(folder.file("out"), std::filesystem::perms{0640});
    AtomicFile file(folder.file("out"));
    file.write(to_bytes("new"));
    file.commit();
    EXPECT_EQ(get_file(folder.file("out")), "new");
    EXPECT_EQ(std::filesystem::status(folder.file("out")).permissions(), std::filesystem::perms{0640});
}

TEST(AtomicFile, follows_a_symbolic_link) {
    const Folder folder;
    put_file(folder.file("real"), "old");
    std::filesystem::create_symlink("real", folder.file("link"));
    AtomicFile file(folder.file("link"));
    file.write(to_bytes("new"));
    file.commit();
    EXPECT_TRUE(std::filesystem::is_symlink(folder.file("link")));
    EXPECT_EQ(get_file(folder.file("real")), "new");
}

TEST(AtomicFile, follows_symbolic_links_to_no_file_yet) {
    const Folder folder;
    std::filesystem::create_directory(folder.file("sub"));
    std::filesystem::create_symlink("sub/second", folder.file("first"));
    std::filesystem::create_symlink("third", folder.file("sub/second"));
    AtomicFile file(folder.file("first"));
    file.write(to_bytes("new"));
    file.commit();
    EXPECT_TRUE(std::filesystem::is_symlink(folder.file("first")));
    EXPECT_EQ(get_file(folder.file("sub/third")), "new");
    std::filesystem::create_symlink("loop", folder.file("loop"));
    try {
        AtomicFile endless(folder.file("loop"));
        ADD_FAILURE() << "a link to itself is no place for a file";
    } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::cannot_write);
    }
}

TEST(AtomicFile, takes_a_bare_name_and_a_name_of_the_longest_length) {
    const Folder folder;
    const auto before = std::filesystem::current_path();
    std::filesystem::current_path(folder.path());
    const std::string longest(255, 'n');
    AtomicFile file(longest);
    file.commit();
    std::filesystem::current_path(before);
    EXPECT_EQ(folder.names(), std::vector<std::string>{longest});
}

TEST(AtomicFile, reports_a_missing_folder) {
    const Folder folder;
    const std::string path = folder.file("missing/out.npy");
    expect_error(ErrorCode::cannot_write, path, [&] { AtomicFile file(path); });
    const float value = 1;
    const TensorView view = dense_view(&value, DType::fp32, {1});
    expect_error(ErrorCode::cannot_write, "No such file", [&] { write_npy(path, view); });
    EXPECT_TRUE(folder.names().empty());
}

TEST(AtomicFile, refuses_targets_that_are_no_regular_files) {
    const Folder folder;
    ASSERT_EQ(::mkfifo(folder.file("fifo").c_str(), 0600), 0);
    expect_error(ErrorCode::cannot_write, "regular file", [&] { AtomicFile file(folder.file("fifo")); });
    expect_error(ErrorCode::cannot_write, "regular file", [&] { AtomicFile file(folder.path()); });
    expect_error(ErrorCode::cannot_write, "name of a file", [&] { AtomicFile file(folder.path() + "/"); });
    expect_error(ErrorCode::cannot_write, "name of a file", [] { AtomicFile file(""); });
    expect_error(ErrorCode::cannot_write, "regular file", [] { AtomicFile file("/dev/null"); });
    EXPECT_EQ(folder.names(), std::vector<std::string>{"fifo"});
}

TEST(AtomicFile, leaves_nothing_when_the_disk_is_full) {
    const Folder folder;
    put_file(folder.file("out.npy"), "old");
    struct rlimit old {};
    ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &old), 0);
    const auto old_handler = std::signal(SIGXFSZ, SIG_IGN);
    const struct rlimit small { 4096, old.rlim_max };
    ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
    const std::vector<float> values(10000, 1.0F);
    const TensorView view = dense_view(values.data(), DType::fp32, {100, 100});
    const std::pair<std::string, TensorView> named[] = {{"q", view}};
    expect_error(ErrorCode::cannot_write, "out.npy: cannot write: File too large",
                 [&] { write_npy(folder.file("out.npy"), view); });
    expect_error(ErrorCode::cannot_write, "cannot write",
                 [&] { write_npy(folder.file("t.npy"), transposed(view, 0, 1)); });
    expect_error(ErrorCode::cannot_write, "cannot write", [&] { write_safetensors(folder.file("s"), named); });
    ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &old), 0);
    std::signal(SIGXFSZ, old_handler);
    EXPECT_EQ(folder.names(), std::vector<std::string>{"out.npy"});
    EXPECT_EQ(get_file(folder.file("out.npy")), "old");
}

TEST(AtomicFile, an_invalid_view_touches_no_file) {
    const Folder folder;
    TensorView view{.dtype = DType::fp32, .rank = 1};
    view.shape[0] = 4;
    expect_error(ErrorCode::invalid_argument, "null pointer", [&] { write_npy(folder.file("out.npy"), view); });
    EXPECT_TRUE(folder.names().empty());
}

TEST(AtomicFile, refuses_more_than_the_registry_holds) {
    const Folder folder;
    std::vector<std::unique_ptr<AtomicFile>> files;
    expect_error(ErrorCode::cannot_write, "at most 64 output files", [&] {
        for (int i = 0; i < 100; ++i) files.push_back(std::make_unique<AtomicFile>(folder.file(std::to_string(i))));
    });
    EXPECT_EQ(files.size(), 64U);
    files.clear();
    EXPECT_TRUE(folder.names().empty());
    AtomicFile(folder.file("again")).commit();
}

TEST(RemoveUncommittedFiles, removes_the_temporary_and_fails_the_commit) {
    const Folder folder;
    {
        AtomicFile done(folder.file("done"));
        done.commit();
        AtomicFile file(folder.file("out"));
        file.write(to_bytes("half"));
        remove_uncommitted_files();
        EXPECT_EQ(folder.names(), std::vector<std::string>{"done"});
        expect_error(ErrorCode::cannot_write, "cannot rename", [&] { file.commit(); });
    }
    AtomicFile next(folder.file("out"));
    next.commit();
    EXPECT_EQ(folder.names().size(), 2U);
}

TEST(RemoveUncommittedFiles, works_in_a_signal_handler) {
    const Folder folder;
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
        std::signal(SIGINT, [](int) {
            remove_uncommitted_files();
            ::_exit(130);
        });
        AtomicFile file(folder.file("out"));
        file.write(to_bytes("half"));
        std::raise(SIGINT);
        ::_exit(1);
    }
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_EQ(WEXITSTATUS(status), 130);
    EXPECT_TRUE(folder.names().empty());
}

TEST(RemoveUncommittedFiles, in_a_forked_child_leaves_the_parents_file_alone) {
    const Folder folder;
    AtomicFile file(folder.file("out"));
    file.write(to_bytes("whole"));
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
        remove_uncommitted_files();
        ::_exit(0);
    }
    ASSERT_EQ(::waitpid(child, nullptr, 0), child);
    file.commit();
    EXPECT_EQ(get_file(folder.file("out")), "whole");
}

}  // namespace
}  // namespace tessera::io::test::file_test
