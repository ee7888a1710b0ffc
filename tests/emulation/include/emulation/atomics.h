// SPDX-License-Identifier: Apache-2.0
// CUDA's atomic functions, with CUDA's overloads and no others: an atomicAdd on uint64_t (which is
// `unsigned long` here) must fail to compile on the host as it does under nvcc.
//
// They are forced inline so that the runtime sees the kernel's line as its return address.
#pragma once

#include "emulation/language.h"
#include "emulation/runtime.h"

namespace emu {

template <class T>
constexpr Number kNumberOf = std::is_floating_point<T>::value ? Number::kFloat
                             : std::is_signed<T>::value       ? Number::kSigned
                                                              : Number::kUnsigned;

template <class T>
__forceinline__ T atomic_value(T* address, AtomicOp op, T operand, T expected = T{}) {
    return from_bits<T>(
        atomic(address, sizeof(T), op, kNumberOf<T>, to_bits(operand), to_bits(expected)));
}

// Loads and stores of flags that other threads write meanwhile: relaxed, so they order nothing.
template <class T>
__forceinline__ T load_relaxed(const T* address) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "relaxed accesses are of 4 or 8 bytes");
    return atomic_value(const_cast<T*>(address), AtomicOp::kLoad, T{});
}
template <class T>
__forceinline__ void store_relaxed(T* address, std::common_type_t<T> value) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "relaxed accesses are of 4 or 8 bytes");
    atomic_value<T>(address, AtomicOp::kStore, value);
}

}  // namespace emu

// The scoped forms are the same function: the emulation has one device, and an atomic of block
// scope is never weaker inside its block.
#define EMU_ATOMIC(NAME, OP, T)                                        \
    __forceinline__ T NAME(T* address, T operand) {                    \
        return emu::atomic_value(address, emu::AtomicOp::OP, operand); \
    }                                                                  \
    __forceinline__ T NAME##_block(T* address, T operand) {            \
        return emu::atomic_value(address, emu::AtomicOp::OP, operand); \
    }                                                                  \
    __forceinline__ T NAME##_system(T* address, T operand) {           \
        return emu::atomic_value(address, emu::AtomicOp::OP, operand); \
    }

EMU_ATOMIC(atomicAdd, kAdd, int)
EMU_ATOMIC(atomicAdd, kAdd, unsigned int)
EMU_ATOMIC(atomicAdd, kAdd, unsigned long long)
EMU_ATOMIC(atomicAdd, kAdd, float)
EMU_ATOMIC(atomicAdd, kAdd, double)
EMU_ATOMIC(atomicSub, kSub, int)
EMU_ATOMIC(atomicSub, kSub, unsigned int)
EMU_ATOMIC(atomicMin, kMin, int)
EMU_ATOMIC(atomicMin, kMin, unsigned int)
EMU_ATOMIC(atomicMin, kMin, long long)
EMU_ATOMIC(atomicMin, kMin, unsigned long long)
EMU_ATOMIC(atomicMax, kMax, int)
EMU_ATOMIC(atomicMax, kMax, unsigned int)
EMU_ATOMIC(atomicMax, kMax, long long)
EMU_ATOMIC(atomicMax, kMax, unsigned long long)
EMU_ATOMIC(atomicAnd, kAnd, int)
EMU_ATOMIC(atomicAnd, kAnd, unsigned int)
EMU_ATOMIC(atomicAnd, kAnd, unsigned long long)
EMU_ATOMIC(atomicOr, kOr, int)
EMU_ATOMIC(atomicOr, kOr, unsigned int)
EMU_ATOMIC(atomicOr, kOr, unsigned long long)
EMU_ATOMIC(atomicXor, kXor, int)
EMU_ATOMIC(atomicXor, kXor, unsigned int)
EMU_ATOMIC(atomicXor, kXor, unsigned long long)
EMU_ATOMIC(atomicExch, kExchange, int)
EMU_ATOMIC(atomicExch, kExchange, unsigned int)
EMU_ATOMIC(atomicExch, kExchange, unsigned long long)
EMU_ATOMIC(atomicExch, kExchange, float)
EMU_ATOMIC(atomicInc, kIncrement, unsigned int)
EMU_ATOMIC(atomicDec, kDecrement, unsigned int)
#undef EMU_ATOMIC

#define EMU_COMPARE_AND_SWAP(NAME, T)                                                          \
    __forceinline__ T NAME(T* address, T expected, T desired) {                                \
        return emu::atomic_value(address, emu::AtomicOp::kCompareExchange, desired, expected); \
    }
EMU_COMPARE_AND_SWAP(atomicCAS, int)
EMU_COMPARE_AND_SWAP(atomicCAS, unsigned int)
EMU_COMPARE_AND_SWAP(atomicCAS, unsigned long long)
EMU_COMPARE_AND_SWAP(atomicCAS_block, int)
EMU_COMPARE_AND_SWAP(atomicCAS_block, unsigned int)
EMU_COMPARE_AND_SWAP(atomicCAS_block, unsigned long long)
EMU_COMPARE_AND_SWAP(atomicCAS_system, int)
EMU_COMPARE_AND_SWAP(atomicCAS_system, unsigned int)
EMU_COMPARE_AND_SWAP(atomicCAS_system, unsigned long long)
#undef EMU_COMPARE_AND_SWAP
