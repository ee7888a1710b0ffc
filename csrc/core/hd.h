// SPDX-License-Identifier: Apache-2.0
// Function qualifiers for code that nvcc and a plain C++ compiler both compile.
#pragma once

#if defined(__CUDACC__)
// Scalar helpers that host and device share.
#define TOPOEP_HD __host__ __device__ __forceinline__
// Functions of a team of threads: device code under nvcc (they call warp collectives), plain C++
// everywhere else (a team of one).
#define TOPOEP_TEAM __device__ inline
#else
#define TOPOEP_HD inline
#define TOPOEP_TEAM inline
#endif
