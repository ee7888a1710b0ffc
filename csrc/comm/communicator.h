// SPDX-License-Identifier: Apache-2.0
// A communicator of the loaded NCCL with what the data plane needs of it: symmetric windows that
// every rank of the node can load from and store to, and the device communicator. All of it is made
// at set-up; a step allocates and registers nothing.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "comm/nccl_library.h"

namespace topoep {

// Device memory from ncclMemAlloc. Tensors share it, so it outlives the window if they do.
class WindowMemory {
public:
    WindowMemory(const NcclLibrary& library, size_t bytes);
    ~WindowMemory();
    WindowMemory(const WindowMemory&) = delete;
    WindowMemory& operator=(const WindowMemory&) = delete;

    void* data() const { return data_; }
    size_t bytes() const { return bytes_; }

private:
    const NcclLibrary& library_;
    void* data_ = nullptr;
    size_t bytes_;
};

// What the kernels ask of a device communicator.
struct DeviceCommNeeds {
    int signals = 0;   // GIN signals; 0: none between nodes, and no connections are made
    int counters = 0;  // GIN counters
    int contexts = 0;  // GIN contexts, a wish: NCCL may give another number
};

// Not thread-safe, like an NCCL communicator. All ranks make the same calls in the same order.
class Communicator {
public:
    // Makes a communicator of the ranks that were given the same id. Collective.
    static std::unique_ptr<Communicator> create(const NcclLibrary& library, const ncclUniqueId& id,
                                                int num_ranks, int rank);
    // Uses a communicator that somebody else made and destroys.
    static std::unique_ptr<Communicator> adopt(const NcclLibrary& library, ncclComm_t comm);
    ~Communicator();
    Communicator(const Communicator&) = delete;
    Communicator& operator=(const Communicator&) = delete;

    int rank() const { return rank_; }
    int num_ranks() const { return num_ranks_; }
    // The ranks that reach each other by load and store, and those with this rank's place there.
    ncclTeam_t lsa_team() const { return library_.TeamLsa(comm_); }
    ncclTeam_t rail_team() const { return library_.TeamRail(comm_); }
    ncclTeam_t world_team() const { return {num_ranks_, rank_, 1}; }
    // Why this communicator cannot serve, in words; empty: it can.
    std::string problem(Reach reach) const;

    // Allocates memory and registers it as a symmetric window, of the same size on every rank.
    // Collective. Returns the index of the window.
    int add_window(size_t bytes);
    const std::shared_ptr<WindowMemory>& memory(int window) const {
        return windows_.at(window).memory;
    }
    ncclWindow_t handle(int window) const { return windows_.at(window).handle; }
    // The addresses of a window on every rank of the LSA team, as this rank's device sees them.
    std::vector<void*> peer_pointers(int window) const;

    // Makes the device communicator, once. Collective.
    const ncclDevComm& create_device_comm(const DeviceCommNeeds& needs);
    // Throws before it was made.
    const ncclDevComm& device_comm() const;

    // Throws if NCCL has noticed an error of its own, such as a peer that is gone.
    void check_async() const;

    // Destroys the device communicator, the windows and the communicator, in this order, and
    // throws the first error once everything was tried. With `abort` it does not wait for peers
    // that may be gone. Collective unless it aborts. A second call does nothing.
    void close(bool abort);

private:
    struct Window {
        std::shared_ptr<WindowMemory> memory;
        ncclWindow_t handle;
    };

    Communicator(const NcclLibrary& library, ncclComm_t comm, bool owned);
    void check(ncclResult_t result, const char* call) const { check_nccl(library_, result, call); }

    const NcclLibrary& library_;
    ncclComm_t comm_;
    bool owned_;
    int rank_ = -1;
    int num_ranks_ = 0;
    std::vector<Window> windows_;
    std::unique_ptr<ncclDevComm> device_comm_;
};

// The order in which a communicator must number the ranks of a group: node by node, because NCCL
// joins consecutive ranks only. rank_at[place] is the rank of the group that it calls `place`.
struct NodeOrder {
    std::vector<int> rank_at;
    int ranks_per_node;  // of every node
};

// Why NCCL's teams are not the nodes of the topology as rank `rank` of the group sees them, in
// words; empty: they are. The LSA team of a rank must be its node, and its rail the ranks with its
// place in every node.
std::string team_problem(ncclTeam_t world, ncclTeam_t lsa, ncclTeam_t rail, int rank,
                         const NodeOrder& order);

}  // namespace topoep
