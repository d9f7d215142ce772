// SPDX-License-Identifier: Apache-2.0
//
// Every tolerance of compare_tensor(). docs/numerics.md has these numbers and their meaning in the table
// "Tolerances" under the same names; a test compares the two.
#pragma once

namespace tessera::check {

// fp32.
inline constexpr double kOutputRmse = 2e-6;
inline constexpr double kGradientRmse = 1e-5;
inline constexpr double kCancelled = 2;
inline constexpr double kFewElements = 4;
inline constexpr double kBlockRatio = 2;
inline constexpr double kOutputElement = 1e-5;
inline constexpr double kGradientElement = 2e-5;
inline constexpr double kElementValue = 4;

// bf16 and fp16.
inline constexpr double kElementRoundings = 1.5;
inline constexpr double kMaxRatio = 1.5;
inline constexpr double kRmseRatio = 1.1;
inline constexpr double kSharpRatio = 1.5;
inline constexpr double kRare = 1e-5;
inline constexpr double kFp32Sums = 8;
inline constexpr double kBiasErrors = 5;
inline constexpr double kBiasPerfect = 1.5;
inline constexpr double kBiasFloor = 0.01;

// LSE.
inline constexpr double kLseAbsolute = 2e-6;
inline constexpr double kLseRelative = 0x1p-20;

// Allowances.
inline constexpr double kScoreRoundings = 4;
inline constexpr double kSlopeRoundings = 8;
inline constexpr double kOrdinaryScore = 32;
inline constexpr double kOrdinaryLse = 8;
inline constexpr double kFreeWeight = 0.1;
inline constexpr double kResidualOfO = 0x1p-8;
inline constexpr double kFlushed = 0x1p-96;
inline constexpr double kFlushedWeight = 0x1p-94;
inline constexpr double kSubnormalWeight = 0x1p-25;
inline constexpr double kSubnormalGradient = 0x1p-39;

inline constexpr int kBlockRows = 64;

struct Tolerance {
    const char* name;
    double value;
};

/// The table of docs/numerics.md.
inline constexpr Tolerance kTolerances[] = {
    {"output RMSE", kOutputRmse},
    {"gradient RMSE", kGradientRmse},
    {"cancelled", kCancelled},
    {"few elements", kFewElements},
    {"block ratio", kBlockRatio},
    {"output element", kOutputElement},
    {"gradient element", kGradientElement},
    {"element value", kElementValue},
    {"element roundings", kElementRoundings},
    {"maximum ratio", kMaxRatio},
    {"RMSE ratio", kRmseRatio},
    {"sharp ratio", kSharpRatio},
    {"rare", kRare},
    {"fp32 sums", kFp32Sums},
    {"bias errors", kBiasErrors},
    {"bias perfect", kBiasPerfect},
    {"bias floor", kBiasFloor},
    {"LSE absolute", kLseAbsolute},
    {"LSE relative", kLseRelative},
    {"score roundings", kScoreRoundings},
    {"slope roundings", kSlopeRoundings},
    {"ordinary score", kOrdinaryScore},
    {"ordinary LSE", kOrdinaryLse},
    {"free weight", kFreeWeight},
    {"residual of O", kResidualOfO},
    {"flushed", kFlushed},
    {"flushed weight", kFlushedWeight},
    {"subnormal weight", kSubnormalWeight},
    {"subnormal gradient", kSubnormalGradient},
    {"block rows", kBlockRows},
};

}  // namespace tessera::check
