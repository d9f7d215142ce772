// SPDX-License-Identifier: Apache-2.0
#include "records.hpp"

#include <fmt/format.h>

#include "session.hpp"

namespace tessera::cli {

std::vector<measure::Record> records_of(std::span<const std::string> paths) {
    std::vector<measure::Record> records;
    for (const std::string& path : paths) {
        std::int64_t cut_off = 0;
        for (measure::Record& record : measure::read_records(path, &cut_off)) records.push_back(std::move(record));
        if (cut_off > 0) {
            print_note(fmt::format("{}: {} cut off and left out", path,
                                   cut_off == 1 ? std::string("one line is") : fmt::format("{} lines are", cut_off)));
        }
    }
    return records;
}

}  // namespace tessera::cli
