// SPDX-License-Identifier: Apache-2.0
#include "llama/engine.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <stdexcept>

#include "tessera/error.hpp"

namespace llama {

Engine::Engine(const std::string& folder, const EngineOptions& options, Memory& memory)
    : options_(options),
      scheduler_(options.scheduler, options.model.pages, options.model.page_size),
      model_(folder, options.model, memory) {}

std::int64_t Engine::submit(const Request& request) {
    const auto bad = [](const char* name, const std::string& expected, std::int64_t came) {
        throw tessera::Error(tessera::ErrorCode::invalid_argument, name,
                             fmt::format("expected {}, got {}", expected, came));
    };
    const Config& config = model_.config();
    if (request.prompt.empty()) bad("prompt", "one token at least", 0);
    for (const std::int32_t token : request.prompt) {
        if (token < 0 || token >= config.vocab_size)
            bad("prompt", fmt::format("tokens under {}", config.vocab_size), token);
    }
    const auto prompt = static_cast<std::int64_t>(request.prompt.size());
    if (request.new_tokens < 1) bad("new_tokens", "a number > 0", request.new_tokens);
    if (request.new_tokens > config.max_positions - prompt) {
        bad("new_tokens",
            fmt::format("at most {} after a prompt of {} tokens (max_position_embeddings {})",
                        config.max_positions - prompt, prompt, config.max_positions),
            request.new_tokens);
    }
    request.sampling.validate();
    scheduler_.submit(request, submitted_);
    ++open_;
    return submitted_++;
}

std::vector<Token> Engine::step() {
    const std::vector<Chunk> chunks = scheduler_.next();
    if (chunks.empty() && busy()) throw std::logic_error("requests wait, and none of them can run");
    if (chunks.empty()) return {};
    const Batch batch = scheduler_.batch(chunks);
    const bool decoding = std::all_of(chunks.begin(), chunks.end(), [](const Chunk& chunk) {
        return chunk.count == 1 && chunk.sequence->cached >= chunk.sequence->prompt;
    });
    const double before = model_.times().all;
    const std::vector<float> logits = model_.forward(batch);
    Throughput& throughput = decoding ? decoding_ : with_prompts_;
    ++throughput.steps;
    throughput.rows += batch.rows();
    throughput.seconds += model_.times().all - before;

    std::vector<Token> tokens;
    const auto vocab = static_cast<std::size_t>(model_.config().vocab_size);
    for (const auto& [sequence, count] : chunks) {
        sequence->cached += count;
        if (sequence->cached < sequence->size()) continue;  // a piece of a prompt: its last row is still to come
        const std::span<const float> of_last = std::span(logits).subspan(tokens.size() * vocab, vocab);
        if (options_.on_logits) options_.on_logits(*sequence, of_last);
        const std::int32_t token = sequence->sampler.choose(of_last);
        sequence->tokens.push_back(token);
        tokens.push_back({sequence->number, token, ends(*sequence, token)});
        if (!tokens.back().last) continue;
        scheduler_.finish(*sequence);
        --open_;
    }
    return tokens;
}

bool Engine::ends(const Sequence& sequence, std::int32_t token) const {
    if (sequence.size() == sequence.most) return true;
    const std::vector<std::int32_t>& ends = model_.config().end_tokens;
    return !options_.ignore_end && std::find(ends.begin(), ends.end(), token) != ends.end();
}

}  // namespace llama
