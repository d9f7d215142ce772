// SPDX-License-Identifier: Apache-2.0 Reads 200,000 damaged files, the same in every run: a form of the fuzzers that is
// short enough for every test run.
#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>
#include <cstring>
#include <random>

#include "../fuzz/exercise.hpp"
#include "io_test_util.hpp"

#ifndef TESSERA_FUZZ_CORPUS
#define TESSERA_FUZZ_CORPUS (std::filesystem::path(__FILE__).parent_path().parent_path() / "fuzz" / "corpus")
#endif

namespace tessera::io::test::mutation_test {
namespace {

constexpr int kInputs = 100'000;  // for each format

/// The place of the header's length in a format.
struct Format {
    std::string folder;
    std::size_t length_offset;
    std::size_t length_bytes;
    std::vector<std::string> tokens;  // pieces of a header to put in the place of others
    bool (*exercise)(std::span<const std::byte>);
};

const std::vector<std::string> kNumbers{"0",
                                        "1",
                                        "2",
                                        "3",
                                        "4",
                                        "8",
                                        "65536",
                                        "-1",
                                        "2147483648",
                                        "4294967296",
                                        "4294967297",
                                        "1073741824",
                                        "1e3",
                                        "0.5",
                                        "9223372036854775807",
                                        "9223372036854775808",
                                        "18446744073709551616",
                                        "00"};

const std::vector<std::string> kJsonTokens{
    "F32",   "F64", "BF16", "F4", "I8", "U8", "shape", "dtype", "data_offsets", "__metadata__", "\"F32\"", "\"shape\"",
    "\"a\"", "{",   "}",    "[",  "]",  ",",  ":",     "{}",    "[]",           "null",         "\\u0000", "a"};

const std::vector<std::string> kPythonTokens{
    "<f4",  "<f8",   "|V2", "<u2", "|u1", "|O", "f4", "f2", "V2", "descr", "shape", "fortran_order",
    "True", "False", "(",   ")",   ",",   ":",  "{",  "}",  "()", "'",     "\"",    "(1,)",
    " ",    "\n",    "<",   "|"};

const Format kSafetensors{"safetensors", 0, 8, kJsonTokens, fuzz::exercise_safetensors};
const Format kNpy{"npy", 8, 2, kPythonTokens, fuzz::exercise_npy};

struct Seed {
    std::string name;
    std::string bytes;
};

std::vector<Seed> read_seeds(const Format& format) {
    std::vector<Seed> seeds;
    for (const auto& entry :
         std::filesystem::directory_iterator(std::filesystem::path(TESSERA_FUZZ_CORPUS) / format.folder)) {
        seeds.push_back({entry.path().filename(), get_file(entry.path())});
    }
    std::sort(seeds.begin(), seeds.end(), [](const Seed& a, const Seed& b) { return a.name < b.name; });
    return seeds;
}

class Mutator {
 public:
    Mutator(const Format& format, const std::vector<Seed>& seeds) : format_(format), seeds_(seeds) {}

    std::string next() {
        std::string input = any_seed();
        const std::size_t edits = below(2) == 0 ? 1 : 2 + below(2);
        for (std::size_t i = 0; i < edits; ++i) edit(input);
        return input;
    }

 private:
    /// A number under `bound`. std::uniform_int_distribution would give other numbers in other standard libraries.
    std::size_t below(std::size_t bound) { return static_cast<std::size_t>(random_() % bound); }

    template <class T>
    const T& pick(const std::vector<T>& choices) {
        return choices[below(choices.size())];
    }

    /// A valid file in three of four cases, because damage to it reaches deeper than damage to an attack that fails
    /// early.
    const std::string& any_seed() {
        const bool valid = below(4) != 0;
        while (true) {
            const Seed& seed = pick(seeds_);
            const bool short_enough = seed.bytes.size() < 1024;  // the few long ones would take most of the time
            if (short_enough && (!valid || seed.name.rfind("valid_", 0) == 0)) return seed.bytes;
        }
    }

    void edit(std::string& input) {
        if (input.empty()) input = any_seed();
        switch (below(9)) {
            case 0: input[below(input.size())] ^= static_cast<char>(1U << below(8)); break;
            case 1: input[below(input.size())] = static_cast<char>(random_()); break;
            case 2: resize(input); break;
            case 3: splice(input); break;
            case 4: edit_length(input); break;
            case 5: swap_tokens(input); break;
            case 6: edit_payload(input); break;
            default: replace_token(input); break;
        }
    }

    void resize(std::string& input) {
        if (below(2) == 0) input.resize(below(input.size() + 1));
        else input += any_seed().substr(0, 1 + below(16));
    }

    void edit_payload(std::string& input) {
        const std::size_t last = std::min<std::size_t>(input.size(), 16);
        input[input.size() - 1 - below(last)] ^= '\x55';
    }

    void splice(std::string& input) {
        const std::string& other = any_seed();
        input.resize(below(input.size() + 1));
        input += other.substr(below(other.size() + 1));
    }

    void edit_length(std::string& input) {
        if (input.size() < format_.length_offset + format_.length_bytes) return;
        const std::uint64_t edges[] = {
            0, 1, input.size(), input.size() - 8, 0xffff, ~std::uint64_t{0}, ~std::uint64_t{7}};
        if (below(2) == 0) shift_length(input, static_cast<std::int64_t>(below(17)) - 8);
        else std::memcpy(input.data() + format_.length_offset, &edges[below(std::size(edges))], format_.length_bytes);
    }

    void shift_length(std::string& input, std::int64_t change) const {
        std::uint64_t length = 0;
        if (input.size() < format_.length_offset + format_.length_bytes) return;
        std::memcpy(&length, input.data() + format_.length_offset, format_.length_bytes);
        length += static_cast<std::uint64_t>(change);
        std::memcpy(input.data() + format_.length_offset, &length, format_.length_bytes);
    }

    struct Token {
        std::size_t begin, size;
    };

    /// Words in quotes, numbers, and single characters of the header, found without any knowledge of the grammar.
    Token find_token(const std::string& input) {
        const auto is_word = [](char c) {
            return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_' || c == '.';
        };
        const auto is_digit = [](char c) { return c >= '0' && c <= '9'; };
        std::size_t begin = below(input.size());
        if (below(2) == 0) {  // numbers are where sizes go wrong
            const auto found = std::find_if(input.begin() + static_cast<std::ptrdiff_t>(begin), input.end(), is_digit);
            if (found != input.end()) begin = static_cast<std::size_t>(found - input.begin());
        }
        std::size_t end = begin + 1;
        if (is_word(input[begin])) {
            while (begin > 0 && is_word(input[begin - 1])) --begin;
            while (end < input.size() && is_word(input[end])) ++end;
        }
        return {begin, end - begin};
    }

    /// Three times in four the header's length follows, so that the damage reaches the parser after it.
    void replace(std::string& input, const Token& token, const std::string& text) {
        input.replace(token.begin, token.size, text);
        const bool in_header = token.begin >= format_.length_offset + format_.length_bytes;
        if (in_header && below(4) != 0) {
            shift_length(input, static_cast<std::int64_t>(text.size()) - static_cast<std::int64_t>(token.size));
        }
    }

    void replace_token(std::string& input) {
        const Token token = find_token(input);
        const bool number = std::isdigit(static_cast<unsigned char>(input[token.begin])) != 0;
        replace(input, token, number ? pick(kNumbers) : pick(format_.tokens));
    }

    void swap_tokens(std::string& input) {
        Token first = find_token(input);
        Token second = find_token(input);
        if (first.begin > second.begin) std::swap(first, second);
        if (first.begin + first.size > second.begin) return;
        const std::string a = input.substr(first.begin, first.size);
        const std::string b = input.substr(second.begin, second.size);
        input.replace(second.begin, second.size, a);
        input.replace(first.begin, first.size, b);
    }

    const Format& format_;
    const std::vector<Seed>& seeds_;
    std::mt19937_64 random_{20240229};
};

bool exercise(const Format& format, const std::string& input) {
    // A copy of exactly this size, so that the sanitizer sees a read past the end.
    const std::vector<char> exact(input.begin(), input.end());
    return format.exercise(std::as_bytes(std::span(exact)));
}

void replay_corpus(const Format& format) {
    const auto seeds = read_seeds(format);
    ASSERT_GT(seeds.size(), 30U);
    for (const Seed& seed : seeds) {
        const bool valid = seed.name.rfind("valid_", 0) == 0;
        EXPECT_EQ(exercise(format, seed.bytes), valid) << seed.name;
    }
}

void exercise_mutants(const Format& format) {
    const auto seeds = read_seeds(format);
    Mutator mutator(format, seeds);
    int accepted = 0;
    for (int i = 0; i < kInputs; ++i) {
        const std::string input = mutator.next();
        try {
            accepted += exercise(format, input) ? 1 : 0;
        } catch (const std::exception& error) {
            FAIL() << "input " << i << ": " << error.what() << "\n" << ::testing::PrintToString(input);
        }
    }
    // Damage that nothing survives would show only that the first check works.
    EXPECT_GT(accepted, kInputs / 50);
    ::testing::Test::RecordProperty("accepted", accepted);
}

TEST(Mutation, safetensors_corpus) { replay_corpus(kSafetensors); }
TEST(Mutation, npy_corpus) { replay_corpus(kNpy); }
TEST(Mutation, safetensors_mutants) { exercise_mutants(kSafetensors); }
TEST(Mutation, npy_mutants) { exercise_mutants(kNpy); }

}  // namespace
}  // namespace tessera::io::test::mutation_test
