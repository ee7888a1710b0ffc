// SPDX-License-Identifier: Apache-2.0
// CUDA's qualifiers, which mean nothing to a host compiler.
//
// Two names are left out on purpose. __shared__ has no honest host form (a static would be one
// variable for all resident blocks), so that a kernel that bypasses TOPOEP_SHARED does not compile.
// __noinline__ is an attribute name inside libstdc++, and defining it breaks that library.
#pragma once

#define __host__
#define __device__
#define __global__
#define __constant__
#define __grid_constant__
#define __launch_bounds__(...)
#define __forceinline__ inline __attribute__((always_inline))
#define __align__(bytes) __attribute__((aligned(bytes)))
