// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <sstream>

namespace tessera::test {

/// Does the property hold for `cases` random cases? Prints the smallest case that fails, if any.
template <class Property>
::testing::AssertionResult holds(int cases, Property&& property) {
    rc::detail::TestParams params = rc::detail::configuration().testParams;
    params.maxSuccess = cases;
    const rc::detail::TestResult result = rc::detail::checkTestable(property, rc::detail::TestMetadata{}, params);
    if (result.template is<rc::detail::SuccessResult>()) return ::testing::AssertionSuccess();
    std::ostringstream message;
    rc::detail::printResultMessage(result, message);
    return ::testing::AssertionFailure() << message.str() << "\nseed " << params.seed << " (RC_PARAMS=seed=...)";
}

}  // namespace tessera::test
