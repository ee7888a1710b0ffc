// SPDX-License-Identifier: Apache-2.0
// The little that the C++ tests need of a test framework.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace topoep::testing {

struct Test {
    std::string name;
    std::function<void()> run;
};

inline std::vector<Test>& all_tests() {
    static std::vector<Test> tests;
    return tests;
}

inline int& failures() {
    static int count = 0;
    return count;
}

struct Registration {
    Registration(std::string name, std::function<void()> run) {
        all_tests().push_back({std::move(name), std::move(run)});
    }
};

// Calls f and returns the text of the exception it throws, or an empty string.
template <class F>
std::string error_of(F&& f) {
    try {
        f();
    } catch (const std::exception& error) {
        return error.what();
    }
    return "";
}

inline int run_all() {
    for (const Test& test : all_tests()) {
        const int before = failures();
        const std::string error = error_of(test.run);
        if (!error.empty()) {
            std::printf("  unexpected exception: %s\n", error.c_str());
            failures() += 1;
        }
        std::printf("%s %s\n", failures() == before ? "ok  " : "FAIL", test.name.c_str());
    }
    return failures() == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}

}  // namespace topoep::testing

#define TEST(name)                                                               \
    static void name();                                                          \
    static const topoep::testing::Registration name##_registration(#name, name); \
    static void name()

#define CHECK(condition)                                                            \
    do {                                                                            \
        if (!(condition)) {                                                         \
            std::printf("  %s:%d: not true: %s\n", __FILE__, __LINE__, #condition); \
            topoep::testing::failures() += 1;                                       \
        }                                                                           \
    } while (0)

#define TEST_MAIN                          \
    int main() {                           \
        return topoep::testing::run_all(); \
    }
