// SPDX-License-Identifier: Apache-2.0
// CUDA C++ on the CPU: what cuda/compat.cuh includes in place of the CUDA headers when
// TOPOEP_EMULATE is defined. Kernel files never include this header themselves.
//
// Everything that a kernel can name is here and inline; the work is done by the runtime in
// ../src, which is compiled apart because it must not be instrumented (see ../README.md).
#pragma once

#include "emulation/atomics.h"
#include "emulation/device_math.h"
#include "emulation/intrinsics.h"
#include "emulation/language.h"
#include "emulation/launch.h"
#include "emulation/vector_types.h"
