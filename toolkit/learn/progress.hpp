// SPDX-License-Identifier: Apache-2.0
//
// A learner's progress: every answer ever given, in one file.
#pragma once

#include <optional>
#include <string>
#include <vector>

namespace tessera::learn {

/// A saved answer.
struct SavedAnswer {
    int lesson = 0;
    std::string answer;
    bool right = false;
    std::string at{};  ///< UTC: "2026-11-22T21:40:00Z"
};

/// $XDG_STATE_HOME/tessera/learn.json, or ~/.local/state/tessera/learn.json; nothing if neither is an absolute path.
std::optional<std::string> progress_path();

/// Reads all answers, oldest first; none if there is no file. Throws Error(cannot_open). Throws Error(bad_data) naming
/// the file if add_answer() did not write it; the file is left unchanged.
std::vector<SavedAnswer> read_progress(const std::string& path);

/// Adds one answer and keeps all others, including those that another process adds meanwhile. The file is replaced
/// atomically. Throws as read_progress() does, and Error(cannot_write).
void add_answer(const std::string& path, SavedAnswer given);

/// True if the lesson was ever answered right.
bool done(const std::vector<SavedAnswer>& given, int lesson);

/// The number of answers up to the first right one, or of all answers if none is right.
int tries(const std::vector<SavedAnswer>& given, int lesson);

}  // namespace tessera::learn
