// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <cstdint>
#include <limits>

#include "check.h"
#include "core/numeric.h"

using namespace topoep;

namespace {

constexpr uint32_t kAllHalves = 1u << 16;

// The value of a 16-bit float, from its definition.
double half_value(uint16_t bits, int exponent_bits, int mantissa_bits) {
    const int bias = (1 << (exponent_bits - 1)) - 1;
    const int exponent = bits >> mantissa_bits & ((1 << exponent_bits) - 1);
    const int mantissa = bits & ((1 << mantissa_bits) - 1);
    const double sign = bits >> 15 ? -1.0 : 1.0;
    if (exponent == (1 << exponent_bits) - 1) {
        return mantissa ? std::numeric_limits<double>::quiet_NaN() : sign * INFINITY;
    }
    const int shown = exponent == 0 ? 1 : exponent;
    const int implied = exponent == 0 ? 0 : 1 << mantissa_bits;
    return sign * std::ldexp(implied + mantissa, shown - bias - mantissa_bits);
}

bool same(double a, double b) {
    return a == b || (std::isnan(a) && std::isnan(b));
}

// The nearest of all values of T, ties to the even bit pattern.
template <class T>
void check_rounds_to_nearest_even() {
    for (uint32_t bits = 0; bits + 1 < 0x7c00; bits += 7) {
        const T low{static_cast<uint16_t>(bits)};
        const T high{static_cast<uint16_t>(bits + 1)};
        const double a = widen(low);
        const double b = widen(high);
        if (std::isinf(b)) {
            break;
        }
        const float middle = static_cast<float>((a + b) / 2);
        const uint16_t even = static_cast<uint16_t>(bits % 2 == 0 ? bits : bits + 1);
        CHECK(Narrow<T>::from(middle).bits == even);
        CHECK(Narrow<T>::from(std::nextafter(middle, -INFINITY)).bits == low.bits);
        CHECK(Narrow<T>::from(std::nextafter(middle, INFINITY)).bits == high.bits);
        CHECK(Narrow<T>::from(-middle).bits == (even | 0x8000));
    }
}

}  // namespace

TEST(every_float16_widens_exactly_and_comes_back) {
    for (uint32_t bits = 0; bits < kAllHalves; ++bits) {
        const Float16 half{static_cast<uint16_t>(bits)};
        const double expected = half_value(half.bits, 5, 10);
        CHECK(same(widen(half), expected));
        CHECK(std::isnan(expected) ? std::isnan(widen(Narrow<Float16>::from(widen(half))))
                                   : Narrow<Float16>::from(widen(half)).bits == half.bits);
    }
}

TEST(every_bfloat16_widens_exactly_and_comes_back) {
    for (uint32_t bits = 0; bits < kAllHalves; ++bits) {
        const BFloat16 half{static_cast<uint16_t>(bits)};
        const double expected = half_value(half.bits, 8, 7);
        CHECK(same(widen(half), expected));
        CHECK(std::isnan(expected) ? std::isnan(widen(Narrow<BFloat16>::from(widen(half))))
                                   : Narrow<BFloat16>::from(widen(half)).bits == half.bits);
    }
}

TEST(narrowing_rounds_to_nearest_even) {
    check_rounds_to_nearest_even<Float16>();
    check_rounds_to_nearest_even<BFloat16>();
}

TEST(too_large_numbers_become_infinite) {
    CHECK(Narrow<Float16>::from(65519.0f).bits == 0x7bff);
    CHECK(Narrow<Float16>::from(65520.0f).bits == 0x7c00);
    CHECK(Narrow<Float16>::from(-1e30f).bits == 0xfc00);
    CHECK(Narrow<BFloat16>::from(std::numeric_limits<float>::max()).bits == 0x7f80);
}

TEST(multiply_add_rounds_twice) {
    const float a = 1.0f + std::ldexp(1.0f, -12);
    // a * a = 1 + 2^-11 + 2^-24: the last term is lost by the first rounding, kept by a fused one.
    CHECK(multiply_add(a, a, -1.0f) == std::ldexp(1.0f, -11));
}

TEST_MAIN
