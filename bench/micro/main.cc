// SPDX-License-Identifier: Apache-2.0
//
// tessera_micro [RECORDS [COMMIT]]: measures the ceilings of the GPU, prints a table, appends Records to a file.
#include <fmt/format.h>

#include <exception>
#include <string>

#include "micro/figures.hpp"

int main(int argc, char** argv) {
    using namespace tessera::micro;
    try {
        const Chip chip = this_chip();
        std::vector<Figure> figures;
        for (const auto group :
             {wgmma_figures, copy_figures, warp_figures, arithmetic_figures, memory_figures, waiting_figures}) {
            for (Figure& figure : group(chip)) figures.push_back(std::move(figure));
        }
        print(chip, figures);
        if (argc > 1) save(argv[1], argc > 2 ? argv[2] : "", chip, figures);
        return 0;
    } catch (const std::exception& error) {
        fmt::print(stderr, "tessera_micro: {}\n", error.what());
        return 70;
    }
}
