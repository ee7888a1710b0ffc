// SPDX-License-Identifier: Apache-2.0
// Arguments of the kernels that move data between ranks. All pointers are device memory and may be
// captured in a graph: nothing in here changes from launch to launch.
#pragma once

#include <cstdint>

#include "core/data_plane.h"
#include "core/expert_layout.h"
#include "core/numeric.h"
#include "core/stream_lists.h"

namespace topoep {

// How many thread blocks do what. A rank's kernel takes 1 + senders + pullers blocks, which must
// all be resident at once on every rank: comm_sms of the user.
struct BlockRoles {
    int senders = 3;    // divides staging_slots; 0 is not allowed with more than one node
    int pullers = 20;   // in-node copies, gathering, sums at home
    int threads = 512;  // per block, a multiple of 32
};

// The lists that the solve of rank `config.rank` makes beside the plan.
struct ListsArguments {
    DataPlaneConfig config;
    StreamLists lists;  // device memory; all nullptr: none are wanted
};

struct ExchangeArguments {
    DataPlane plane;
    const int32_t* row;  // [E] counts of this rank
    int32_t* counts;     // [R, E] out: every rank's row
};

struct ReplicateArguments {
    DataPlane plane;
    PlanCopies copies;
    StreamLists lists;
    ExpertLayout layout;                 // in bytes
    const unsigned char* const* home;    // [T, G]: home weights [H, row bytes] of tensor t of local
                                         // rank g of this node
    unsigned char* spare[kMaxRowParts];  // [S, row bytes] spare slots of this rank, per tensor
};

struct ReduceArguments {
    DataPlane plane;
    PlanCopies copies;
    StreamLists lists;
    ExpertLayout layout;      // in elements
    void* const* slot_grads;  // [T, G]: slot gradients [S, elements] of tensor t of local rank g;
                              // this rank's own are zero afterwards, where the plan uses them
    void* home_grads[kMaxRowParts];     // [H, elements] of this rank, per tensor: += the sums
    DType slot_type = DType::kFloat32;  // kFloat32 or kBFloat16, of all tensors
    DType home_type = DType::kFloat32;  // likewise
};

}  // namespace topoep
