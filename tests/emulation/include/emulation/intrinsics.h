// SPDX-License-Identifier: Apache-2.0
// The built-in variables and functions of CUDA by which threads know and meet each other.
#pragma once

#include "emulation/language.h"
#include "emulation/runtime.h"

#define threadIdx (::emu::thread_index())
#define blockIdx (::emu::block_index())
#define blockDim (::emu::block_shape())
#define gridDim (::emu::grid_shape())
constexpr int warpSize = 32;

// ---- Block barriers

inline void __syncthreads(emu::Site site = emu::Site::here()) {
    emu::block_barrier(emu::Vote::kNone, 0, site);
}
inline int __syncthreads_and(int predicate, emu::Site site = emu::Site::here()) {
    return emu::block_barrier(emu::Vote::kAnd, predicate, site);
}
inline int __syncthreads_or(int predicate, emu::Site site = emu::Site::here()) {
    return emu::block_barrier(emu::Vote::kOr, predicate, site);
}
inline int __syncthreads_count(int predicate, emu::Site site = emu::Site::here()) {
    return emu::block_barrier(emu::Vote::kCount, predicate, site);
}

// ---- Warp collectives. Only __syncwarp orders memory: shuffles and votes exchange registers.

inline void __syncwarp(unsigned mask = 0xffffffffu, emu::Site site = emu::Site::here()) {
    emu::warp_collective(emu::WarpOp::kSync, mask, 0, {}, site);
}
inline unsigned __activemask() {
    return emu::active_mask();
}

inline unsigned __ballot_sync(unsigned mask, int predicate, emu::Site site = emu::Site::here()) {
    const emu::WarpOp op = emu::WarpOp::kBallot;
    return static_cast<unsigned>(emu::warp_collective(op, mask, predicate != 0, {}, site).value);
}
inline int __any_sync(unsigned mask, int predicate, emu::Site site = emu::Site::here()) {
    const emu::WarpOp op = emu::WarpOp::kAny;
    return static_cast<int>(emu::warp_collective(op, mask, predicate != 0, {}, site).value);
}
inline int __all_sync(unsigned mask, int predicate, emu::Site site = emu::Site::here()) {
    const emu::WarpOp op = emu::WarpOp::kAll;
    return static_cast<int>(emu::warp_collective(op, mask, predicate != 0, {}, site).value);
}

namespace emu {
// The hardware exchanges registers of 32 or 64 bits; CUDA has no overloads for smaller types.
template <class T>
constexpr bool kExchangeable = std::is_arithmetic<T>::value && (sizeof(T) == 4 || sizeof(T) == 8);
}  // namespace emu

#define EMU_SHUFFLE(NAME, OP, OperandType)                                                        \
    template <class T>                                                                            \
    T NAME(unsigned mask, T value, OperandType operand, int width = 32,                           \
           emu::Site site = emu::Site::here()) {                                                  \
        static_assert(emu::kExchangeable<T>, "CUDA has no shuffle for this type");                \
        return emu::from_bits<T>(emu::warp_collective(emu::WarpOp::OP, mask, emu::to_bits(value), \
                                                      {static_cast<int>(operand), width}, site)   \
                                     .value);                                                     \
    }
EMU_SHUFFLE(__shfl_sync, kShuffle, int)
EMU_SHUFFLE(__shfl_up_sync, kShuffleUp, unsigned)
EMU_SHUFFLE(__shfl_down_sync, kShuffleDown, unsigned)
EMU_SHUFFLE(__shfl_xor_sync, kShuffleXor, int)
#undef EMU_SHUFFLE

template <class T>
unsigned __match_any_sync(unsigned mask, T value, emu::Site site = emu::Site::here()) {
    static_assert(emu::kExchangeable<T>, "CUDA has no match for this type");
    return static_cast<unsigned>(
        emu::warp_collective(emu::WarpOp::kMatchAny, mask, emu::to_bits(value), {}, site).value);
}
template <class T>
unsigned __match_all_sync(unsigned mask, T value, int* all_equal,
                          emu::Site site = emu::Site::here()) {
    static_assert(emu::kExchangeable<T>, "CUDA has no match for this type");
    const emu::WarpResult result =
        emu::warp_collective(emu::WarpOp::kMatchAll, mask, emu::to_bits(value), {}, site);
    *all_equal = result.predicate;
    return static_cast<unsigned>(result.value);
}

#define EMU_REDUCE(NAME, T, OP)                                                                   \
    inline T NAME(unsigned mask, T value, emu::Site site = emu::Site::here()) {                   \
        const uint32_t bits = static_cast<uint32_t>(value);                                       \
        return static_cast<T>(emu::warp_collective(emu::WarpOp::OP, mask, bits, {}, site).value); \
    }
EMU_REDUCE(__reduce_add_sync, unsigned, kAdd)
EMU_REDUCE(__reduce_add_sync, int, kAdd)
EMU_REDUCE(__reduce_min_sync, unsigned, kMinUnsigned)
EMU_REDUCE(__reduce_min_sync, int, kMinSigned)
EMU_REDUCE(__reduce_max_sync, unsigned, kMaxUnsigned)
EMU_REDUCE(__reduce_max_sync, int, kMaxSigned)
EMU_REDUCE(__reduce_and_sync, unsigned, kAnd)
EMU_REDUCE(__reduce_or_sync, unsigned, kOr)
EMU_REDUCE(__reduce_xor_sync, unsigned, kXor)
#undef EMU_REDUCE

// ---- Fences, time, failure. All emulated blocks live on one device, so the system scope adds
// nothing to the device scope.

inline void __threadfence_block() {
    emu::fence(emu::FenceScope::kBlock);
}
inline void __threadfence() {
    emu::fence(emu::FenceScope::kDevice);
}
inline void __threadfence_system() {
    emu::fence(emu::FenceScope::kDevice);
}
inline void __nanosleep(unsigned) {
    emu::yield();
}
inline long long clock64() {
    return emu::clock();
}
[[noreturn]] inline void __trap(emu::Site site = emu::Site::here()) {
    emu::trap(site);
}
