// SPDX-License-Identifier: Apache-2.0
#include "progress.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <string_view>

#include "parallel.hpp"
#include "table.hpp"

namespace tessera::cli {
namespace {

constexpr std::chrono::milliseconds kHidden{1000};  // time without a bar
constexpr std::chrono::milliseconds kRedraw{100};
constexpr int kBarWidth = 24;

std::atomic<bool> line_on_screen{false};
std::mutex terminal;

void write_to_terminal(std::string_view text) noexcept {
    [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, text.data(), text.size());
}

/// True if stderr is a terminal that can clear a line; one named "dumb" cannot.
bool can_draw_bar() {
    const char* name = std::getenv("TERM");
    return ::isatty(STDERR_FILENO) == 1 && (name == nullptr || std::string_view(name) != "dumb");
}

}  // namespace

void clear_progress_line() noexcept {
    if (line_on_screen.exchange(false)) write_to_terminal("\r\033[K");
}

std::unique_lock<std::mutex> terminal_without_progress() {
    std::unique_lock lock(terminal);
    clear_progress_line();
    return lock;
}

Progress::Progress(std::int64_t steps) : steps_(std::max<std::int64_t>(steps, 1)) {
    if (can_draw_bar()) drawer_ = std::thread(&Progress::draw_until_done, this);
}

Progress::~Progress() {
    {
        const std::lock_guard lock(mutex_);
        ended_ = true;
    }
    wake_.notify_one();
    if (drawer_.joinable()) drawer_.join();
    clear_progress_line();
}

void Progress::step(const std::string& label) {
    const std::lock_guard lock(mutex_);
    ++begun_;
    label_ = label;
    tasks_ = 0;
    tasks_done_ = 0;
}

ParallelFor Progress::counted_parallel_for() {
    return [this](std::int64_t tasks, int workers, const TaskBody& body) {
        expect(tasks);
        default_parallel_for(tasks, workers, [&](std::int64_t task, int worker) {
            body(task, worker);
            done();
        });
    };
}

void Progress::draw_until_done() {
    std::unique_lock lock(mutex_);
    if (wake_.wait_for(lock, kHidden, [&] { return ended_; })) return;
    do {
        const std::lock_guard own_terminal(terminal);
        write_to_terminal(line());
        line_on_screen = true;
    } while (!wake_.wait_for(lock, kRedraw, [&] { return ended_; }));
}

std::string Progress::line() const {
    const std::int64_t tasks = std::max<std::int64_t>(tasks_, 1);
    const double part = std::min(1.0, static_cast<double>(tasks_done_) / static_cast<double>(tasks));
    const double whole =
        (static_cast<double>(std::max<std::int64_t>(begun_ - 1, 0)) + part) / static_cast<double>(steps_);
    const int filled = std::clamp(static_cast<int>(whole * kBarWidth), 0, kBarWidth);
    const std::string text =
        fmt::format("[{:#<{}}{:.<{}}] {:3.0f}%  {}", "", filled, "", kBarWidth - filled, whole * 100, label_);
    return "\r\033[K" + text.substr(0, static_cast<std::size_t>(terminal_width(STDERR_FILENO) - 1));
}

}  // namespace tessera::cli
