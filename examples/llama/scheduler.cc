// SPDX-License-Identifier: Apache-2.0
#include "llama/scheduler.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "tessera/error.hpp"

namespace llama {
namespace {

void expect(const char* name, bool right, const std::string& expected, std::int64_t came) {
    if (right) return;
    throw tessera::Error(tessera::ErrorCode::invalid_argument, name,
                         fmt::format("expected {}, got {}", expected, came));
}

std::int32_t checked_pages(std::int32_t pages) {
    expect("pages", pages > 0, "a number > 0", pages);
    return pages;
}

}  // namespace

Sequence::Sequence(const Request& request, std::int64_t request_number)
    : number(request_number),
      tokens(request.prompt),
      prompt(size()),
      most(size() + request.new_tokens),
      sampler(request.sampling, static_cast<std::uint64_t>(request_number)) {}

Scheduler::Scheduler(const SchedulerOptions& options, std::int32_t pages, std::int64_t page_size)
    : options_(options), pages_(checked_pages(pages)), page_size_(page_size) {
    const std::int64_t most = (std::int64_t{1} << 31) / pages;
    expect("page_size", page_size > 0 && page_size <= most, fmt::format("1 to {}", most), page_size);
    expect("running", options.running > 0, "a number > 0", options.running);
    expect("step_tokens", options.step_tokens >= options.running, fmt::format("at least running, {}", options.running),
           options.step_tokens);
}

void Scheduler::submit(const Request& request, std::int64_t number) {
    auto sequence = std::make_unique<Sequence>(request, number);
    // The last token that is chosen is never computed, so it needs no place in the cache.
    const std::int64_t space = pages_.total() * page_size_ + 1;
    expect("pages", sequence->most <= space,
           fmt::format("space for the {} tokens of request {}", sequence->most - 1, number), space - 1);
    waiting_.push_back(std::move(sequence));
}

std::vector<Chunk> Scheduler::next() {
    std::vector<Chunk> chunks;
    std::int64_t rows = options_.step_tokens;
    const std::int64_t preemptions = preemptions_;
    // The loop counts by index, because a preemption shortens the list.
    for (std::size_t n = 0; n < running_.size(); ++n) {
        Sequence& sequence = *running_[n];
        // Every sequence after this one gets a row at least, so a long prompt does not stop the others.
        const auto behind = static_cast<std::int64_t>(running_.size() - n - 1);
        const std::int64_t count = std::min(sequence.size() - sequence.cached, rows - behind);
        while (n < running_.size() && !reserve(sequence, sequence.cached + count)) preempt_last();
        if (n == running_.size()) break;  // it was the last and preempted itself
        chunks.push_back({&sequence, count});
        rows -= count;
    }
    if (preemptions == preemptions_) admit(chunks, rows);
    return chunks;
}

/// Lets waiting sequences join while there are rows, and pages for all the tokens they have.
void Scheduler::admit(std::vector<Chunk>& chunks, std::int64_t rows) {
    while (!waiting_.empty() && rows > 0 && static_cast<std::int64_t>(running_.size()) < options_.running) {
        Sequence& sequence = *waiting_.front();
        if (!reserve(sequence, sequence.size())) {
            free_pages(sequence);
            return;
        }
        const std::int64_t count = std::min(sequence.size(), rows);
        chunks.push_back({&sequence, count});
        rows -= count;
        running_.push_back(std::move(waiting_.front()));
        waiting_.pop_front();
    }
}

Batch Scheduler::batch(const std::vector<Chunk>& chunks) const {
    Batch batch;
    for (const Chunk& chunk : chunks) {
        batch.pages_each = std::max(batch.pages_each, static_cast<std::int64_t>(chunk.sequence->pages.size()));
    }
    for (const auto& [sequence, count] : chunks) {
        const std::int64_t end = sequence->cached + count;
        for (std::int64_t position = sequence->cached; position < end; ++position) {
            batch.tokens.push_back(sequence->tokens[static_cast<std::size_t>(position)]);
            batch.positions.push_back(static_cast<std::int32_t>(position));
            const std::int64_t page = sequence->pages[static_cast<std::size_t>(position / page_size_)];
            batch.slots.push_back(page * page_size_ + position % page_size_);
        }
        if (end == sequence->size()) batch.wanted_rows.push_back(batch.rows() - 1);
        batch.first_rows.push_back(static_cast<std::int32_t>(batch.rows()));
        batch.lengths.push_back(static_cast<std::int32_t>(end));
        batch.page_table.insert(batch.page_table.end(), sequence->pages.begin(), sequence->pages.end());
        batch.page_table.resize(static_cast<std::size_t>(batch.sequences() * batch.pages_each), -1);
    }
    return batch;
}

void Scheduler::finish(Sequence& sequence) {
    free_pages(sequence);
    std::erase_if(running_, [&](const auto& running) { return running.get() == &sequence; });
}

/// Takes the pages that so many tokens need; false when there are too few, and those that there were stay taken.
bool Scheduler::reserve(Sequence& sequence, std::int64_t tokens) {
    while (static_cast<std::int64_t>(sequence.pages.size()) * page_size_ < tokens) {
        const std::optional<std::int32_t> page = pages_.take();
        if (!page) return false;
        sequence.pages.push_back(*page);
    }
    return true;
}

void Scheduler::free_pages(Sequence& sequence) {
    for (const std::int32_t page : sequence.pages) pages_.give_back(page);
    sequence.pages.clear();
    sequence.cached = 0;
}

void Scheduler::preempt_last() {
    free_pages(*running_.back());
    waiting_.push_front(std::move(running_.back()));
    running_.pop_back();
    ++preemptions_;
}

}  // namespace llama
