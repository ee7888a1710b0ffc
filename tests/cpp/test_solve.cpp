// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdint>
#include <map>
#include <random>
#include <vector>

#include "check.h"
#include "core/error.h"
#include "core/limits.h"
#include "cpu/solve.h"

using namespace topoep;

namespace {

int64_t pack(int rule, int64_t value, int policy_bits) {
    return static_cast<int64_t>(rule) << 56 | value << 16 | policy_bits;
}

// The empty plan, two hierarchical candidates and two flat ones.
std::vector<int64_t> some_candidates() {
    constexpr int kNear = 2;
    constexpr int kHierarchical = 1 | kNear | 2 << 2 | 1 << 4 | 1 << 5 | 1 << 6 | 1 << 8;
    return {0,
            pack(kAboveMean, 10000, kHierarchical),
            pack(kAboveMean, 0, kNear),
            pack(kAboveMean, 0, 0),
            pack(kAboveNode, 10000, kHierarchical),
            pack(kAtRankLoad, 2, kHierarchical)};
}

// A problem with everything it points to.
struct Case {
    std::vector<int32_t> table, counts;
    SolveProblem problem;
    std::vector<int32_t> slot_expert, slot_source, slot_tokens, copy_offsets, copy_slots, send,
        recv;
    std::vector<int64_t> stats;
    PlanView plan;

    Case(const std::vector<int>& node_of_rank, int num_experts, int spare, int rank) {
        const int ranks = static_cast<int>(node_of_rank.size());
        std::vector<int32_t> order(ranks);
        for (int r = 0; r < ranks; ++r) {
            order[r] = r;
        }
        std::stable_sort(order.begin(), order.end(),
                         [&](int a, int b) { return node_of_rank[a] < node_of_rank[b]; });
        const int nodes = *std::max_element(node_of_rank.begin(), node_of_rank.end()) + 1;
        table = order;
        table.resize(2 * ranks);
        for (int p = 0; p < ranks; ++p) {
            table[ranks + order[p]] = p;
        }
        for (int p = 0; p < ranks; ++p) {
            table.push_back(node_of_rank[order[p]]);
        }
        for (int n = 0; n <= nodes; ++n) {
            table.push_back(static_cast<int32_t>(std::count_if(
                node_of_rank.begin(), node_of_rank.end(), [&](int node) { return node < n; })));
        }
        counts.resize(static_cast<size_t>(ranks) * num_experts);
        problem.shape = {ranks, nodes, num_experts, spare};
        problem.topology = view_topology_table(table.data(), ranks);
        problem.counts = counts.data();
        problem.objective = {kBalance, 10000, 3, {}};
        const int width = problem.shape.slots_per_rank();
        for (auto* slots : {&slot_expert, &slot_source, &slot_tokens, &copy_slots}) {
            slots->resize(problem.shape.num_spare());
        }
        copy_offsets.resize(num_experts + 1);
        send.resize(ranks * width);
        recv.resize(ranks * width);
        stats.resize(kNumStats);
        plan = {slot_expert.data(),  slot_source.data(), slot_tokens.data(),
                copy_offsets.data(), copy_slots.data(),  send.data(),
                recv.data(),         stats.data(),       rank};
    }

    void solve(const ParallelFor& parallel_for = serial_for) {
        solve_cpu(problem, some_candidates(), plan, parallel_for);
    }

    std::vector<int32_t> split() const {
        std::vector<int32_t> result(
            static_cast<size_t>(problem.shape.num_ranks) * problem.shape.num_physical(), 0);
        split_cpu(problem.shape, problem.topology, counts.data(), slot_expert.data(),
                  slot_tokens.data(), result.data());
        return result;
    }
};

Case random_case(std::mt19937& random) {
    const auto below = [&](int n) { return static_cast<int>(random() % n); };
    const int ranks = 1 + below(12);
    std::vector<int> nodes(ranks);
    std::map<int, int> dense;
    for (int& node : nodes) {
        node = below(1 + below(4));
        dense[node] = 0;
    }
    int next = 0;
    for (auto& entry : dense) {
        entry.second = next++;
    }
    for (int& node : nodes) {
        node = dense[node];
    }
    Case result(nodes, ranks * (1 + below(5)), below(4), below(ranks));
    const int scale = 1 << below(14);
    for (int32_t& count : result.counts) {
        count = below(3) == 0 ? below(scale) : below(4);
    }
    return result;
}

}  // namespace

TEST(random_plans_conserve_tokens_and_are_never_worse) {
    std::mt19937 random(1);
    for (int i = 0; i < 3000; ++i) {
        Case c = random_case(random);
        c.solve();
        const Shape& shape = c.problem.shape;
        const int width = shape.slots_per_rank();
        const std::vector<int32_t> split = c.split();
        std::vector<int64_t> load(shape.num_ranks, 0);
        for (int r = 0; r < shape.num_ranks; ++r) {
            std::vector<int64_t> served(shape.num_experts, 0);
            for (int p = 0; p < shape.num_physical(); ++p) {
                const int32_t tokens = split[static_cast<size_t>(r) * shape.num_physical() + p];
                const int rank = p / width;
                const int slot = p % width;
                const int home = shape.experts_per_rank();
                const int expert = slot < home
                                       ? rank * home + slot
                                       : c.slot_expert[rank * shape.spare_slots + slot - home];
                CHECK(tokens >= 0 && (expert >= 0 || tokens == 0));
                load[rank] += tokens;
                if (expert >= 0) {
                    served[expert] += tokens;
                }
            }
            for (int e = 0; e < shape.num_experts; ++e) {
                CHECK(served[e] == c.counts[static_cast<size_t>(r) * shape.num_experts + e]);
            }
        }
        CHECK(*std::max_element(load.begin(), load.end()) == c.stats[kStatMaxLoad]);
        CHECK(c.stats[kStatMaxLoad] <= c.stats[kStatMaxLoadBefore]);
        for (int p = 0; p < shape.num_physical(); ++p) {
            CHECK(c.send[p] == split[static_cast<size_t>(c.plan.rank) * shape.num_physical() + p]);
        }
        for (int r = 0; r < shape.num_ranks; ++r) {
            for (int slot = 0; slot < width; ++slot) {
                CHECK(c.recv[r * width + slot] ==
                      split[static_cast<size_t>(r) * shape.num_physical() + c.plan.rank * width +
                            slot]);
            }
        }
    }
}

TEST(the_order_in_which_candidates_are_solved_does_not_show) {
    std::mt19937 random(2);
    const ParallelFor backwards = [](int64_t count, const auto& body) {
        for (int64_t i = count; i-- > 0;) {
            body(i, i + 1);
        }
    };
    for (int i = 0; i < 500; ++i) {
        Case c = random_case(random);
        c.solve();
        const std::vector<int32_t> experts = c.slot_expert;
        const std::vector<int32_t> tokens = c.slot_tokens;
        const int64_t winner = c.stats[kStatWinner];
        c.solve(backwards);
        CHECK(c.slot_expert == experts && c.slot_tokens == tokens);
        CHECK(c.stats[kStatWinner] == winner);
    }
}

TEST(bad_counts_are_refused) {
    Case c({0, 0, 1, 1}, 8, 2, 0);
    c.counts[11] = -5;
    CHECK(testing::error_of([&] { c.solve(); }).find("counts[1, 3] is -5") != std::string::npos);
    c.counts[11] = INT32_MAX;
    c.counts[12] = 1;
    CHECK(testing::error_of([&] { c.solve(); }).find("kMaxTokens") != std::string::npos);
}

TEST(the_largest_countable_load_works) {
    Case c({0, 0, 1, 1}, 8, 2, 0);
    c.counts[0] = INT32_MAX - 3;
    c.counts[9] = 3;
    c.solve();
    CHECK(c.stats[kStatTokens] == INT32_MAX);
    CHECK(c.stats[kStatMaxLoad] == INT32_MAX / 4 + 1);
}

TEST_MAIN
