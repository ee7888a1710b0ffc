// SPDX-License-Identifier: Apache-2.0
// What the launch needs of the warp collectives; kernels reach them through emulation/runtime.h.
#pragma once

#include "state.h"

namespace emu {

// A lane has exited: collectives that waited for it alone go on without it.
void leave_collectives(Thread& thread);

}  // namespace emu
