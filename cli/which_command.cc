// SPDX-License-Identifier: Apache-2.0
//
// tessera which: finds the attention kernel that ran, by the names in a trace.
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <memory>

#include "commands.hpp"
#include "diagnose/diagnosis.hpp"
#include "diagnose/rules.hpp"
#include "parse.hpp"
#include "progress.hpp"
#include "table.hpp"
#include "which_call.hpp"
#include "which_text.hpp"

namespace tessera::cli {
namespace {

using diagnose::AttentionKind;
using diagnose::Confidence;
using diagnose::Diagnosis;
using diagnose::Family;
using diagnose::Role;

struct WhichOptions {
    std::vector<std::string> files;
    std::string expect;
    bool family = false;
    CallOptions call;
};

/// The families that --expect names: one family, or "flash" for all of FlashAttention.
std::vector<Family> expected_families(const std::string& text) {
    std::vector<Family> families;
    const std::vector<std::string> names = parse_list("--expect", text);
    expect_each_once("--expect", text, names);
    for (const std::string& name : names) {
        if (name == "flash") {
            families.insert(families.end(), {Family::fa1, Family::fa2, Family::fa3, Family::fa4});
            continue;
        }
        const Family family = diagnose::family_named(name);
        if (family == Family::unknown) {
            std::string all = "flash";
            for (const std::string& known : diagnose::family_names()) all += known == "unknown" ? "" : ", " + known;
            unexpected("--expect", "some of " + all, name);
        }
        families.push_back(family);
    }
    return families;
}

/// The difference between the trace and the expectation; empty if there is none.
std::string mismatch(const Diagnosis& d, const std::vector<Family>& expected) {
    bool any = false;
    for (const AttentionKind& kind : d.kinds) {
        if (kind.reading.role != Role::attention) continue;
        any = true;
        const bool fits = std::find(expected.begin(), expected.end(), kind.reading.family) != expected.end();
        if (!fits) return fmt::format("{} ran ({})", name_of(kind.reading.family), name_of(kind.reading.confidence));
        if (kind.reading.confidence == Confidence::unsure)
            return fmt::format("{} may have run, but its name is ambiguous", name_of(kind.reading.family));
    }
    return any ? "" : "no attention kernel ran";
}

Diagnosis diagnose_file(const std::string& file, Progress& progress) {
    progress.step("reading " + file);
    constexpr std::uint64_t kPart = 1 << 20;
    std::uint64_t reported = 0;
    bool expected = false;
    diagnose::Trace trace = diagnose::read_trace(file, [&](std::uint64_t done, std::uint64_t total) {
        if (!expected && total > 0) progress.expect(static_cast<std::int64_t>(total / kPart + 1));
        expected = true;
        for (; reported + kPart <= done; reported += kPart) progress.done();
    });
    return diagnose::diagnose(trace);
}

void print_text(const std::vector<Diagnosis>& all, const diagnose::Call& stated, const Session& session) {
    const int width = terminal_width(STDOUT_FILENO);
    for (const Diagnosis& d : all) {
        std::string text = fmt::format("{}{} ({})\n\n", &d == &all.front() ? "" : "\n\n", d.file, d.tool);
        for (const std::string& line : wrapped(paragraph_of(d, stated), static_cast<std::size_t>(width)))
            text += line + "\n";
        if (!d.kinds.empty()) text += "\n" + kinds_table(d, width);
        const std::string details = details_text(d, stated, width);
        if (!details.empty()) text += (details.front() == '\n' ? "" : "\n") + details;
        session.print(text);
    }
}

/// Throws for options whose values a trace contains.
void expect_nothing_of_the_trace(const CallOptions& call) {
    for (const auto& [option, text] : {std::pair{"--shape", &call.shape},
                                       {"--dtype", &call.dtype},
                                       {"--mask", &call.mask},
                                       {"--dropout", &call.dropout}}) {
        if (!text->empty()) unexpected(option, "no file beside it, which has its own", *text);
    }
    if (const auto [option, text] = call.first_size(); !option.empty())
        unexpected(option, "no file beside it, which has its own", text);
    if (call.gqa) throw UsageError("--gqa", "expected no file beside it, which has its own");
}

/// Throws for options of a call if the input has only names of kernels.
void expect_calls(const CallOptions& call, const std::vector<Diagnosis>& all) {
    if (!call.given()) return;
    const bool names =
        std::all_of(all.begin(), all.end(), [](const Diagnosis& d) { return d.tool == diagnose::kNamesAlone; });
    if (names)
        throw UsageError(call.first_given(),
                         "has no effect with names of kernels, which describe no call: expected a trace, or no file");
}

void execute(const WhichOptions& options, Session& session) {
    const std::vector<Family> expected =
        options.expect.empty() ? std::vector<Family>{} : expected_families(options.expect);
    if (options.family) {
        if (!options.files.empty()) unexpected("--family", "no file beside it", options.files.front());
        return answer_family(session);
    }
    if (options.files.empty() && options.call.given()) {
        if (!expected.empty()) throw UsageError("--expect", "expected a trace with it");
        return answer_call(options.call, session);
    }
    expect_nothing_of_the_trace(options.call);
    const diagnose::Call stated = options.call.call();
    if (stated.torch && (*stated.torch < diagnose::kFirstRelease || *stated.torch >= diagnose::kEndOfReleases))
        print_note(
            fmt::format("--torch: expected 2.4 to 2.15, whose checks are known, got {}: why no faster kernel ran can't "
                        "be explained",
                        options.call.torch));
    if (options.files.empty())
        throw UsageError("FILE", "expected a trace, or - for names on standard input, got nothing");
    std::vector<Diagnosis> all;
    {
        Progress progress(static_cast<std::int64_t>(options.files.size()));
        for (const std::string& file : options.files) all.push_back(diagnose_file(file, progress));
    }
    expect_calls(options.call, all);
    std::vector<std::pair<std::string, std::string>> failures;  // a file, and how it differs from the expectation
    for (const Diagnosis& d : all) {
        if (expected.empty()) break;
        const std::string why = mismatch(d, expected);
        if (!why.empty()) failures.push_back({d.file, why});
    }
    if (session.json) {
        Json files = Json::array();
        for (const Diagnosis& d : all) files.push_back(cli::json_of(d, stated));
        Json document{{"files", files}};
        if (!expected.empty()) {
            document["expected"] = options.expect;
            document["as_expected"] = failures.empty();
            document["failures"] = Json::array();
            for (const auto& [file, why] : failures) document["failures"].push_back(why);
        }
        session.print_json(document);
    } else {
        print_text(all, stated, session);
    }
    for (const auto& [file, why] : failures)
        print_error(fmt::format("{}: expected {}, but {}", file, options.expect, why));
    if (!failures.empty()) session.exit_code = kCheckFailed;
}

}  // namespace

void add_which_command(CLI::App& app, Session& session) {
    CLI::App* command = add_command(
        app, session, "which",
        "Say which attention kernel ran, by a profiler's trace or the names of kernels, and what is known of it",
        {{"tessera which trace.json.gz", "what a PyTorch profiler saw"},
         {"tessera which run.sqlite --expect fa3", "exit status 1 when another kernel than FlashAttention-3 ran"},
         {"nsys stats -r cuda_gpu_kern_sum --format csv run.nsys-rep | tessera which -", "a table of Nsight Systems"},
         {"echo flash_fwd_splitkv_kernel | tessera which -", "one name"},
         {"tessera which --torch 2.11 --gpu h200 --shape 2,32,4096,128 --dtype bf16 --mask bool",
          "why PyTorch takes which kernel, without a trace"},
         {"tessera which --torch 2.11 --device h200 --heads 32/8 --gqa --len 4k --head-dim 128 --dtype bf16",
          "the same, with the sizes as in the other commands"},
         {"tessera which --family", "the family tree of attention kernels"}});
    auto options = std::make_shared<WhichOptions>();
    command
        ->add_option(
            "FILE", options->files,
            "Traces: PyTorch profiler .json or .json.gz, Nsight Systems .sqlite or csv, Nsight Compute csv, JAX "
            "trace.json.gz; names of kernels, one a line; - is standard input")
        ->group("Input");
    command
        ->add_option(
            "--expect", options->expect,
            "Exit status 1 unless these kernels, and no others, computed attention: flash, fa2, fa3, cudnn, ...")
        ->type_name("LIST");
    command->add_flag("--family", options->family,
                      "Print the family tree of attention kernels, and the kernels that each library can run");
    options->call.declare(*command);
    command->callback([options, command, &session] {
        // Beside --family, --expect is only validated; Python's which.expect() uses that before a run.
        if (options->family && options->files.empty()) expect_only(*command, "--family", {"--expect"});
        execute(*options, session);
    });
}

}  // namespace tessera::cli
