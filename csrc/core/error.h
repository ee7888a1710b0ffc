// SPDX-License-Identifier: Apache-2.0
// Host-side errors of the torch-free layers. The bindings turn topoep::Error into a Python
// exception.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace topoep {

class Error : public std::runtime_error {
public:
    using std::runtime_error::runtime_error;
};

namespace detail {
template <class... Parts>
[[noreturn]] void throw_error(const Parts&... parts) {
    std::ostringstream text;
    (text << ... << parts);
    throw Error(text.str());
}
}  // namespace detail

}  // namespace topoep

// The message says what was given, what was expected and how to fix it.
#define TOPOEP_CHECK(condition, ...)                    \
    do {                                                \
        if (!(condition)) {                             \
            ::topoep::detail::throw_error(__VA_ARGS__); \
        }                                               \
    } while (0)
