// SPDX-License-Identifier: Apache-2.0
// The NCCL that torch has loaded into this process. It is never linked and never loaded a second
// time: two copies of NCCL in one process do not know of each other's communicators.
#pragma once

namespace topoep {

struct NcclLibrary {
    int compiled_version;  // of the headers, such as 23007 for 2.30.7
    int loaded_version;    // of libnccl.so.2 in this process, 0: none is loaded
    bool has_device_api;   // ncclDevCommCreate is there
};

const NcclLibrary& nccl_library();

// Why kernels compiled here cannot use the device API of the loaded NCCL, in words; nullptr: they
// can.
const char* nccl_device_api_problem();

}  // namespace topoep
