// SPDX-License-Identifier: Apache-2.0
// Races and reads of memory that nobody wrote, one word of shadow memory at a time.
//
// A race is two accesses to one byte by different threads, at least one of them a write and not
// both atomic, that happens-before does not order (ordering.h). It is found when the later of the
// two is made, whichever that is in this schedule, if the earlier one is still remembered: a word
// remembers four accesses, and chooses with care which one to forget.
#include <algorithm>
#include <string>

#include "access.h"
#include "options.h"
#include "ordering.h"
#include "random.h"
#include "shadow.h"

namespace emu {
namespace {

// Not the schedule's generator: what the checker forgets must not change what runs next.
Random choices;

// Records keep code addresses as distances from here: the library is smaller than 2 GB.
uintptr_t code_anchor() {
    return reinterpret_cast<uintptr_t>(&check_history);
}

bool happened_before_now(const Record& old, const Thread& thread) {
    const uint32_t in_grid = old.serial - launch_state.first_serial;
    return happened_before(in_grid, {old.epoch, old.clock}, thread);
}

void report_race(const Record& old, const Record& now, const Access& access, const Thread& thread) {
    const Place there = Place::of(code_anchor() + static_cast<uintptr_t>(intptr_t{old.code}));
    if (report_log.repeat(Kind::kRace, access.place(), there)) {
        return;
    }
    const uint32_t other = old.serial - launch_state.first_serial;
    report_log.add(Kind::kRace, access.place(), there,
                   "race on " + describe(access.address, thread) + ": " +
                       verb_of(now.is_write, now.is_atomic) + " by " + name_of(thread) +
                       " at {0}, unordered with " + verb_of(old.is_write, old.is_atomic) +
                       " by block " + std::to_string(other / launch_state.threads_per_block) +
                       " thread " + std::to_string(other % launch_state.threads_per_block) +
                       " at {1}");
}

// The record that a full cell forgets: the one that says least about accesses still to come.
Record& choose_victim(Cell& cell, const Record& now, const Thread& thread) {
    const uint32_t start = choices.below(4);
    Record* victim = nullptr;
    int best = -1;
    for (uint32_t i = 0; i < 4; ++i) {
        Record& old = cell.records[(start + i) % 4];
        int score = 0;
        if (!old.is_write && !now.is_write) {
            // Reads stand in for one another, and best for those of the same warp: a writer that is
            // ordered after one lane's read is mostly ordered after its neighbours'.
            const uint32_t in_grid = old.serial - launch_state.first_serial;
            score = in_grid - thread.warp->first_thread < kWarpSize ? 3 : 2;
        } else if (happened_before_now(old, thread)) {
            score = 1;  // of no use to this thread, and to its block in most cases
        }
        if (score > best) {
            best = score;
            victim = &old;
        }
    }
    return *victim;
}

void check_race(Cell& cell, const Record& now, const Access& access, const Thread& thread) {
    Record* slot = nullptr;
    bool superseded = false;
    for (Record& old : cell.records) {
        if (old.serial < launch_state.first_serial) {  // none, or of an earlier era
            if (slot == nullptr) {
                slot = &old;
            }
            continue;
        }
        if ((old.bytes & now.bytes) == 0) {
            continue;
        }
        const bool both_atomic = old.is_atomic && now.is_atomic;
        const bool conflict = (old.is_write || now.is_write) && !both_atomic;
        // Whatever would race with the old access, and does not race with this one, is ordered
        // after this one and so after the old one: then the old record says nothing more.
        const bool may_supersede = !superseded && (old.bytes & ~now.bytes) == 0 &&
                                   (now.is_write || !old.is_write) &&
                                   (!now.is_atomic || old.is_atomic);
        if (!conflict && !may_supersede) {
            continue;
        }
        if (!happened_before_now(old, thread)) {
            if (conflict) {
                report_race(old, now, access, thread);
            }
        } else if (may_supersede) {
            slot = &old;
            superseded = true;
        }
    }
    *(slot != nullptr ? slot : &choose_victim(cell, now, thread)) = now;
}

void check_written(uint8_t& written, uint32_t bytes, const Access& access, const Thread& thread) {
    if (access.needs_value() && (written & bytes) != bytes &&
        !report_log.repeat(Kind::kUninitialised, access.place(), {})) {
        report_log.add(Kind::kUninitialised, access.place(), {},
                       std::string("uninitialised ") +
                           verb_of(access.is_write(), access.is_atomic()) + " of " +
                           describe(access.address, thread) + " by " + name_of(thread) + " at {0}");
    }
    // A read marks the word too: each byte that was forgotten is worth one report, not one for
    // every thread that reads it.
    written = static_cast<uint8_t>(written | bytes);
}

Record record_of(const Access& access, const Thread& thread) {
    const Stamp stamp = stamp_of(thread);
    Record record{};
    record.serial = launch_state.first_serial + thread.in_grid;
    record.epoch = stamp.epoch;
    record.clock = stamp.clock & kMaxClock;
    record.is_write = access.is_write();
    record.is_atomic = access.is_atomic();
    record.code = static_cast<int32_t>(access.code - code_anchor());
    return record;
}

}  // namespace

void reset_history_checks() {
    choices = Random(options.seed);
}

void check_history(const Access& access, const Thread& thread, bool initialised_by_host) {
    ++stats.accesses;
    const bool check_initialised = options.check_initialised && !initialised_by_host;
    if (!check_initialised && !options.check_races) {
        return;
    }
    Record now = record_of(access, thread);
    const uintptr_t end = access.address + access.bytes;
    for (uintptr_t address = access.address; address < end;) {
        const uintptr_t word = address & ~(kWordBytes - 1);
        const uintptr_t next = std::min(end, word + kWordBytes);
        // One bit for each byte of the word that the access covers.
        now.bytes = (((1u << (next - word)) - 1) & ~((1u << (address - word)) - 1)) & 15;
        ShadowPage& page = shadow.page(word);
        const size_t index = Shadow::word_in_page(word);
        if (check_initialised) {
            check_written(page.written[index], now.bytes, access, thread);
        }
        if (options.check_races) {
            check_race(page.cells[index], now, access, thread);
        }
        address = next;
    }
}

}  // namespace emu
