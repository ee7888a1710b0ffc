// SPDX-License-Identifier: Apache-2.0
// The input of a solve, on the host or the device.
#pragma once

#include "core/objective.h"
#include "core/shape.h"

namespace topoep {

struct SolveProblem {
    Shape shape;
    TopologyView topology;
    const int32_t* counts;  // [R, E] tokens that source rank r routes to expert e
    Objective objective;
};

}  // namespace topoep
