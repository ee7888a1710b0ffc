// SPDX-License-Identifier: Apache-2.0
// The entry points through which the tests launch the self-test's kernels. They return
// nullptr or the error text of the launch. As for every test unit, whole numbers are long long, so
// that Emulator.call needs no declarations.
#include <cstring>

#include "selftest_faults.cuh"
#include "selftest_kernels.cuh"
#include "selftest_values.cuh"

using topoep::launch;

namespace {

unsigned count(long long value) {
    return static_cast<unsigned>(value);
}

using Fault = void (*)(uint32_t*, uint32_t*);
struct NamedFault {
    const char* name;
    Fault kernel;
    unsigned blocks;
    bool cooperative;
};

#define FAULT(name) {#name, selftest::name, 1, false}
#define FAULT_BETWEEN_BLOCKS(name) {#name, selftest::name, 16, false}
#define FAULT_OF_GRID(name) {#name, selftest::name, 4, true}
const NamedFault kFaults[] = {
    FAULT(missing_barrier),
    FAULT(write_after_read),
    FAULT(lost_update),
    FAULT(plain_read_of_atomic),
    FAULT(divergent_barrier),
    FAULT(missing_thread_at_barrier),
    FAULT(poll_without_end),
    FAULT(barrier_counts_differ),
    FAULT(write_after_arrive),
    FAULT(missing_syncwarp),
    FAULT(vote_as_syncwarp),
    FAULT(shuffle_from_outside_mask),
    FAULT(mask_without_caller),
    FAULT(masks_differ),
    FAULT(collectives_differ),
    FAULT(divergent_shuffle),
    FAULT(shared_out_of_bounds),
    FAULT(global_out_of_bounds),
    FAULT(null_pointer),
    FAULT(local_of_another_thread),
    FAULT(uninitialised_shared),
    FAULT(uninitialised_global),
    FAULT(misaligned_vector_load),
    FAULT(misaligned_vector_store),
    FAULT(misaligned_shared_vector),
    FAULT(misaligned_hinted_load),
    FAULT(misaligned_atomic),
    FAULT_BETWEEN_BLOCKS(cross_block_race),
    FAULT_BETWEEN_BLOCKS(race_behind_a_read),
    FAULT_BETWEEN_BLOCKS(race_behind_an_atomic),
    FAULT_BETWEEN_BLOCKS(release_by_failed_swap),
    FAULT_BETWEEN_BLOCKS(fences_in_place),
    FAULT_BETWEEN_BLOCKS(missing_release_fence),
    FAULT_BETWEEN_BLOCKS(missing_acquire_fence),
    FAULT_BETWEEN_BLOCKS(fence_before_write),
    FAULT_BETWEEN_BLOCKS(release_of_block_scope),
    FAULT_BETWEEN_BLOCKS(acquire_of_block_scope),
    FAULT(grid_sync_without_cooperation),
    FAULT_OF_GRID(exit_before_grid_sync),
    FAULT(trap_in_one_thread),
};

}  // namespace

extern "C" {

const char* selftest_fault(const char* name, uint32_t* out, uint32_t* extra) {
    for (const NamedFault& fault : kFaults) {
        if (std::strcmp(fault.name, name) == 0) {
            return launch(fault.kernel, {fault.blocks, 256, 0, fault.cooperative}, nullptr, out,
                          extra);
        }
    }
    return "no such kernel";
}

const char* selftest_sort_scan_count(const uint64_t* keys, uint64_t* sorted, uint32_t* sums,
                                     uint32_t* counts, long long threads, long long rounds) {
    auto kernel = threads == 256 ? selftest::sort_scan_count<256> : selftest::sort_scan_count<1024>;
    return launch(kernel, {1, count(threads)}, nullptr, keys, sorted, sums, counts,
                  static_cast<int>(rounds));
}

const char* selftest_histogram(const int32_t* ids, long long num_ids, long long num_bins,
                               uint32_t* counts, long long blocks) {
    return launch(selftest::histogram,
                  {count(blocks), 256, static_cast<size_t>(num_bins) * sizeof(uint32_t)}, nullptr,
                  ids, static_cast<int>(num_ids), static_cast<int>(num_bins), counts);
}

const char* selftest_stable_rank(const int32_t* ids, long long num_ids, long long num_bins,
                                 uint32_t* rank) {
    constexpr int kThreads = 256;
    const size_t words = (kThreads / 32 + 1) * static_cast<size_t>(num_bins);
    return launch(selftest::stable_rank<kThreads>, {1, kThreads, words * sizeof(uint32_t)}, nullptr,
                  ids, static_cast<int>(num_ids), static_cast<int>(num_bins), rank);
}

const char* selftest_copy_bytes(const unsigned char* from, unsigned char* to, long long bytes,
                                long long blocks) {
    return launch(selftest::copy_bytes, {count(blocks), 128}, nullptr, from, to,
                  static_cast<size_t>(bytes));
}

const char* selftest_last_block_sum(const uint32_t* values, long long num_values, uint32_t* partial,
                                    unsigned* ticket, uint32_t* sum, long long blocks) {
    return launch(selftest::last_block_sum<128>, {count(blocks), 128}, nullptr, values,
                  static_cast<int>(num_values), partial, ticket, sum);
}

const char* selftest_reverse_through_grid(uint32_t* scratch, uint32_t* out, long long blocks) {
    return launch(selftest::reverse_through_grid, {count(blocks), 64, 0, true}, nullptr, scratch,
                  out);
}

const char* selftest_look_back(unsigned* flags, uint32_t* values, long long blocks) {
    return launch(selftest::look_back, {count(blocks), 32}, nullptr, flags, values);
}

const char* selftest_producers_and_consumers(const uint32_t* in, uint32_t* out, long long rounds) {
    return launch(selftest::producers_and_consumers, {1, 128}, nullptr, in, out,
                  static_cast<int>(rounds));
}

const char* selftest_flag_in_block(uint32_t* out) {
    return launch(selftest::flag_in_block, {1, 64}, nullptr, out);
}

const char* selftest_bytes_of_words(unsigned char* out) {
    return launch(selftest::bytes_of_words, {1, 256}, nullptr, out);
}

const char* selftest_short_warp(uint32_t* out) {
    return launch(selftest::short_warp, {1, 48}, nullptr, out);
}

const char* selftest_early_exit(uint32_t* out) {
    return launch(selftest::early_exit, {1, 64}, nullptr, out);
}

const char* selftest_hand_over(unsigned* flag, uint32_t* value, uint32_t* out) {
    return launch(selftest::hand_over, {2, 96}, nullptr, flag, value, out);
}

const char* selftest_bounded_wait(const unsigned* flag, uint32_t* timed_out) {
    return launch(selftest::bounded_wait, {1, 256}, nullptr, flag, timed_out);
}

const char* selftest_running_order(unsigned* ticket, uint32_t* order) {
    return launch(selftest::running_order, {1, 128}, nullptr, ticket, order);
}

const char* selftest_barriers_and_shuffles(long long barriers, long long shuffles, uint32_t* out,
                                           long long threads) {
    return launch(selftest::barriers_and_shuffles, {1, count(threads)}, nullptr,
                  static_cast<int>(barriers), static_cast<int>(shuffles), out);
}

const char* selftest_warp_values(const uint32_t* in, uint32_t* out) {
    return launch(selftest::warp_values, {1, 32}, nullptr, in, out);
}

const char* selftest_block_votes(const int* in, int* out, long long threads) {
    return launch(selftest::block_votes, {1, count(threads)}, nullptr, in, out);
}

const char* selftest_atomic_values(selftest::AtomicCells* cells) {
    return launch(selftest::atomic_values, {4, 64}, nullptr, cells);
}

const char* selftest_intrinsic_values(long long a, long long b, uint32_t* out) {
    return launch(selftest::intrinsic_values, {1, 1}, nullptr, count(a), count(b), out);
}

const char* selftest_shared_alignment(uint32_t* out, long long shared_bytes, long long threads) {
    return launch(selftest::shared_alignment,
                  {1, count(threads), static_cast<size_t>(shared_bytes)}, nullptr, out);
}

}  // extern "C"
