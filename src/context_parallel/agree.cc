// SPDX-License-Identifier: Apache-2.0
#include "context_parallel/agree.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <map>

#include "tessera/error.hpp"

namespace tessera::ranks {
namespace {

constexpr std::size_t kBytes = 4096;  // of a message, which has one size on every rank
using Text = std::array<char, kBytes>;

/// Writes one field on each line; a value is truncated to the length that fits a message.
Text packed(const Fields& fields) {
    std::string text;
    const std::size_t most = kBytes / fields.size();
    for (const auto& [name, value] : fields) {
        std::string line = fmt::format("{}\t{}", name, value).substr(0, most - 1);
        std::replace(line.begin(), line.end(), '\n', ' ');
        text += line + '\n';
    }
    Text message{};
    std::copy(text.begin(), text.end(), message.begin());
    return message;
}

Fields unpacked(const Text& message) {
    Fields fields;
    const std::string text(message.data(), std::find(message.begin(), message.end(), '\0'));
    for (std::size_t begin = 0; begin < text.size();) {
        const std::size_t end = text.find('\n', begin), tab = text.find('\t', begin);
        fields.emplace_back(text.substr(begin, tab - begin), text.substr(tab + 1, end - tab - 1));
        begin = end + 1;
    }
    return fields;
}

/// The fields of all ranks.
std::vector<Fields> exchanged(const Fields& fields, Communicator& communicator, DeviceRows& device) {
    const auto ranks = static_cast<std::size_t>(communicator.ranks());
    const auto rank = static_cast<std::size_t>(communicator.rank());
    std::vector<Text> all(ranks);
    all[rank] = packed(fields);
    auto* memory = static_cast<std::byte*>(device.allocate(ranks * kBytes));
    device.write(memory, all.data(), ranks * kBytes);
    std::vector<Message> sends, receives;
    for (std::size_t other = 0; other < ranks; ++other) {
        if (other == rank) continue;
        sends.push_back({static_cast<int>(other), memory + rank * kBytes, kBytes});
        receives.push_back({static_cast<int>(other), memory + other * kBytes, kBytes});
    }
    communicator.exchange(sends, receives, device.side_stream());
    device.read(all.data(), memory, ranks * kBytes);
    std::vector<Fields> found;
    for (const Text& message : all) found.push_back(unpacked(message));
    return found;
}

std::string ranks_text(const std::vector<std::size_t>& ranks) {
    return fmt::format("{} {}", ranks.size() == 1 ? "rank" : "ranks", fmt::join(ranks, ", "));
}

}  // namespace

void agree(const Fields& fields, Communicator& communicator, DeviceRows& device) {
    const std::vector<Fields> all = exchanged(fields, communicator, device);
    for (std::size_t rank = 0; rank < all.size(); ++rank) {
        for (const auto& [name, value] : all[rank]) {
            if (name == "error" && !value.empty())
                throw Error(ErrorCode::invalid_argument, "", fmt::format("rank {} refused the call: {}", rank, value));
        }
    }
    for (std::size_t i = 0; i < fields.size(); ++i) {
        std::map<std::string, std::vector<std::size_t>> by_value;
        for (std::size_t rank = 0; rank < all.size(); ++rank)
            by_value[i < all[rank].size() ? all[rank][i].second : ""].push_back(rank);
        if (by_value.size() == 1) continue;
        std::vector<std::string> said;
        for (const auto& [value, ranks] : by_value) said.push_back(fmt::format("{} on {}", value, ranks_text(ranks)));
        throw Error(ErrorCode::invalid_argument, fields[i].first,
                    fmt::format("expected the same on all ranks, got {}", fmt::join(said, ", ")));
    }
}

}  // namespace tessera::ranks
