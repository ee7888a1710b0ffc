// SPDX-License-Identifier: Apache-2.0
// Device functions that touch one thread only: bits, conversions, exact float arithmetic, min and
// max, and loads and stores with a cache hint (which the emulation ignores).
#pragma once

#include <cmath>

#include "emulation/language.h"
#include "emulation/runtime.h"

// ---- Bits

inline int __popc(unsigned value) {
    return __builtin_popcount(value);
}
inline int __popcll(unsigned long long value) {
    return __builtin_popcountll(value);
}
inline int __ffs(int value) {
    return __builtin_ffs(value);
}
inline int __ffsll(long long value) {
    return __builtin_ffsll(value);
}

// CUDA defines these at zero, the compiler's builtins do not.
inline int __clz(int value) {
    return value ? __builtin_clz(static_cast<unsigned>(value)) : 32;
}
inline int __clzll(long long value) {
    return value ? __builtin_clzll(static_cast<unsigned long long>(value)) : 64;
}

inline unsigned __brev(unsigned value) {
    unsigned reversed = 0;
    for (int bit = 0; bit < 32; ++bit) {
        reversed |= (value >> bit & 1u) << (31 - bit);
    }
    return reversed;
}

inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
    shift &= 31;
    return shift ? high << shift | low >> (32 - shift) : high;
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
    shift &= 31;
    return shift ? low >> shift | high << (32 - shift) : low;
}

// Each nibble of the selector picks one of the eight bytes of b:a; bit 3 of a nibble spreads the
// sign of the byte instead.
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    const uint64_t bytes = static_cast<uint64_t>(b) << 32 | a;
    unsigned result = 0;
    for (int i = 0; i < 4; ++i) {
        const unsigned nibble = selector >> (4 * i) & 15;
        unsigned byte = static_cast<unsigned>(bytes >> (8 * (nibble & 7))) & 0xff;
        if (nibble & 8) {
            byte = byte & 0x80 ? 0xff : 0;
        }
        result |= byte << (8 * i);
    }
    return result;
}

// ---- Upper halves of products

inline unsigned __umulhi(unsigned a, unsigned b) {
    return static_cast<unsigned>(static_cast<uint64_t>(a) * b >> 32);
}
inline int __mulhi(int a, int b) {
    return static_cast<int>(static_cast<int64_t>(a) * b >> 32);
}
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    __extension__ using Wide = unsigned __int128;
    return static_cast<unsigned long long>(static_cast<Wide>(a) * b >> 64);
}
inline long long __mul64hi(long long a, long long b) {
    __extension__ using Wide = __int128;
    return static_cast<long long>(static_cast<Wide>(a) * b >> 64);
}

// ---- Conversions that keep the bits

inline int __float_as_int(float value) {
    return emu::from_bits<int>(emu::to_bits(value));
}
inline unsigned __float_as_uint(float value) {
    return emu::from_bits<unsigned>(emu::to_bits(value));
}
inline float __int_as_float(int value) {
    return emu::from_bits<float>(emu::to_bits(value));
}
inline float __uint_as_float(unsigned value) {
    return emu::from_bits<float>(emu::to_bits(value));
}

// ---- Float arithmetic that must not be contracted (the build forbids contraction everywhere)

inline float __fadd_rn(float a, float b) {
    return a + b;
}
inline float __fsub_rn(float a, float b) {
    return a - b;
}
inline float __fmul_rn(float a, float b) {
    return a * b;
}
inline float __fmaf_rn(float a, float b, float c) {
    return std::fma(a, b, c);
}

// ---- Cache hints

#define EMU_HINTED_LOAD(NAME)                  \
    template <class T>                         \
    __forceinline__ T NAME(const T* address) { \
        return *address;                       \
    }
EMU_HINTED_LOAD(__ldg)
EMU_HINTED_LOAD(__ldca)
EMU_HINTED_LOAD(__ldcg)
EMU_HINTED_LOAD(__ldcs)
EMU_HINTED_LOAD(__ldcv)
#undef EMU_HINTED_LOAD

#define EMU_HINTED_STORE(NAME)                                           \
    template <class T>                                                   \
    __forceinline__ void NAME(T* address, std::common_type_t<T> value) { \
        *address = value;                                                \
    }
EMU_HINTED_STORE(__stcg)
EMU_HINTED_STORE(__stcs)
EMU_HINTED_STORE(__stwb)
EMU_HINTED_STORE(__stwt)
#undef EMU_HINTED_STORE

// ---- min and max: the pairs of types for which CUDA declares them, result in the common type

#define EMU_MIN_MAX(A, B)                                                                     \
    inline std::common_type_t<A, B> min(A a, B b) {                                           \
        using T = std::common_type_t<A, B>;                                                   \
        return static_cast<T>(b) < static_cast<T>(a) ? static_cast<T>(b) : static_cast<T>(a); \
    }                                                                                         \
    inline std::common_type_t<A, B> max(A a, B b) {                                           \
        using T = std::common_type_t<A, B>;                                                   \
        return static_cast<T>(a) < static_cast<T>(b) ? static_cast<T>(b) : static_cast<T>(a); \
    }
EMU_MIN_MAX(int, int)
EMU_MIN_MAX(int, unsigned int)
EMU_MIN_MAX(unsigned int, int)
EMU_MIN_MAX(unsigned int, unsigned int)
EMU_MIN_MAX(long, long)
EMU_MIN_MAX(unsigned long, unsigned long)
EMU_MIN_MAX(long long, long long)
EMU_MIN_MAX(unsigned long long, unsigned long long)
EMU_MIN_MAX(float, float)
EMU_MIN_MAX(double, double)
#undef EMU_MIN_MAX
