// SPDX-License-Identifier: Apache-2.0
// What the launch needs of the barriers; kernels reach them through emulation/runtime.h.
#pragma once

#include "state.h"

namespace emu {

// Before a block starts.
void clear_barriers(Block& block);
// After a thread of the block has exited.
void leave_barriers(Block& block);

}  // namespace emu
