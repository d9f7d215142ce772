// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "llama/batch.hpp"
#include "llama/pages.hpp"
#include "llama/sampling.hpp"

namespace llama {

/// A text to continue.
struct Request {
    std::vector<std::int32_t> prompt;
    std::int64_t new_tokens = 100;  ///< at most; a token that ends a text ends it earlier
    SamplingOptions sampling;
};

/// A request on its way.
struct Sequence {
    Sequence(const Request& request, std::int64_t number);

    std::int64_t number = 0;           ///< of the request, from 0
    std::vector<std::int32_t> tokens;  ///< the prompt, and the tokens chosen
    std::int64_t prompt = 0;           ///< tokens of the prompt
    std::int64_t most = 0;             ///< tokens at most, prompt included
    std::int64_t cached = 0;           ///< the first tokens, whose keys and values are in the cache
    std::vector<std::int32_t> pages;
    Sampler sampler;

    std::int64_t size() const { return static_cast<std::int64_t>(tokens.size()); }
};

/// Tokens of a sequence that the next step computes: [sequence.cached, sequence.cached + count).
struct Chunk {
    Sequence* sequence = nullptr;
    std::int64_t count = 0;
};

/// Limits of a step.
struct SchedulerOptions {
    std::int64_t running = 16;       ///< sequences at most
    std::int64_t step_tokens = 256;  ///< rows at most, and at least `running`; chunked prefill computes longer prompts
};

/// Continuous batching: decides for each step which tokens of which sequences it computes, and which sequence has which
/// pages. A sequence joins as soon as there are pages for it and leaves when its text ends. When the pages run out, the
/// sequence that came last is preempted: it gives its pages back, waits, and computes its tokens again later, which
/// changes no bit of them.
class Scheduler {
 public:
    /// Throws tessera::Error if an option is out of its range.
    Scheduler(const SchedulerOptions& options, std::int32_t pages, std::int64_t page_size);

    /// Throws tessera::Error if the sequence would not fit in all the pages.
    void submit(const Request& request, std::int64_t number);

    /// The chunks of the next step, with pages for all their tokens; empty when no request is left.
    std::vector<Chunk> next();

    /// The rows of these chunks for the model.
    Batch batch(const std::vector<Chunk>& chunks) const;

    /// Ends a running sequence and frees its pages.
    void finish(Sequence& sequence);

    std::size_t running() const { return running_.size(); }
    const PageAllocator& pages() const { return pages_; }
    std::int64_t preemptions() const { return preemptions_; }

 private:
    bool reserve(Sequence& sequence, std::int64_t tokens);
    void free_pages(Sequence& sequence);
    void preempt_last();
    void admit(std::vector<Chunk>& chunks, std::int64_t rows);

    SchedulerOptions options_;
    PageAllocator pages_;
    std::int64_t page_size_;
    std::deque<std::unique_ptr<Sequence>> waiting_;
    std::vector<std::unique_ptr<Sequence>> running_;  // in the order of their numbers
    std::int64_t preemptions_ = 0;
};

}  // namespace llama
