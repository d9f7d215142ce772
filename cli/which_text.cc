// SPDX-License-Identifier: Apache-2.0
#include "which_text.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <map>

#include "advice_text.hpp"
#include "diagnose/call_inputs.hpp"
#include "diagnose/device.hpp"
#include "table.hpp"
#include "which_step.hpp"

namespace tessera::cli {
namespace {

using diagnose::AttentionKind;
using diagnose::Confidence;
using diagnose::Diagnosis;
using diagnose::Exactness;
using diagnose::Family;
using diagnose::NamedKernel;
using diagnose::NameReading;
using diagnose::Role;

constexpr std::size_t kMostNames = 8;  // the most names of kernels that are no attention
constexpr std::size_t kLongestShown = 300;

std::string joined(const std::vector<std::string>& parts) {
    std::string text;
    for (const std::string& part : parts) text += (text.empty() ? "" : ", ") + part;
    return text;
}

std::string share_text(double us, double whole) { return whole > 0 ? fmt::format("{:.1f} %", 100 * us / whole) : "-"; }

/// Formats "1 call", "2 calls".
std::string counted(std::int64_t count, const char* what) {
    return count_text(count) + " " + what + (count == 1 ? "" : "s");
}

std::string gpu_text(const Diagnosis& d) {
    if (d.gpus.empty() || d.gpus.front().name.empty()) return "";
    return (d.gpus.size() == 1 ? "on an " : "on GPUs such as an ") + d.gpus.front().name;
}

std::string name_and_release(const NameReading& reading) {
    std::string text = reading.family == Family::unknown ? "an unknown kernel" : title_of(reading.family);
    const bool says_it_already = text.find(reading.library) != std::string::npos;  // "cuDNN attention (cuDNN)"
    if (reading.family == Family::tessera && !reading.algorithm.empty()) text += ", " + reading.algorithm;
    if (!says_it_already && reading.family != Family::tessera) text += " (" + reading.library;
    else return text;
    return text + (reading.release.empty() ? ")" : ", release " + reading.release + ")");
}

/// The family whose kinds together took the longest.
struct Leader {
    const AttentionKind* kind = nullptr;  ///< its longest kind
    double us = 0;
    std::int64_t calls = 0;
};

Leader leader_of(const Diagnosis& d) {
    std::map<std::pair<Family, std::string>, Leader> families;
    for (const AttentionKind& kind : d.kinds) {
        Leader& leader = families[{kind.reading.family, kind.reading.library}];
        if (leader.kind == nullptr) leader.kind = &kind;
        leader.us += kind.us;
        leader.calls += kind.calls;
    }
    Leader best;
    for (const auto& [family, leader] : families) {
        const bool more = d.timed ? leader.us > best.us : leader.calls > best.calls;
        if (best.kind == nullptr || more) best = leader;
    }
    return best;
}

std::string arch_sentence(const Diagnosis& d, const NameReading& reading) {
    const int gpu = d.gpus.empty() ? 0 : d.gpus.front().capability.value_or(0);
    if (reading.arch == 0 || gpu == 0) return "";
    if (generation_of(reading.arch) == generation_of(gpu))
        return fmt::format(" It is compiled for this generation of GPU ({}).", generation_of(gpu));
    const std::string own = generation_of(gpu);
    return fmt::format(
        " It is compiled for {} GPUs (sm{}), and this one is {} {} (sm{}), whose new instructions it does not use.",
        generation_of(reading.arch), reading.arch, own.starts_with('A') ? "an" : "a", own, gpu);
}

std::string exactness_sentence(const Diagnosis& d) {
    std::map<Family, std::size_t> not_exact;  // kinds of a family
    std::vector<Family> order;
    for (const AttentionKind& kind : d.kinds) {
        if (kind.reading.exactness == Exactness::not_exact && not_exact[kind.reading.family]++ == 0)
            order.push_back(kind.reading.family);
    }
    if (order.empty()) return "";
    std::string subjects;
    for (const Family family : order) {
        const auto all = static_cast<std::size_t>(std::count_if(
            d.kinds.begin(), d.kinds.end(), [&](const AttentionKind& kind) { return kind.reading.family == family; }));
        const std::string title = family == Family::unknown ? "an unknown family" : title_of(family);
        const char* part = not_exact[family] == all ? "" : not_exact[family] == 1 ? "a kernel of " : "kernels of ";
        const char* between = subjects.empty() ? "" : family == order.back() ? " and " : ", ";
        subjects += between + std::string(part) + title;
    }
    const bool one = order.size() == 1;
    return fmt::format(" Note that {} {} not exact: {} results differ from attention's by more than rounding.",
                       subjects, one ? "is" : "are", one ? "its" : "their");
}

/// Explains to readers who do not know these kernels why the fast ones are fast, or the others slow.
std::string speed_sentence(const NameReading& reading) {
    if (reading.family == Family::eager || reading.family == Family::math)
        return " That is the slow way, which FlashAttention was made to replace: two matrix multiplications and a "
               "softmax, each a kernel of its own, with the scores of all pairs of tokens written to memory in "
               "between.";
    const bool slow = reading.algorithm.substr(0, 8) == "standard" || reading.library == diagnose::kFlexUncompiled;
    if (reading.family == Family::unknown || reading.family == Family::other || slow) return "";
    const bool by_that_name = reading.family == Family::fa1 || reading.family == Family::fa2 ||
                              reading.family == Family::fa3 || reading.family == Family::fa4;
    return fmt::format(
        " That is a fast way{}: one kernel (a program on the GPU) that goes through the scores of the pairs piece by "
        "piece, without writing them to memory.",
        by_that_name ? "" : ", of FlashAttention's kind");
}

bool is_cut_off(const Diagnosis& d) {
    return std::any_of(d.notes.begin(), d.notes.end(),
                       [](const std::string& note) { return note.find("cut off") != std::string::npos; });
}

/// Reports that every line is unknown, so that the text may not be a list of names.
std::string unknown_lines(const Diagnosis& d) {
    std::int64_t lines = 0;
    for (const NamedKernel& unknown : d.unknown) lines += unknown.kernel.count;
    if (d.timed || lines != d.runs) return "";
    return " None of these lines is the name of a known kernel. If the file is a profile, its format is not supported: "
           "--help lists the formats.";
}

/// The path that PyTorch took on the CPU.
std::string cpu_path_sentence(const std::vector<std::string>& operators) {
    const auto any = [&](const char* part) {
        return std::any_of(operators.begin(), operators.end(),
                           [&](const std::string& name) { return name.find(part) != std::string::npos; });
    };
    if (any("_flash_attention_for_cpu"))
        return " There PyTorch took the fast way, of FlashAttention's kind, which goes through the scores of the pairs "
               "piece by piece.";
    return any("_attention_math") ? " There PyTorch took the slow way, its math path, which writes the scores of all "
                                    "pairs to memory."
                                  : "";
}

std::string nothing_found(const Diagnosis& d) {
    if (!d.cpu_ops.empty() && is_cut_off(d))
        return "Operators of attention are in this trace, but no kernel of a GPU: the file is cut off before them.";
    if (!d.cpu_ops.empty())
        return "No kernel of a GPU is in this trace, but operators of attention on the CPU are: " + joined(d.cpu_ops) +
               "." + cpu_path_sentence(d.cpu_ops) + " To see kernels of a GPU, profile with the activity CUDA too.";
    std::string text = fmt::format("No attention kernel was found among {}.", counted(d.runs, "run") + " of kernels");
    if (d.runs == 0) text = "No kernel of a GPU is in this trace: was the GPU profiled?";
    else text += unknown_lines(d);
    for (const std::string& backend : d.backends_of_operators) text += " " + backend + ".";
    if (!d.look_alikes.empty()) text += " Some names look like attention but are not; they are listed below.";
    if (d.tool == "JAX profiler" && !d.unknown.empty())
        text +=
            " XLA calls fused kernels fusion_1, fusion_2: attention by hand may be among the unknown kernels below.";
    if (!d.softmaxes.empty())
        text +=
            " A softmax is among them. Between two matrix multiplications it is attention by hand, but this file does "
            "not have the order of the kernels in time.";
    return text;
}

/// Formats "6 calls (2 in training's backward pass)".
std::string calls_text(const Diagnosis& d) {
    std::int64_t calls = 0;
    std::int64_t backward = 0;
    for (const AttentionKind& kind : d.kinds) {
        calls += kind.calls;
        if (kind.reading.pass == diagnose::KernelPass::backward) backward += kind.calls;
    }
    if (backward == 0) return counted(calls, "call");
    return fmt::format("{} ({} of them in the backward pass of training)", counted(calls, "call"),
                       count_text(backward));
}

/// Formats " Others are of cuDNN attention, SageAttention."
std::string others_named(const Diagnosis& d, Family leader, const char* begin) {
    std::vector<std::string> titles;
    for (const AttentionKind& kind : d.kinds) {
        if (kind.reading.family == leader) continue;
        const std::string title =
            kind.reading.family == Family::unknown ? "unknown kernels" : title_of(kind.reading.family);
        if (std::find(titles.begin(), titles.end(), title) == titles.end()) titles.push_back(title);
    }
    return titles.empty() ? "" : begin + joined(titles) + ".";
}

/// The longest kind with the leader's family and library and with known shapes, which is often a forward.
const AttentionKind& best_known(const Diagnosis& d, const AttentionKind& leader) {
    for (const AttentionKind& kind : d.kinds) {
        const bool same =
            kind.reading.family == leader.reading.family && kind.reading.library == leader.reading.library;
        if (same && !kind.shapes.empty()) return kind;
    }
    return leader;
}

/// Explains why there is no advice about faster kernels.
std::string without_advice(const Diagnosis& d, const AttentionKind& kind) {
    if (kind.reading.library == diagnose::kFlexUncompiled)
        return " torch.compile(flex_attention) makes one kernel of it.";
    if (const std::string beyond = diagnose::beyond_sdpa(kind); !beyond.empty())
        return fmt::format(" No other kernel is compared, because PyTorch's SDPA has no argument for {}.", beyond);
    if (!diagnose::backend_of(kind.reading.family) || !kind.shapes.empty() || !d.timed) return "";
    if (d.tool != "PyTorch profiler") return "";
    return " The trace has no shapes, so it does not show why no faster one ran (profile with record_shapes=True, and "
           "outside of CUDA graphs).";
}

/// Names a GPU that the model does not list.
std::string device_sentence(const Diagnosis& d) {
    if (d.gpus.empty()) return "";
    const std::string caveat = diagnose::device_of(d.gpus.front()).caveat;
    return caveat.empty() ? "" : " Note that " + caveat + ".";
}

std::string kernel_text(const std::string& name) {
    if (name.empty()) return "(without a name)";
    return name.size() <= kLongestShown ? name : name.substr(0, kLongestShown) + "...";
}

std::string sum_text(const diagnose::KernelSum& kernel, bool timed) {
    std::string text = counted(kernel.count, "run");
    if (timed) text += ", " + milliseconds_text(kernel.us / 1000);
    return text;
}

std::string kind_details(const Diagnosis& d, const AttentionKind& kind, int width) {
    const NameReading& r = kind.reading;
    std::vector<std::pair<std::string, std::string>> facts;
    const auto add = [&](const char* name, const std::string& value) {
        if (!value.empty()) facts.emplace_back(std::string("  ") + name, value);
    };
    add("library", r.library);
    add("release", r.release);
    add("algorithm", r.algorithm);
    add("result", r.exactness == Exactness::unknown ? "" : name_of(r.exactness));
    if (r.arch != 0) add("compiled for", fmt::format("sm{}, {}", r.arch, generation_of(r.arch)));
    if (r.head_dim != 0)
        add("head_dim",
            r.head_dim_v != 0 ? fmt::format("{}, of V {}", r.head_dim, r.head_dim_v) : fmt::format("{}", r.head_dim));
    if (r.tile_q != 0) add("tile", fmt::format("{} queries x {} keys", r.tile_q, r.tile_kv));
    add("dtype", r.dtype);
    add("mask", r.mask);
    add("features", joined(r.features));
    if (kind.beside_us > 0)
        add("beside it", milliseconds_text(kind.beside_us / 1000) + " of the time is helpers, copies and fills");
    for (std::size_t i = 0; i < std::min<std::size_t>(3, kind.shapes.size()); ++i)
        add(i == 0 ? "called with" : "",
            text_of(kind.shapes[i].call) + fmt::format(" ({})", counted(kind.shapes[i].count, "call")));
    if (kind.shapes.size() > 3) add("", fmt::format("and {} other shapes", kind.shapes.size() - 3));
    for (const auto& [name, value] : step_facts(kind)) facts.emplace_back(name, value);
    add("sure", name_of(r.confidence));
    for (const std::string& evidence : r.evidence) add(&evidence == &r.evidence.front() ? "evidence" : "", evidence);
    for (std::size_t i = 0; i < std::min<std::size_t>(4, kind.kernels.size()); ++i)
        add(i == 0 ? "kernels" : "",
            kernel_text(kind.kernels[i].name) + " (" + sum_text(kind.kernels[i], d.timed) + ")");
    if (kind.kernels.size() > 4) add("", fmt::format("and {} others", kind.kernels.size() - 4));
    return facts_text(facts, width);
}

std::string named_text(const char* title, const std::vector<NamedKernel>& kernels, const Diagnosis& d, int width) {
    if (kernels.empty()) return "";
    std::string text = fmt::format("\n{}\n", title);
    for (std::size_t i = 0; i < std::min(kMostNames, kernels.size()); ++i) {
        std::string line = kernel_text(kernels[i].kernel.name);
        if (d.timed) line += " (" + sum_text(kernels[i].kernel, true) + ")";
        if (!kernels[i].reading.evidence.empty()) line += ": " + joined(kernels[i].reading.evidence);
        text += facts_text({{" ", line}}, width);
    }
    if (kernels.size() > kMostNames) text += fmt::format("   and {} others\n", kernels.size() - kMostNames);
    return text;
}

}  // namespace

std::string generation_of(int arch) {
    if (arch >= 100) return "Blackwell";
    if (arch == 90) return "Hopper";
    if (arch == 89) return "Ada";
    if (arch >= 80) return "Ampere";
    if (arch == 75) return "Turing";
    if (arch >= 70) return "Volta";
    if (arch >= 60) return "Pascal";
    return arch >= 50 ? "Maxwell" : "";
}

std::string paragraph_of(const Diagnosis& d, const diagnose::Call& stated) {
    std::string text =
        "Attention is the part of a model in which every token (a piece of a text or of a picture) looks at the "
        "others. ";
    if (d.kinds.empty()) return text + nothing_found(d);
    const Leader leader = d.timed ? leader_of(d) : Leader{&d.kinds.front(), 0, d.kinds.front().calls};
    const NameReading& reading = leader.kind->reading;
    const std::string gpu = gpu_text(d);
    std::string rest;
    if (d.timed && d.gpu_us > 0) {
        text += fmt::format("Here it took {} of the GPU's time: {} of {}, in {}{}{}. ",
                            share_text(d.attention_us, d.gpu_us), milliseconds_text(d.attention_us / 1000),
                            milliseconds_text(d.gpu_us / 1000), calls_text(d), gpu.empty() ? "" : " ", gpu);
        const double part = d.attention_us > 0 ? leader.us / d.attention_us : 1;
        text += part > 0.995 ? "All of it ran " : fmt::format("{:.0f} % of that ran ", 100 * part);
        rest = part > 0.995 ? "" : others_named(d, reading.family, " The rest ran ");
    } else {
        text += d.kinds.size() == 1 ? "This name is one of " : "The first of these names is one of ";
    }
    text += name_and_release(reading) + ".";
    if (!d.timed) text += others_named(d, reading.family, " Others are of ");
    text += speed_sentence(reading);
    if (reading.family != Family::eager && reading.family != Family::math) text += arch_sentence(d, reading);
    if (reading.confidence == Confidence::unsure) text += " The name is ambiguous, so that this is not certain.";
    text += rest;
    text += exactness_sentence(d);
    if (is_cut_off(d)) text += " The file is cut off, and the rest is not counted.";
    text += step_sentences(d, stated);
    const AttentionKind& known = best_known(d, *leader.kind);
    const auto advice = diagnose::advise(d, known, stated);
    return advice ? text + advice_sentences(*advice) + device_sentence(d) : text + without_advice(d, known);
}

std::string kinds_table(const Diagnosis& d, int width) {
    std::vector<Column> columns{{"kernel"}, {"pass"}, {"calls", Align::right}};
    if (d.timed) columns.push_back({"time", Align::right}), columns.push_back({"share", Align::right});
    columns.push_back({"for"});
    columns.push_back({"dim", Align::right});
    columns.push_back({"sure"});
    columns.push_back({"features"});
    Table table(columns);
    for (const AttentionKind& kind : d.kinds) {
        const NameReading& r = kind.reading;
        std::string pass = r.pass == diagnose::KernelPass::unknown ? "-" : name_of(r.pass);
        if (r.role == Role::helper) pass = "helper";
        std::vector<std::string> cells{name_of(r.family), pass, count_text(kind.calls)};
        if (d.timed) cells.push_back(milliseconds_text(kind.us / 1000)), cells.push_back(share_text(kind.us, d.gpu_us));
        cells.push_back(r.arch == 0 ? "-" : fmt::format("sm{}", r.arch));
        cells.push_back(r.head_dim == 0 ? "-" : fmt::format("{}", r.head_dim));
        cells.emplace_back(name_of(r.confidence));
        std::vector<std::string> words;
        if (r.exactness == Exactness::not_exact) words.emplace_back("NOT EXACT");
        if (!r.mask.empty()) words.push_back(r.mask == "none" ? "no mask" : r.mask);
        words.insert(words.end(), r.features.begin(), r.features.end());
        cells.push_back(words.empty() ? "-" : joined(words));
        table.add(cells);
    }
    return table.text(width);
}

std::string details_text(const Diagnosis& d, const diagnose::Call& stated, int width) {
    std::string text;
    for (const AttentionKind& kind : d.kinds) {
        text += fmt::format("{}{}, {}{}\n", text.empty() ? "" : "\n", title_of(kind.reading.family),
                            name_of(kind.reading.pass), kind.reading.role == Role::helper ? ", a helper only" : "");
        text += kind_details(d, kind, width);
        if (const auto advice = diagnose::advise(d, kind, stated)) text += advice_text(*advice, width);
    }
    text += named_text("Names that look like attention but are not", d.look_alikes, d, width);
    text += named_text("Softmax, which may be part of attention by hand", d.softmaxes, d, width);
    text += named_text("Unknown kernels", d.unknown, d, width);
    if (const auto facts = step_facts(d); !facts.empty())
        text += fmt::format("{}The whole trace\n{}", text.empty() ? "" : "\n", facts_text(facts, width));
    if (!d.notes.empty()) text += "\nAbout the file\n";
    for (const std::string& note : d.notes) text += facts_text({{" ", note}}, width);
    return text;
}

}  // namespace tessera::cli
