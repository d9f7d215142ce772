// SPDX-License-Identifier: Apache-2.0
//
// Continues texts with a model of Llama's or Qwen3's shape. README.md explains the program.
#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <charconv>
#include <chrono>
#include <cstdio>
#include <fstream>

#include "llama/engine.hpp"
#include "llama/terminal.hpp"

namespace llama {
namespace {

struct Arguments {
    std::string folder;
    std::vector<std::string> prompts;
    std::vector<std::string> ids;
    std::string file;
    std::string dtype = "fp32";
    bool quiet = false;
    Request request;
    EngineOptions engine;
};

void declare(CLI::App& app, Arguments& a) {
    app.add_option("folder", a.folder, "Hugging Face folder: config.json and model.safetensors")->required();
    app.add_option("-p,--prompt", a.prompts, "text to continue (repeat it for a batch); each byte is a token")
        ->expected(1)
        ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
    app.add_option("--ids", a.ids, "tokens to continue, \"71 101\" (repeat it for a batch)")
        ->expected(1)
        ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
    app.add_option("--prompts", a.file, "file with a text on each line");
    app.add_option("-n,--new-tokens", a.request.new_tokens, "new tokens of each text, at most")->capture_default_str();
    app.add_flag("--ignore-end", a.engine.ignore_end, "go on after the model's end-of-text token");
    app.add_option("--temperature", a.request.sampling.temperature, "0: greedy")->capture_default_str();
    app.add_option("--top-k", a.request.sampling.top_k, "sample from the k most probable tokens; 0: all")
        ->capture_default_str();
    app.add_option("--top-p", a.request.sampling.top_p, "sample from the tokens that make up this probability")
        ->capture_default_str();
    app.add_option("--seed", a.request.sampling.seed, "seed of the samples")->capture_default_str();
    app.add_option("--pages", a.engine.model.pages, "pages of the cache")->capture_default_str();
    app.add_option("--page-size", a.engine.model.page_size, "tokens of a page")->capture_default_str();
    app.add_option("--dtype", a.dtype, "of the cache and of the attention")
        ->check(CLI::IsMember({"fp32", "bf16"}))
        ->capture_default_str();
    CLI::Option* const block =
        app.add_flag("--block", a.engine.model.block,
                     "attention blocks by tessera::decode_block() in steps of one token for each text");
    app.add_option("--compare-blocks", a.engine.model.compared_steps,
                   "with --block: so many of these steps also run the separate kernels, and both times are printed")
        ->needs(block)
        ->capture_default_str();
    app.add_option("--running", a.engine.scheduler.running, "texts that grow at the same time, at most")
        ->capture_default_str();
    app.add_option("--step-tokens", a.engine.scheduler.step_tokens, "rows of a step, at most")->capture_default_str();
    app.add_option("--threads", a.engine.model.threads, "0: as many as there are")
        ->check(CLI::Range(0, 1024))
        ->capture_default_str();
    app.add_flag("-q,--quiet", a.quiet, "print the texts and no figures");
}

std::vector<std::int32_t> tokens_of_bytes(const std::string& text) {
    return {reinterpret_cast<const unsigned char*>(text.data()),
            reinterpret_cast<const unsigned char*>(text.data()) + text.size()};
}

std::vector<std::int32_t> tokens_of_ids(const std::string& text) {
    std::vector<std::int32_t> tokens;
    const char* at = text.data();
    const char* const end = at + text.size();
    while (true) {
        while (at != end && (*at == ' ' || *at == ',')) ++at;
        if (at == end) return tokens;
        std::int32_t token = 0;
        const auto [next, error] = std::from_chars(at, end, token);
        if (error != std::errc() || (next != end && *next != ' ' && *next != ',')) {
            throw tessera::Error(tessera::ErrorCode::invalid_argument, "ids",
                                 fmt::format("expected numbers with spaces between them, got \"{}\"", text));
        }
        tokens.push_back(token);
        at = next;
    }
}

void read_lines(Arguments& a) {
    if (a.file.empty()) return;
    std::ifstream lines(a.file);
    if (!lines) throw tessera::Error(tessera::ErrorCode::cannot_open, "prompts", fmt::format("cannot read {}", a.file));
    for (std::string line; std::getline(lines, line);) {
        if (!line.empty()) a.prompts.push_back(line);
    }
}

/// Submits every prompt and returns the texts that they begin with.
std::vector<std::string> submit(Engine& engine, const Arguments& a) {
    const bool bytes = engine.model().config().vocab_size == 256;
    if (!bytes && !a.prompts.empty()) {
        throw tessera::Error(
            tessera::ErrorCode::invalid_argument, "prompt",
            fmt::format("expected --ids for a vocabulary of {} tokens, because texts are read as bytes "
                        "(a vocabulary of 256); got a text",
                        engine.model().config().vocab_size));
    }
    std::vector<std::string> begins;
    const auto one = [&](std::vector<std::int32_t> tokens) {
        Request request = a.request;
        request.prompt = std::move(tokens);
        engine.submit(request);
        std::string text;
        for (const std::int32_t token : request.prompt) text += text_of(token, bytes);
        begins.push_back(bytes ? text : text.substr(1));
    };
    for (const std::string& text : a.prompts) one(tokens_of_bytes(text));
    for (const std::string& ids : a.ids) one(tokens_of_ids(ids));
    if (begins.empty()) {
        throw tessera::Error(tessera::ErrorCode::invalid_argument, "prompt",
                             "expected --prompt, --prompts or --ids, got none");
    }
    return begins;
}

void print_model(const Model& model) {
    const Config& c = model.config();
    fmt::print(stderr, "model     {}, {} layers of {}/{} heads of {}, {:.1f} M parameters in {:.1f} MB\n", c.model_type,
               c.layers, c.heads_q, c.heads_kv, c.head_dim, static_cast<double>(model.weights().parameters()) / 1e6,
               static_cast<double>(model.weights().bytes()) / 1e6);
}

void print_throughput(const char* name, const Throughput& of) {
    if (of.steps == 0) return;
    fmt::print(stderr, "{:<10}{} tokens in {} step{}, {:.0f} ms: {:.0f} tokens/s\n", name, of.rows, of.steps,
               of.steps == 1 ? "" : "s", of.seconds * 1e3, static_cast<double>(of.rows) / of.seconds);
}

void print_blocks(const Times& t) {
    const std::int64_t compared = t.compared_kernels.steps();
    if (t.blocks.steps() == 0) return;
    fmt::print(stderr, "blocks    decode_block: {} steps, {:.3f} ms a token\n", t.blocks.steps(),
               t.blocks.median(t.blocks.steps()));
    if (compared == 0) return;
    fmt::print(stderr, "compared  {} steps, decode_block: {:.3f} ms a token; separate kernels: {:.3f} ms a token\n",
               compared, t.blocks.median(compared), t.compared_kernels.median(compared));
}

void print_figures(const Engine& engine, double first_token) {
    const Model& model = engine.model();
    const Times& t = model.times();
    const auto percent = [&](double seconds) { return 100 * seconds / t.all; };
    fmt::print(stderr, "\nattention {}, {} threads\n", model.attention().kernel(), model.threads());
    print_throughput("prompts", engine.with_prompts());
    print_throughput("decoding", engine.decoding());
    fmt::print(stderr, "first     token after {:.1f} ms\n", first_token * 1e3);
    fmt::print(stderr, "time      attention {:.1f} %, matrix products {:.1f} %, the rest {:.1f} %\n",
               percent(t.attention), percent(t.linear), percent(t.all - t.attention - t.linear));
    print_blocks(t);
    const PageAllocator& pages = engine.scheduler().pages();
    fmt::print(stderr, "cache     {} pages, {:.1f} MB; {} used at most, {} now, {} preemptions\n", pages.total(),
               static_cast<double>(model.attention().bytes()) / 1e6, pages.most_used(), pages.used(),
               engine.scheduler().preemptions());
}

void run(Arguments& a) {
    read_lines(a);
    if (a.dtype == "bf16") a.engine.model.dtype = tessera::DType::bf16;
    HostMemory memory;
    Engine engine(a.folder, a.engine, memory);
    std::vector<std::string> begins = submit(engine, a);
    if (!a.quiet) print_model(engine.model());
    Terminal terminal(std::move(begins), engine.model().config().vocab_size == 256, isatty(STDOUT_FILENO) != 0);
    const auto start = std::chrono::steady_clock::now();
    double first_token = 0;
    while (engine.busy()) {
        for (const Token& token : engine.step()) {
            if (first_token == 0) {
                first_token = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
            }
            terminal.show(token);
        }
    }
    if (!a.quiet) print_figures(engine, first_token);
}

}  // namespace
}  // namespace llama

int main(int argc, char** argv) {
    llama::Arguments arguments;
    CLI::App app("Continues texts with a model of Llama's or Qwen3's shape.");
    llama::declare(app, arguments);
    CLI11_PARSE(app, argc, argv);
    try {
        llama::run(arguments);
        return 0;
    } catch (const std::exception& error) {
        fmt::print(stderr, "llama: {}\n", error.what());
        return 1;
    }
}
