# SPDX-License-Identifier: Apache-2.0
"""The result of a simulation as rows of text, for the terminal and the page alike."""

from __future__ import annotations

from topoep.simulator.planners import EPLB_WINDOW
from topoep.simulator.setting import Setting
from topoep.simulator.simulate import PREDICTION, PlannerResult, Result

#: Column, and what it means.
COLUMNS = (
    ("planner", ""),
    ("imbalance", "fullest rank / mean"),
    ("copies", "weighted, per layer and microbatch: one between nodes counts as three"),
    ("across nodes", "share of the routed pairs whose expert computes in another node"),
    ("layer ms", "experts and exchanges of one MoE layer, forward and backward"),
    ("step ms", "one optimizer step"),
    ("speed-up", "of the step, over no copies on the same microbatches"),
    ("spare MB", "spare slots of a rank: weights once, and gradients during backward"),
    ("act. MB", "activations of the fullest rank's experts in one layer"),
)


def cells(result: PlannerResult) -> list[str]:
    """A row of the table."""
    return [
        result.label,
        f"{result.imbalance:.3f}",
        f"{result.weighted_copies:.1f}",
        f"{100 * result.cross_tokens:.1f}%",
        f"{result.layer_ms:.2f}",
        f"{result.step_ms:.0f}" if result.step_ms >= 1000 else f"{result.step_ms:.1f}",
        f"{100 * (result.speedup - 1):+.1f}%",
        f"{result.spare_bytes / 1e6:.1f}",
        f"{result.activation_bytes / 1e6:.0f}",
    ]


def heading(result: Result) -> str:
    """What was simulated, in one line."""
    request = result.request
    trace = request.trace
    nodes = request.topology.num_nodes
    return (
        f"{request.model.name} on {request.cluster.name}, EP{trace.num_ranks} over {nodes} "
        f"{'node' if nodes == 1 else 'nodes'}, {request.tokens:.0f} tokens per rank and "
        f"microbatch, {request.spare_slots} spare slots"
    )


def notes(result: Result) -> list[str]:
    """What must be said about the numbers."""
    request = result.request
    trace = request.trace
    lines = [PREDICTION]
    available = trace.num_steps * trace.num_layers
    wanted = trace.meta.get("tokens")
    if "scaled_to_tokens" not in trace.meta and wanted and round(request.tokens) != wanted:
        lines.append(
            f"The generator draws every count at random for {wanted} tokens per rank; "
            f"{request.tokens:.0f} came of it on average."
        )
    if request.spare_slots == 0:
        lines.append(
            "Without spare slots nothing can be copied; planning still takes time, which is all "
            "that a loss of planners without copies is. Only LLEP, which knows no limit, copies."
        )
    sampled = [p for p in result.planners if p.microbatches < available]
    if sampled:
        lines.append(
            f"The trace has {available} microbatches of a layer; "
            + ", ".join(f"{p.label} planned for {p.microbatches}" for p in sampled)
            + ": whole steps, evenly spaced."
        )
    if trace.num_layers != request.model.moe_layers:
        lines.append(
            f"{trace.num_layers} layers of the trace stand for the {request.model.moe_layers} of "
            f"{request.model.name}."
        )
    if any(p.name == "eplb" for p in result.planners):
        lines.append(
            "EPLB moves experts for good, planned from earlier steps; moving their weights and "
            "optimizer states is not charged."
        )
    if trace.num_steps <= EPLB_WINDOW and any(p.name == "eplb" for p in result.planners):
        lines.append(f"EPLB plans from {EPLB_WINDOW} earlier steps, which this trace has not.")
    if any(p.name == "llep" for p in result.planners):
        lines.append("LLEP knows no limit on slots; its column of spare slots is what S would be.")
    if "scaled_to_tokens" in trace.meta:
        lines.append(f"Counts were scaled to {trace.meta['scaled_to_tokens']} tokens per rank.")
    if request.setting != Setting():
        changed = [
            f"{name} = {value}"
            for name, value in vars(request.setting).items()
            if value != getattr(Setting(), name)
        ]
        lines.append("Setting other than the default: " + ", ".join(changed) + ".")
    return lines
