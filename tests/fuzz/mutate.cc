// SPDX-License-Identifier: Apache-2.0
//
// mutate name|trace COUNT SEED FOLDER...: reads damaged copies of the files in the folders, one after the other. It
// needs no coverage and works with any compiler, so millions take minutes. libFuzzer finds the seeds that are worth
// keeping.
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include "exercise_trace.hpp"

namespace tessera::diagnose::fuzz {
namespace {

class Mutator {
 public:
    Mutator(std::vector<std::string> seeds, std::uint64_t seed) : seeds_(std::move(seeds)), random_(seed) {}

    std::string next() {
        std::string text = seeds_[below(seeds_.size())];
        for (std::size_t edits = 1 + below(4); edits > 0; --edits) edit(text);
        return text;
    }

 private:
    std::size_t below(std::size_t bound) { return bound == 0 ? 0 : static_cast<std::size_t>(random_() % bound); }

    void edit(std::string& text) {
        const std::size_t at = below(text.size() + 1);
        const std::string& other = seeds_[below(seeds_.size())];
        switch (below(6)) {
            case 0: text.insert(at, 1, static_cast<char>(random_())); break;
            case 1: text.erase(at, 1 + below(24)); break;
            case 2: text.resize(at); break;
            case 3: text.insert(at, other, below(other.size()), below(64)); break;
            case 4: text.insert(at, text, below(text.size()), below(64)); break;
            default:
                if (at < text.size()) text[at] = static_cast<char>(text[at] ^ (1 << below(8)));
        }
    }

    std::vector<std::string> seeds_;
    std::mt19937_64 random_;
};

std::vector<std::string> files_in(int count, char** folders) {
    std::vector<std::string> files;
    for (int i = 0; i < count; ++i) {
        for (const auto& entry : std::filesystem::directory_iterator(folders[i])) {
            std::ifstream file(entry.path(), std::ios::binary);
            files.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
        }
    }
    return files;
}

int run(int argc, char** argv) {
    if (argc < 5) {
        std::fputs("usage: mutate name|trace COUNT SEED FOLDER...\n", stderr);
        return 2;
    }
    const bool names = std::string(argv[1]) == "name";
    const long long count = std::atoll(argv[2]);
    Mutator mutator(files_in(argc - 4, argv + 4), std::strtoull(argv[3], nullptr, 10));
    long long read = 0;
    for (long long i = 0; i < count; ++i) {
        const std::string text = mutator.next();
        if (names) exercise_name(text);
        else read += exercise_trace(text) ? 1 : 0;
    }
    if (names) std::printf("%lld names\n", count);
    else std::printf("%lld traces, %lld of them could be read\n", count, read);
    return 0;
}

}  // namespace
}  // namespace tessera::diagnose::fuzz

int main(int argc, char** argv) { return tessera::diagnose::fuzz::run(argc, argv); }
