// SPDX-License-Identifier: Apache-2.0
#include "ready_workers.hpp"

#include <atomic>
#include <chrono>
#include <mutex>
#include <thread>

#if defined(__unix__)
#include <unistd.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace tessera {
namespace {

/// How long a thread looks for work before it sleeps: longer than the pause between the calls of a model's layers.
constexpr std::chrono::microseconds kReadyFor{200};

void pause_briefly() {
#if defined(__x86_64__)
    _mm_pause();
#endif
}

/// Spins until done(), and yields now and then, since other threads may need the core.
template <class Done>
void spin_until(const Done& done) {
    for (int spins = 0; !done(); ++spins) {
        if (spins < 1024) pause_briefly();
        else std::this_thread::yield();
    }
}

class Workers {
 public:
    bool run(int workers, const std::function<void(int)>& loop) {
        const std::unique_lock<std::mutex> own(in_use_, std::try_to_lock);
        if (!own.owns_lock()) return false;
        grow(workers - 1);
        loop_ = &loop;
        finished_.store(0, std::memory_order_relaxed);
        ++call_;
        // One number says which call it is, how many threads it takes and how many have joined.
        gate_.store(call_ << kCallShift | static_cast<std::uint64_t>(workers - 1) << kWorkersShift);
        if (sleepers_.load() > 0) gate_.notify_all();
        loop(0);
        const std::uint64_t closed =
            gate_.fetch_and(~(kMask << kWorkersShift));  // takes no worker, so no thread joins any more
        spin_until([&] { return finished_.load(std::memory_order_acquire) == (closed & kMask); });
        return true;
    }

 private:
    static constexpr int kWorkersShift = 12;
    static constexpr int kCallShift = 24;
    static constexpr std::uint64_t kMask = 0xFFF;

    void grow(int threads) {
        for (; threads_ < threads; ++threads_) std::thread([this, worker = threads_ + 1] { work(worker); }).detach();
    }

    /// Joins the call, if it is open and takes this worker. `call` becomes its number in any case.
    bool join(int worker, std::uint64_t& call) {
        std::uint64_t gate = gate_.load();
        do {
            call = gate >> kCallShift;
            if (static_cast<std::uint64_t>(worker) > (gate >> kWorkersShift & kMask)) return false;
        } while (!gate_.compare_exchange_weak(gate, gate + 1));
        return true;
    }

    /// A thread is the same worker in every call, so it finds its data of the previous call in the cache of its core.
    void work(int worker) {
        while (true) {
            std::uint64_t call = 0;
            if (join(worker, call)) {
                (*loop_)(worker);
                finished_.fetch_add(1, std::memory_order_release);
            }
            wait_for_call_after(call);
        }
    }

    void wait_for_call_after(std::uint64_t seen) {
        const auto until = std::chrono::steady_clock::now() + kReadyFor;
        do {
            for (int spins = 0; spins < 64; ++spins) {
                if (gate_.load(std::memory_order_relaxed) >> kCallShift != seen) return;
                pause_briefly();
            }
        } while (std::chrono::steady_clock::now() < until);
        sleepers_.fetch_add(1);
        for (std::uint64_t gate = gate_.load(); gate >> kCallShift == seen; gate = gate_.load()) gate_.wait(gate);
        sleepers_.fetch_sub(1);
    }

    std::mutex in_use_;
    int threads_ = 0;
    std::uint64_t call_ = 0;
    const std::function<void(int)>* loop_ = nullptr;
    alignas(64) std::atomic<std::uint64_t> gate_{0};  // call, workers, joined
    alignas(64) std::atomic<std::uint64_t> finished_{0};
    std::atomic<int> sleepers_{0};
};

/// The threads live as long as the process, and a child of fork() has none of them: it starts its own.
Workers& workers_of_this_process() {
    static std::atomic<Workers*> workers{new Workers};
#if defined(__unix__)
    static std::atomic<pid_t> owner{getpid()};
    pid_t before = owner.load();
    if (before != getpid() && owner.compare_exchange_strong(before, getpid())) workers.store(new Workers);
#endif
    return *workers.load();
}

}  // namespace

bool run_on_ready_workers(int workers, const std::function<void(int)>& loop) {
    return workers_of_this_process().run(workers, loop);
}

}  // namespace tessera
