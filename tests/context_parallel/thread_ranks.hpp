// SPDX-License-Identifier: Apache-2.0
//
// A group of ranks that are threads of this process, and tensors for them.
#pragma once

#include <condition_variable>
#include <cstring>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "core/numeric.hpp"
#include "tessera/context_parallel.hpp"

namespace tessera::test {

/// Messages between the ranks of a group that were sent and not received.
struct Mailbox {
    struct Sent {
        const void* data;
        std::size_t bytes;
        bool* taken;
    };
    std::mutex mutex;
    std::condition_variable changed;
    std::map<std::pair<int, int>, std::deque<Sent>> waiting;  ///< by sender and receiver
    std::int64_t bytes = 0;                                   ///< that were received
};

class ThreadRank : public Communicator {
 public:
    ThreadRank(Mailbox& mailbox, int rank, int ranks) : mailbox_(mailbox), rank_(rank), ranks_(ranks) {}
    int rank() const override { return rank_; }
    int ranks() const override { return ranks_; }

    void exchange(std::span<const Message> sends, std::span<const Message> receives, void* stream) override {
        wait_for(stream);
        const auto taken = std::make_unique<bool[]>(sends.size());
        std::unique_lock lock(mailbox_.mutex);
        for (std::size_t i = 0; i < sends.size(); ++i)
            mailbox_.waiting[{rank_, sends[i].rank}].push_back({sends[i].data, sends[i].bytes, &taken[i]});
        mailbox_.changed.notify_all();
        for (const Message& m : receives) {
            auto& from = mailbox_.waiting[{m.rank, rank_}];
            mailbox_.changed.wait(lock, [&] { return !from.empty(); });
            const Mailbox::Sent sent = from.front();
            from.pop_front();
            if (sent.bytes != m.bytes) throw std::logic_error("a message of another size was expected");
            copy(m.data, sent.data, m.bytes, stream);
            mailbox_.bytes += static_cast<std::int64_t>(m.bytes);
            *sent.taken = true;
            mailbox_.changed.notify_all();
        }
        mailbox_.changed.wait(lock,
                              [&] { return std::all_of(&taken[0], &taken[sends.size()], [](bool t) { return t; }); });
    }

 protected:
    /// For memory of a device: waits until what is sent is there, and copies before it returns.
    virtual void wait_for(void*) {}
    virtual void copy(void* to, const void* from, std::size_t bytes, void*) { std::memcpy(to, from, bytes); }

 private:
    Mailbox& mailbox_;
    int rank_, ranks_;
};

/// Runs body(communicator) on each rank, a thread. Rethrows the exception of the lowest rank that had one, after all
/// have ended. Returns the bytes that were received.
template <class Rank = ThreadRank>
std::int64_t on_ranks(int ranks, const std::function<void(Communicator&)>& body) {
    Mailbox mailbox;
    std::vector<std::exception_ptr> failures(static_cast<std::size_t>(ranks));
    std::vector<std::thread> threads;
    for (int rank = 0; rank < ranks; ++rank) {
        threads.emplace_back([&, rank] {
            Rank communicator(mailbox, rank, ranks);
            try {
                body(communicator);
            } catch (...) {
                failures[static_cast<std::size_t>(rank)] = std::current_exception();
            }
        });
    }
    for (std::thread& thread : threads) thread.join();
    for (const std::exception_ptr& failure : failures) {
        if (failure) std::rethrow_exception(failure);
    }
    return mailbox.bytes;
}

/// A packed tensor in host memory that owns its elements.
struct Owned {
    std::vector<std::byte> memory;
    TensorView view;

    Owned(DType dtype, const std::vector<std::int64_t>& shape) {
        view.dtype = dtype;
        view.rank = static_cast<int>(shape.size());
        std::int64_t size = 1;
        for (std::size_t i = shape.size(); i-- > 0;) {
            view.shape[i] = shape[i];
            view.strides[i] = size;
            size *= shape[i];
        }
        memory.resize(static_cast<std::size_t>(size * size_of(dtype)) + 1);
        view.data = memory.data();
    }
    Owned(const Owned&) = delete;
    Owned(Owned&& other) noexcept = default;  // the elements stay where they are

    double at(std::int64_t index) const {
        return load_as_double(memory.data() + index * size_of(view.dtype), view.dtype);
    }
    void fill(unsigned seed) {
        std::mt19937 generator(seed);
        std::normal_distribution<double> normal;
        for (std::int64_t i = 0; i < view.size(); ++i)
            store_from_double(memory.data() + i * size_of(view.dtype), view.dtype, normal(generator));
    }
};

/// The rows of `whole` at these positions, which dimension `dim` counts.
inline Owned rows_at(const Owned& whole, int dim, std::span<const std::int64_t> positions) {
    std::vector<std::int64_t> shape(whole.view.shape.begin(), whole.view.shape.begin() + whole.view.rank);
    shape[static_cast<std::size_t>(dim)] = static_cast<std::int64_t>(positions.size());
    Owned part(whole.view.dtype, shape);
    const auto d = static_cast<std::size_t>(dim);
    const std::int64_t inner = whole.view.strides[d];  // elements of a row
    const std::int64_t outer = whole.view.size() / (inner * whole.view.shape[d]);
    const auto bytes = static_cast<std::size_t>(inner * size_of(whole.view.dtype));
    for (std::int64_t o = 0; o < outer; ++o) {
        for (std::size_t i = 0; i < positions.size(); ++i) {
            const auto from = static_cast<std::size_t>(o * whole.view.shape[d] + positions[i]);
            const auto to = static_cast<std::size_t>(o) * positions.size() + i;
            std::memcpy(part.memory.data() + to * bytes, whole.memory.data() + from * bytes, bytes);
        }
    }
    return part;
}

}  // namespace tessera::test
