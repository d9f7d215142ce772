// SPDX-License-Identifier: Apache-2.0
//
// Compares the table of rules with PyTorch's own answers on a GPU: pytorch_*.tsv, written by tools/which_rules.py.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>

#include "diagnose/calls.hpp"

namespace tessera::diagnose::pytorch_test {
namespace {

std::vector<std::string> split(const std::string& text, char separator) {
    std::vector<std::string> parts;
    std::istringstream stream(text);
    for (std::string part; std::getline(stream, part, separator);) parts.push_back(part);
    return parts;
}

/// The part of q, k or v in "q/k/v", "q/kv" or "qkv".
std::string part_of(const std::string& text, std::size_t index) {
    const auto parts = split(text, '/');
    return parts[std::min(index, parts.size() - 1)];
}

Sizes sizes_of(const std::string& text) {
    Sizes sizes;
    for (const std::string& size : split(text, ',')) sizes.push_back(std::stoll(size));
    return sizes;
}

/// PyTorch's answers: the machine, the texts by their numbers, and a row for each call.
struct Record {
    Call machine{};
    std::map<std::string, std::string> texts{};
    std::vector<std::vector<std::string>> rows{};  // shapes, dtypes, mask, options, three answers, the choice
};

Record read_record(const std::filesystem::path& path) {
    Record record;
    std::ifstream file(path);
    for (std::string line; std::getline(file, line);) {
        auto fields = split(line, '\t');
        if (fields.empty() || fields[0][0] == '#') continue;
        const std::string kind = fields[0];
        fields.erase(fields.begin());
        if (kind == "about") {
            const auto version = split(fields[0], '.');
            const auto capability = split(fields[1], '.');
            const auto cuda = split(fields[3], '.');
            record.machine.torch = Version{std::stoi(version[0]), std::stoi(version[1]), std::stoi(version[2])};
            record.machine.gpu.capability = std::stoi(capability[0]) * 10 + std::stoi(capability[1]);
            record.machine.gpu.rocm = false;
            record.machine.cudnn = std::stoi(fields[2]);
            record.machine.cuda = std::stoi(cuda[0]) * 1000 + std::stoi(cuda[1]) * 10;
        } else if (kind == "text") {
            record.texts[fields[0]] = fields[1];
        } else if (kind == "call") {
            record.rows.push_back(fields);
        }
    }
    return record;
}

Element element_of(const std::string& name) {
    const std::map<std::string, Element> elements = {
        {"fp16", Element::fp16}, {"bf16", Element::bf16}, {"fp32", Element::fp32}, {"fp64", Element::fp64}};
    return elements.at(name);
}

void set_mask_of(Call& call, const std::string& mask) {
    call.is_causal = mask == "causal";
    call.mask_kind = MaskKind::none;
    const auto parts = split(mask, ':');
    if (parts.size() < 2) return;
    const bool boolean = parts[0] == "bool";
    call.mask_kind = boolean ? MaskKind::boolean : MaskKind::floating;
    call.mask = tensor(sizes_of(parts[1]), boolean ? Element::other : *call.q.element);
}

void apply_option(Call& call, const std::string& name, const std::string& value) {
    if (name == "gqa") call.enable_gqa = true;
    else if (name == "dropout") call.dropout = std::stod(value);
    else if (name == "deterministic") call.deterministic = true;
    else if (name == "q_offset") call.q.storage_offset = std::stoll(value);
    else if (name == "mask_grad") call.mask.requires_grad = true;
    else if (name == "grad") call.q.requires_grad = call.k.requires_grad = call.v.requires_grad = true;
    else if (name == "k_stride") {
        for (std::int64_t& stride : *call.k.strides) stride *= 2;
    } else if (name == "expanded_mask") {
        call.mask.shape->back() = call.k.shape->at(2);
        call.mask.strides->back() = 0;
    } else if (name == "off") {
        for (const std::string& backend : split(value, ',')) {
            (backend == "flash"       ? call.enabled->flash
             : backend == "efficient" ? call.enabled->efficient
             : backend == "cudnn"     ? call.enabled->cudnn
                                      : call.enabled->math) = false;
        }
    } else {
        FAIL() << "an option that the test does not know: " << name;
    }
}

Call call_of(const Record& record, const std::vector<std::string>& row) {
    Call call = record.machine;
    call.enabled = Enabled{};
    Operand* operands[] = {&call.q, &call.k, &call.v};
    for (std::size_t i = 0; i < 3; ++i)
        *operands[i] = tensor(sizes_of(part_of(row[0], i)), element_of(part_of(row[1], i)));
    set_mask_of(call, row[2]);
    for (const std::string& option : split(row[3], ' ')) {
        const auto parts = split(option, '=');
        apply_option(call, parts[0], parts.size() > 1 ? parts[1] : "");
    }
    std::vector<std::string> assumed;
    return assume_defaults(call, assumed);
}

/// PyTorch prints some reasons only once.
bool was_printed(const Record& record, const std::string& text) {
    return std::any_of(record.texts.begin(), record.texts.end(),
                       [&](const auto& printed) { return printed.second.find(text) != std::string::npos; });
}

void expect_answer(const Record& record, const Verdict& verdict, const std::string& answer) {
    if (answer == "runs") {
        EXPECT_TRUE(verdict.standing == Standing::taken || verdict.standing == Standing::could_run)
            << "PyTorch takes it, the table: " << name_of(verdict.standing);
        return;
    }
    ASSERT_EQ(verdict.standing, Standing::refused) << "PyTorch refuses: " << answer;
    const std::string first = verdict.refusals.front()->text;
    if (answer == "no")
        EXPECT_TRUE(first.empty() || was_printed(record, first)) << "PyTorch gives no reason: " << first;
    else
        EXPECT_NE(record.texts.at(answer).find(first.substr(0, 100)), std::string::npos)
            << "PyTorch: " << record.texts.at(answer) << "\nthe table: " << first;
}

/// PyTorch prints the first of its reasons, so the first in the table's order has to be that one.
TEST(PyTorch, the_table_says_what_it_said) {
    std::size_t records = 0;
    for (const auto& entry : std::filesystem::directory_iterator(TESSERA_SOURCE_DIR "/tests/diagnose")) {
        if (entry.path().filename().string().rfind("pytorch_", 0) != 0 || entry.path().extension() != ".tsv") continue;
        ++records;
        const Record record = read_record(entry.path());
        EXPECT_GE(record.rows.size(), 100U);
        for (const auto& row : record.rows) {
            SCOPED_TRACE(row[0] + " " + row[1] + " " + row[2] + " " + row[3]);
            const Explanation explanation = explain(call_of(record, row));
            const std::pair<SdpBackend, std::string> answers[] = {
                {SdpBackend::flash, row[4]}, {SdpBackend::efficient, row[5]}, {SdpBackend::cudnn, row[6]}};
            for (const auto& [backend, answer] : answers) {
                for (const Verdict& verdict : explanation.verdicts) {
                    if (verdict.backend == backend) expect_answer(record, verdict, answer);
                }
            }
            EXPECT_EQ(explanation.aborts ? "none" : name_of(explanation.taken.value()), row[7]);
        }
    }
    EXPECT_GE(records, 1U);
}

}  // namespace
}  // namespace tessera::diagnose::pytorch_test
