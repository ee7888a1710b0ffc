// SPDX-License-Identifier: Apache-2.0
// Atomic operations. Only one thread runs at a time, so that they are atomic by themselves; what is
// left is to check the access, to note what it orders, and to watch for polling without end.
#include <algorithm>
#include <cstring>

#include "access.h"
#include "options.h"
#include "ordering.h"
#include "scheduler.h"

namespace emu {
namespace {

AccessKind kind_of(AtomicOp op) {
    switch (op) {
        case AtomicOp::kLoad:
            return AccessKind::kAtomicRead;
        case AtomicOp::kStore:
        case AtomicOp::kExchange:
            return AccessKind::kAtomicWrite;
        default:
            return AccessKind::kAtomicUpdate;
    }
}

// What spin loops are made of.
bool is_poll(AtomicOp op) {
    return op == AtomicOp::kLoad || op == AtomicOp::kExchange || op == AtomicOp::kCompareExchange;
}

template <class Word>
Word add_floats(Word a, Word b) {
    using Float = std::conditional_t<sizeof(Word) == 4, float, double>;
    return static_cast<Word>(to_bits(from_bits<Float>(a) + from_bits<Float>(b)));
}

template <class Word>
bool less(Number number, Word a, Word b) {
    using Signed = std::make_signed_t<Word>;
    return number == Number::kSigned ? static_cast<Signed>(a) < static_cast<Signed>(b) : a < b;
}

template <class Word>
Word updated(AtomicOp op, Number number, Word old, Word operand, Word expected) {
    switch (op) {
        case AtomicOp::kLoad:
            return old;
        case AtomicOp::kStore:
        case AtomicOp::kExchange:
            return operand;
        case AtomicOp::kCompareExchange:
            return old == expected ? operand : old;
        case AtomicOp::kAdd:
            return number == Number::kFloat ? add_floats(old, operand)
                                            : static_cast<Word>(old + operand);
        case AtomicOp::kSub:
            return static_cast<Word>(old - operand);
        case AtomicOp::kMin:
            return less(number, operand, old) ? operand : old;
        case AtomicOp::kMax:
            return less(number, old, operand) ? operand : old;
        case AtomicOp::kAnd:
            return old & operand;
        case AtomicOp::kOr:
            return old | operand;
        case AtomicOp::kXor:
            return old ^ operand;
        case AtomicOp::kIncrement:  // wraps to zero above the operand
            return old >= operand ? 0 : old + 1;
        case AtomicOp::kDecrement:  // wraps to the operand below zero
            return old == 0 || old > operand ? operand : old - 1;
    }
    return old;
}

template <class Word>
uint64_t update(void* address, AtomicOp op, Number number, uint64_t operand, uint64_t expected) {
    Word old;
    std::memcpy(&old, address, sizeof(Word));
    const Word value =
        updated(op, number, old, static_cast<Word>(operand), static_cast<Word>(expected));
    if (value != old) {  // progress, for those who poll this variable
        std::memcpy(address, &value, sizeof(Word));
        launch_state.polls = 0;
    }
    return old;
}

}  // namespace

uint64_t atomic(void* address, int bytes, AtomicOp op, Number number, uint64_t operand,
                uint64_t expected) {
    const uintptr_t code = reinterpret_cast<uintptr_t>(__builtin_return_address(0));
    const uintptr_t target = reinterpret_cast<uintptr_t>(address);
    const size_t size = static_cast<size_t>(bytes);
    ++stats.atomics;
    if (is_poll(op)) {
        count_poll(code);
    }
    if (target % size != 0) {
        report_misaligned(target, size, Place::of(code));
    }
    if (instrumented) {
        check_access({target, size, kind_of(op), code});
    } else {
        spend_fuel();  // check_access does it otherwise: atomics are the fast build's only switches
    }
    const uint64_t old = bytes == 4 ? update<uint32_t>(address, op, number, operand, expected)
                                    : update<uint64_t>(address, op, number, operand, expected);
    if (instrumented) {
        // A compare-and-swap that fails reads only, and so passes nothing on.
        const bool wrote =
            op != AtomicOp::kLoad && (op != AtomicOp::kCompareExchange || old == expected);
        order_atomic(*current, target, op, wrote);
    }
    return old;
}

void fence(FenceScope scope) {
    if (instrumented) {
        order_fence(*current, scope);
    }
    spend_fuel();
}

// Not a common clock: a limit in ticks would then pass sooner the more threads count.
int64_t clock() {
    return static_cast<int64_t>(++current->ticks);
}

}  // namespace emu
