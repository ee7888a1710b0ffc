// SPDX-License-Identifier: Apache-2.0
// Shuffles, votes, matches, reductions and __syncwarp: a lane leaves its operand and waits; the
// last lane of the mask to come computes what each of them gets.
#include "warp_collectives.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <string>

#include "options.h"
#include "ordering.h"
#include "scheduler.h"

namespace emu {
namespace {

// Calls body(lane, thread) for each lane of the mask.
template <class Body>
void for_lanes(const Warp& warp, uint32_t lanes, Body body) {
    for (; lanes != 0; lanes &= lanes - 1) {
        const uint32_t lane = static_cast<uint32_t>(__builtin_ctz(lanes));
        body(lane, *warp.lanes[lane]);
    }
}

std::string hex(uint32_t mask) {
    char text[16];
    std::snprintf(text, sizeof(text), "%08x", mask);
    return text;
}

void report_mismatch(const Thread& a, const Thread& b) {
    report_log.add(Kind::kWarp, Place::of(a.site), Place::of(b.site),
                   "warp collective mismatch: " + name_of(a) + " at {0} with mask " +
                       hex(a.call.mask) + ", " + name_of(b) + " at {1} with mask " +
                       hex(b.call.mask));
}

// Whether all lanes came for the same collective. Lanes at different lines are reported, yet served
// when mask and operation agree: the hardware would let them through as well.
bool agree(const Warp& warp, uint32_t lanes) {
    const Thread& first = *warp.lanes[__builtin_ctz(lanes)];
    bool compatible = true;
    for_lanes(warp, lanes, [&](uint32_t, const Thread& thread) {
        const bool same_call =
            thread.call.mask == first.call.mask && thread.call.op == first.call.op;
        const bool same_place = thread.site.line == first.site.line &&
                                (thread.site.file == first.site.file ||
                                 std::strcmp(thread.site.file, first.site.file) == 0);
        if (!same_call || !same_place) {
            report_mismatch(first, thread);
        }
        compatible &= same_call;
    });
    return compatible;
}

bool is_shuffle(WarpOp op) {
    return op >= WarpOp::kShuffle && op <= WarpOp::kShuffleXor;
}
bool is_reduction(WarpOp op) {
    return op >= WarpOp::kAdd;
}

uint32_t combine(WarpOp op, uint32_t a, uint32_t b) {
    const int32_t signed_a = static_cast<int32_t>(a);
    const int32_t signed_b = static_cast<int32_t>(b);
    switch (op) {
        case WarpOp::kAdd:
            return a + b;
        case WarpOp::kMinSigned:
            return static_cast<uint32_t>(std::min(signed_a, signed_b));
        case WarpOp::kMaxSigned:
            return static_cast<uint32_t>(std::max(signed_a, signed_b));
        case WarpOp::kMinUnsigned:
            return std::min(a, b);
        case WarpOp::kMaxUnsigned:
            return std::max(a, b);
        case WarpOp::kAnd:
            return a & b;
        case WarpOp::kOr:
            return a | b;
        default:
            return a ^ b;
    }
}

// The lane whose operand this lane gets. A distance that leaves the segment gives the lane its own.
int shuffle_source(const WarpCall& call, int lane) {
    const int segment = lane & ~(call.shuffle.width - 1);
    int source = lane;
    switch (call.op) {
        case WarpOp::kShuffle:
            return segment | (call.shuffle.operand & (call.shuffle.width - 1));
        case WarpOp::kShuffleUp:
            source = lane - call.shuffle.operand;
            return source < segment ? lane : source;
        case WarpOp::kShuffleDown:
            source = lane + call.shuffle.operand;
            return source >= segment + call.shuffle.width ? lane : source;
        default:
            source = lane ^ call.shuffle.operand;
            return source >= segment + call.shuffle.width ? lane : source;
    }
}

uint64_t shuffle(const Warp& warp, uint32_t lanes, uint32_t lane, const Thread& thread) {
    const int source = shuffle_source(thread.call, static_cast<int>(lane));
    if ((lanes >> source & 1) != 0) {
        return warp.lanes[source]->call.value;
    }
    if (!report_log.repeat(Kind::kWarp, Place::of(thread.site), {})) {
        report_log.add(Kind::kWarp, Place::of(thread.site), {},
                       "shuffle reads lane " + std::to_string(source) +
                           ", which does not take part: " + name_of(thread) + " at {0}");
    }
    return 0xdeadbeefcafef00dull;  // undefined: surely not what the kernel hoped for
}

struct Votes {
    uint32_t ballot = 0;  // lanes with a value that is not zero
    uint32_t reduced = 0;
};

Votes collect(const Warp& warp, uint32_t lanes, WarpOp op) {
    Votes votes;
    bool first = true;
    for_lanes(warp, lanes, [&](uint32_t lane, const Thread& thread) {
        votes.ballot |= thread.call.value != 0 ? 1u << lane : 0;
        if (is_reduction(op)) {
            const uint32_t value = static_cast<uint32_t>(thread.call.value);
            votes.reduced = first ? value : combine(op, votes.reduced, value);
            first = false;
        }
    });
    return votes;
}

uint32_t equal_lanes(const Warp& warp, uint32_t lanes, uint64_t value) {
    uint32_t equal = 0;
    for_lanes(warp, lanes, [&](uint32_t lane, const Thread& thread) {
        equal |= thread.call.value == value ? 1u << lane : 0;
    });
    return equal;
}

WarpResult result_of(const Warp& warp, uint32_t lanes, uint32_t lane, const Votes& votes) {
    const Thread& thread = *warp.lanes[lane];
    switch (thread.call.op) {
        case WarpOp::kSync:
            return {0, false};
        case WarpOp::kBallot:
            return {votes.ballot, false};
        case WarpOp::kAny:
            return {votes.ballot != 0, false};
        case WarpOp::kAll:
            return {votes.ballot == lanes, false};
        case WarpOp::kMatchAny:
            return {equal_lanes(warp, lanes, thread.call.value), false};
        case WarpOp::kMatchAll: {
            const bool all = equal_lanes(warp, lanes, thread.call.value) == lanes;
            return {all ? lanes : 0, all};
        }
        default:
            return {is_shuffle(thread.call.op) ? shuffle(warp, lanes, lane, thread) : votes.reduced,
                    false};
    }
}

// Serves the collective of this mask if all its lanes are there. Lanes that have exited are not
// waited for, nor are lanes that a short last warp never had.
void try_complete(Warp& warp, uint32_t mask) {
    const uint32_t lanes = mask & warp.present & ~warp.exited;
    if (lanes == 0 || (warp.waiting & lanes) != lanes || !agree(warp, lanes)) {
        return;
    }
    ++stats.warp_ops;
    const WarpOp op = warp.lanes[__builtin_ctz(lanes)]->call.op;
    const Votes votes = collect(warp, lanes, op);
    static std::vector<Thread*> released;  // kept, to allocate once
    released.clear();
    uint64_t chain = 0;
    for_lanes(warp, lanes, [&](uint32_t lane, Thread& thread) {
        thread.result = result_of(warp, lanes, lane, votes);
        chain = std::max(chain, thread.chain);
        released.push_back(&thread);
    });
    for (Thread* thread : released) {
        thread->chain = chain + 1;
    }
    // Only __syncwarp orders memory. Hardware often does more, and code that relies on it breaks.
    if (op == WarpOp::kSync) {
        order_warp(warp, lanes);
    }
    warp.waiting &= ~lanes;
    make_ready(released);
}

}  // namespace

WarpResult warp_collective(WarpOp op, uint32_t mask, uint64_t value, ShuffleLanes shuffle,
                           Site site) {
    Thread& thread = *current;
    Warp& warp = *thread.warp;
    thread.call = {op, mask, value, shuffle};
    thread.site = site;
    if ((mask >> thread.lane & 1) == 0) {
        fail_launch(Kind::kWarp, Place::of(site), {},
                    "the mask " + hex(mask) +
                        " leaves out the lane that calls: " + name_of(thread) + " at {0}");
    }
    if ((mask & ~warp.present) != 0) {
        report_log.add(Kind::kWarp, Place::of(site), {},
                       "the mask " + hex(mask) + " names lanes that the warp does not have: " +
                           name_of(thread) + " at {0}");
    }
    thread.state = ThreadState::kAtCollective;
    warp.waiting |= 1u << thread.lane;
    try_complete(warp, mask);
    suspend();
    return thread.result;
}

// The least that the hardware may answer: code that relies on more is wrong.
uint32_t active_mask() {
    return 1u << current->lane;
}

void leave_collectives(Thread& thread) {
    Warp& warp = *thread.warp;
    warp.exited |= 1u << thread.lane;
    // The lanes that wait may do so in several groups, each with a mask of its own.
    uint32_t untried = warp.waiting;
    while (untried != 0) {
        const uint32_t mask = warp.lanes[__builtin_ctz(untried)]->call.mask;
        untried &= ~mask;
        try_complete(warp, mask);
    }
}

}  // namespace emu
