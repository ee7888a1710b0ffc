// SPDX-License-Identifier: Apache-2.0
// Number types of the data path and arithmetic that rounds the same way on host and device:
// multiply and add are two roundings everywhere (no fused multiply-add), and 16-bit types are
// widened exactly and rounded to nearest even.
#pragma once

#include <cstdint>
#include <cstring>

#include "core/hd.h"

namespace topoep {

enum class DType : int { kFloat32, kFloat64, kFloat16, kBFloat16 };

struct BFloat16 {
    uint16_t bits;
};

struct Float16 {
    uint16_t bits;
};

// Sums are formed in this type.
template <class T>
struct Accumulator {
    using Type = float;
};
template <>
struct Accumulator<double> {
    using Type = double;
};
template <class T>
using AccumulatorOf = typename Accumulator<T>::Type;

TOPOEP_HD uint32_t float_bits(float value) {
#if defined(__CUDA_ARCH__)
    return __float_as_uint(value);
#else
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
#endif
}

TOPOEP_HD float float_from_bits(uint32_t bits) {
#if defined(__CUDA_ARCH__)
    return __uint_as_float(bits);
#else
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
#endif
}

TOPOEP_HD float widen(float value) {
    return value;
}
TOPOEP_HD double widen(double value) {
    return value;
}
TOPOEP_HD float widen(BFloat16 value) {
    return float_from_bits(uint32_t{value.bits} << 16);
}
TOPOEP_HD float widen(Float16 value) {
    const uint32_t sign = uint32_t{value.bits} >> 15 << 31;
    const uint32_t exponent = value.bits >> 10 & 0x1f;
    const uint32_t mantissa = value.bits & 0x3ff;
    if (exponent == 0) {  // zero or subnormal: mantissa * 2^-24, exact in float
        const float magnitude = static_cast<float>(mantissa) * 5.9604644775390625e-08f;
        return float_from_bits(sign | float_bits(magnitude));
    }
    const uint32_t wide_exponent = exponent == 0x1f ? 0xff : exponent + 112;
    return float_from_bits(sign | wide_exponent << 23 | mantissa << 13);
}

// Rounds bits to nearest even after dropping `shift` low bits.
TOPOEP_HD uint32_t round_shift(uint32_t bits, int shift) {
    const uint32_t half = (1u << (shift - 1)) - 1;
    return (bits + half + (bits >> shift & 1)) >> shift;
}

template <class T>
struct Narrow;
template <>
struct Narrow<float> {
    static TOPOEP_HD float from(float value) { return value; }
};
template <>
struct Narrow<double> {
    static TOPOEP_HD double from(double value) { return value; }
};
template <>
struct Narrow<BFloat16> {
    static TOPOEP_HD BFloat16 from(float value) {
        const uint32_t bits = float_bits(value);
        const bool is_nan = (bits & 0x7fffffff) > 0x7f800000;
        return {static_cast<uint16_t>(is_nan ? bits >> 16 | 0x40 : round_shift(bits, 16))};
    }
};
template <>
struct Narrow<Float16> {
    static TOPOEP_HD Float16 from(float value) {
        const uint32_t bits = float_bits(value);
        const uint32_t sign = bits >> 16 & 0x8000;
        const uint32_t magnitude = bits & 0x7fffffff;
        if (magnitude > 0x7f800000) {
            return {static_cast<uint16_t>(sign | 0x7e00)};
        }
        if (magnitude >= 0x477ff000) {  // rounds to infinity
            return {static_cast<uint16_t>(sign | 0x7c00)};
        }
        if (magnitude < 0x38800000) {  // subnormal half: adding 0.5 makes float round at 2^-24
            const float rounded = float_from_bits(magnitude) + 0.5f;
            return {static_cast<uint16_t>(sign | (float_bits(rounded) - 0x3f000000))};
        }
        return {static_cast<uint16_t>(sign | round_shift(magnitude - 0x38000000, 13))};
    }
};

// a * b + c with two roundings. The host side is compiled with -ffp-contract=off.
TOPOEP_HD float multiply_add(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
    return __fadd_rn(__fmul_rn(a, b), c);
#else
    return a * b + c;
#endif
}

TOPOEP_HD double multiply_add(double a, double b, double c) {
#if defined(__CUDA_ARCH__)
    return __dadd_rn(__dmul_rn(a, b), c);
#else
    return a * b + c;
#endif
}

// The dot product of combine's backward is summed by 32 lanes: elements go to the lanes in runs of
// kDotRun, a lane adds its elements in order, and the lanes' sums are added pairwise, distance 16,
// 8, 4, 2, 1. Host and device both do exactly this.
constexpr int kDotLanes = 32;
constexpr int kDotRun = 8;

}  // namespace topoep
