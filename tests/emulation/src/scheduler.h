// SPDX-License-Identifier: Apache-2.0
// Which thread runs next. Threads give way when they wait, when they poll, and, so that code
// between two barriers is interleaved too, by force after some accesses.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "reports.h"
#include "state.h"

namespace emu {

// Starts the schedule of a launch over from the seed.
void reset_schedule();
// A number below the limit that belongs to the schedule.
uint32_t schedule_choice(uint32_t limit);

// These threads may run (again), in the order that the options ask for.
void make_ready(const std::vector<Thread*>& threads);

// From the host: runs the ready threads until none is left, or the launch is given up.
void run_ready_threads();
// From a thread: lets others run, until somebody makes this one ready.
void suspend();
// From a thread: lets all that are ready run first.
void give_way();

// From a thread: reports the fault and ends the whole launch; the thread does not come back, and
// neither do the others. What a GPU does on an illegal address or a trap, too.
[[noreturn]] void fail_launch(Kind kind, const Place& first, const Place& second,
                              std::string message);

// A thread looked at a flag that others set. Gives way now and then, and fails the launch when
// nothing goes forward any more.
void count_poll(uintptr_t code);

extern int fuel;  // accesses until the next forced switch
void preempt();
inline void spend_fuel() {
    if (--fuel <= 0) {
        preempt();
    }
}

}  // namespace emu
