// SPDX-License-Identifier: Apache-2.0
//
// Where a learner is: every answer ever given, in one file.
#pragma once

#include <optional>
#include <string>
#include <vector>

namespace tessera::learn {

struct Given {
    int lesson = 0;
    std::string answer;
    bool right = false;
    std::string at{};  ///< UTC: "2026-11-22T21:40:00Z"
};

/// $XDG_STATE_HOME/tessera/learn.json, or ~/.local/state/tessera/learn.json; nothing when neither is an absolute path.
std::optional<std::string> progress_path();

/// All answers, oldest first; none when there is no file. Throws Error(bad_data) naming the file when it is not what
/// add_answer() writes: it is then left as it is. Throws Error(cannot_open).
std::vector<Given> read_progress(const std::string& path);

/// Adds one answer and keeps all others, also those that another process adds at the same time. The file is replaced
/// whole or not at all. Throws as read_progress(), and Error(cannot_write).
void add_answer(const std::string& path, Given given);

/// Was the lesson ever answered right?
bool done(const std::vector<Given>& given, int lesson);

/// How often it was answered until that, or at all.
int tries(const std::vector<Given>& given, int lesson);

}  // namespace tessera::learn
