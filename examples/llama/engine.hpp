// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "llama/model.hpp"
#include "llama/scheduler.hpp"

namespace llama {

/// A token that a step chose.
struct Token {
    std::int64_t request = 0;  ///< as submit() returned it
    std::int32_t token = 0;
    bool last = false;  ///< the text of this request ends here
};

/// Steps of one kind.
struct Throughput {
    std::int64_t steps = 0;
    std::int64_t rows = 0;
    double seconds = 0;
};

struct EngineOptions {
    ModelOptions model;
    SchedulerOptions scheduler;
    bool ignore_end = false;  ///< go on after tokens that end a text
    /// When set, sees the logits [vocab_size] of every token that is chosen.
    std::function<void(const Sequence& sequence, std::span<const float> logits)> on_logits{};
};

/// A model, its cache and its scheduler: requests go in, tokens come out.
class Engine {
 public:
    /// Throws tessera::Error for a folder that is no such model, and for options out of their range.
    Engine(const std::string& folder, const EngineOptions& options, Memory& memory);

    /// Returns the number of the request, counted from 0. Throws tessera::Error if a token is not in the vocabulary, an
    /// option is out of range, or the text may become longer than the model or the cache allows.
    std::int64_t submit(const Request& request);

    /// Runs one step and returns the tokens that it chose; long prompts take steps that choose none. `busy()` is false
    /// when every request has ended.
    std::vector<Token> step();
    bool busy() const { return open_ > 0; }

    const Model& model() const { return model_; }
    const Scheduler& scheduler() const { return scheduler_; }
    const Throughput& with_prompts() const { return with_prompts_; }  ///< steps with rows of prompts
    const Throughput& decoding() const { return decoding_; }          ///< steps with one new token for each sequence

 private:
    bool ends(const Sequence& sequence, std::int32_t token) const;

    EngineOptions options_;
    Scheduler scheduler_;  // ahead of the model: its checks cost nothing
    Model model_;
    std::int64_t submitted_ = 0;
    std::int64_t open_ = 0;
    Throughput with_prompts_, decoding_;
};

}  // namespace llama
