// SPDX-License-Identifier: Apache-2.0
// CUDA's built-in vector types with CUDA's alignment, so that the host side of the emulation needs
// no CUDA toolkit. The alignment matters beyond layout: a misaligned uint4 access is reported.
#pragma once

#define EMU_VECTOR_2(Scalar, Name, alignment)           \
    struct alignas(alignment) Name##2 {                 \
        Scalar x, y;                                    \
    };                                                  \
    inline Name##2 make_##Name##2(Scalar x, Scalar y) { \
        return {x, y};                                  \
    }

// Three elements pack without padding, so they are only aligned as one element is.
#define EMU_VECTOR_3(Scalar, Name)                                \
    struct Name##3 {                                              \
        Scalar x, y, z;                                           \
    };                                                            \
    inline Name##3 make_##Name##3(Scalar x, Scalar y, Scalar z) { \
        return {x, y, z};                                         \
    }

#define EMU_VECTOR_4(Scalar, Name, alignment)                               \
    struct alignas(alignment) Name##4 {                                     \
        Scalar x, y, z, w;                                                  \
    };                                                                      \
    inline Name##4 make_##Name##4(Scalar x, Scalar y, Scalar z, Scalar w) { \
        return {x, y, z, w};                                                \
    }

EMU_VECTOR_2(signed char, char, 2)
EMU_VECTOR_2(unsigned char, uchar, 2)
EMU_VECTOR_2(short, short, 4)
EMU_VECTOR_2(unsigned short, ushort, 4)
EMU_VECTOR_2(int, int, 8)
EMU_VECTOR_2(unsigned int, uint, 8)
EMU_VECTOR_2(long long, longlong, 16)
EMU_VECTOR_2(unsigned long long, ulonglong, 16)
EMU_VECTOR_2(float, float, 8)
EMU_VECTOR_2(double, double, 16)

EMU_VECTOR_3(int, int)
EMU_VECTOR_3(unsigned int, uint)
EMU_VECTOR_3(float, float)

EMU_VECTOR_4(signed char, char, 4)
EMU_VECTOR_4(unsigned char, uchar, 4)
EMU_VECTOR_4(short, short, 8)
EMU_VECTOR_4(unsigned short, ushort, 8)
EMU_VECTOR_4(int, int, 16)
EMU_VECTOR_4(unsigned int, uint, 16)
EMU_VECTOR_4(float, float, 16)

#undef EMU_VECTOR_2
#undef EMU_VECTOR_3
#undef EMU_VECTOR_4

struct dim3 {
    unsigned int x, y, z;
    constexpr dim3(unsigned int x = 1, unsigned int y = 1, unsigned int z = 1) : x(x), y(y), z(z) {}
    constexpr dim3(uint3 v) : x(v.x), y(v.y), z(v.z) {}
    constexpr operator uint3() const { return {x, y, z}; }
};
