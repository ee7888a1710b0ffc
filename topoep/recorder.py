# SPDX-License-Identifier: Apache-2.0
"""Recording the routing of a running model, off its critical path."""

from __future__ import annotations

import json
import logging
import queue
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from topoep import ops
from topoep._version import __version__
from topoep.balancer import Balancer
from topoep.checks import check_int, check_type
from topoep.experts import BalancedExperts
from topoep.recompute import in_backward
from topoep.step_numbers import StepNumbers
from topoep.topology import Topology
from topoep.trace import MAX_LAYERS, MAX_META_CHARS, Trace

#: Finds the routed ids in a call of a hooked layer: gets its positional arguments, its keyword
#: arguments and its output.
FindIds = Callable[[tuple[Any, ...], dict[str, Any], Any], Tensor | Sequence[Tensor]]

_logger = logging.getLogger("topoep")

_QUEUE = 1024  # layers that may wait for the thread
_LONGEST_NAME = MAX_META_CHARS // 2 // MAX_LAYERS - 4  # with quotes and a comma, all layers fit
_SHOWN_STEPS = 8  # incomplete steps in a message
_NAMED_STEPS = 64  # incomplete steps that the file names
_OWN_CHARS = 4096  # of meta, for those and other numbers


class Recorder:
    """Writes down how many tokens a rank routes to each expert, per layer and microbatch.

    Every rank has its own recorder and its own file; ``python -m topoep trace merge`` joins them.
    The counts are made on the device of the ids and copied to the host without waiting; a thread
    does the rest. If it cannot keep up, or after ``max_steps``, whole microbatches are left out and
    counted: nothing ever waits for the recorder.

    Which calls belong to one microbatch is told from their order: a step begins when the layer that
    began the last one is called again. A step that an error has ended before every layer was called
    is left out as a whole, with a warning at the end. Pipelines that alternate between microbatches
    are recognised, and their n-th call of a layer is step n; if a step of theirs fails, all from
    then on are left out. Recomputations of activation checkpointing are not recorded a second time.

    Memory: ``4 * max_steps * layers * E`` bytes for each held rank.

    Example::

        with topoep.Recorder("rank3.npz", num_experts=128, top_k=8, topology=topo, rank=3) as rec:
            rec.attach(model.layers[0].moe)            # BalancedExperts, or a Balancer
            rec.attach(router, topk_ids=lambda args, kwargs, output: output[1])
            rec.record("layer 7", topk_ids)            # anything else
            train()

    Args:
        path: the .npz file, written by :meth:`save` and at the end.
        num_experts: E.
        top_k: experts per token.
        topology: the R ranks and their nodes.
        rank: the rank whose ids are recorded; None for all ranks in one process, then ids come as
            lists with an entry per rank.
        max_steps: microbatches to keep.
        every: record only every n-th microbatch.
        max_bytes: the most memory that the counts may take.
        meta: more to keep in the file, anything that JSON can hold.

    Raises:
        TypeError, ValueError: an argument is out of range.
    """

    def __init__(
        self,
        path: Path | str,
        *,
        num_experts: int,
        top_k: int,
        topology: Topology,
        rank: int | None = None,
        max_steps: int = 1000,
        every: int = 1,
        max_bytes: int = 2**30,
        meta: Mapping[str, Any] | None = None,
    ) -> None:
        self._path = Path(path)
        self._experts = check_int(num_experts, "num_experts")
        self._top_k = check_int(top_k, "top_k")
        self._topology = check_type(topology, Topology, "topology")
        self._max_steps = check_int(max_steps, "max_steps")
        self._every = check_int(every, "every")
        self._max_bytes = check_int(max_bytes, "max_bytes")
        for name, value in (("max_steps", max_steps), ("every", every)):
            if value < 1:
                raise ValueError(f"{name}={value}; expected at least 1")
        if rank is None:
            self._ranks = tuple(range(topology.num_ranks))
        elif 0 <= check_int(rank, "rank") < topology.num_ranks:
            self._ranks = (rank,)
        else:
            raise ValueError(f"rank {rank}; expected 0 to {topology.num_ranks - 1}")
        self._meta = {"topoep": __version__, **(meta or {})}
        most = MAX_META_CHARS // 2 - _OWN_CHARS  # the other half is for the names of layers
        if len(json.dumps(self._meta)) > most:  # fails now rather than at the end
            raise ValueError(f"meta takes more than {most} characters as JSON")
        # An example of what will be written: checks E, R and K against each other.
        Trace(self._empty(1, 1), topology.node_of_rank, top_k, self._ranks)
        self._layers: dict[Hashable, int] = {}
        self._numbers = StepNumbers()
        self._counts: list[np.ndarray[Any, np.dtype[np.int32]]] = []
        self._seen: list[np.ndarray[Any, np.dtype[np.bool_]]] = []
        self._queue: queue.Queue[tuple[int, int, Tensor, Any] | None] = queue.Queue(_QUEUE)
        self._problem: BaseException | None = None
        self._hooks: list[Any] = []
        self._thread: threading.Thread | None = threading.Thread(
            target=self._work, name="topoep-recorder", daemon=True
        )
        self._thread.start()

    def _empty(self, steps: int, layers: int) -> np.ndarray[Any, np.dtype[np.int32]]:
        return np.zeros((steps, layers, len(self._ranks), self._experts), dtype=np.int32)

    # ---- what is recorded ----------------------------------------------------------------------

    def record(self, layer: Hashable, topk_ids: Tensor | Sequence[Tensor]) -> None:
        """Records one call of a layer. Waits for nothing.

        Args:
            layer: any name; layers are numbered in the order in which they are first recorded.
            topk_ids: int32 or int64 ``[T, K]``, -1 for padding; a list for all ranks.

        Raises:
            TypeError, ValueError: bad ids, or one more layer than ``max_bytes`` has room for.
            RuntimeError: the recorder is closed, or its thread has failed.
        """
        if in_backward():
            return
        ids = [topk_ids] if isinstance(topk_ids, Tensor) else list(topk_ids)
        if len(ids) != len(self._ranks):
            raise ValueError(f"ids of {len(ids)} ranks; this recorder holds {len(self._ranks)}")
        for tensor in ids:
            if check_type(tensor, Tensor, "topk_ids").dim() != 2 or tensor.dtype not in (
                torch.int32,
                torch.int64,
            ):
                raise ValueError(
                    f"topk_ids has shape {tuple(tensor.shape)} and dtype {tensor.dtype}; expected "
                    "int32 or int64 [tokens, top_k]"
                )
        place = self._next_place(layer)
        if place is not None:
            counted = [ops.histogram(tensor.detach(), self._experts)[0] for tensor in ids]
            self._put(*place, torch.stack(counted))

    def attach(self, layer: nn.Module | Balancer, topk_ids: FindIds | None = None) -> None:
        """Records every later call of a layer, until the recorder is closed.

        Args:
            layer: a :class:`topoep.BalancedExperts`, a :class:`topoep.Balancer` (whose plans of
                one microbatch are told apart by ``plan(.., layer=)``), or any module together with
                ``topk_ids``.
            topk_ids: finds the routed ids in a call: gets the positional and the keyword
                arguments and the output of the module.

        Raises:
            TypeError: a module of another kind, and no ``topk_ids``.
        """
        if isinstance(layer, Balancer):
            self._hooks.append(layer.on_plan(self._record_plan))
            return
        check_type(layer, nn.Module, "layer")
        if topk_ids is None:
            if not isinstance(layer, BalancedExperts):
                raise TypeError(
                    f"where are the routed ids of a {type(layer).__name__}? Give topk_ids=, a "
                    "function of the call's arguments and output"
                )
            topk_ids = _ids_of_balanced_experts
        find = topk_ids

        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            self.record(module, find(args, kwargs, output))

        self._hooks.append(layer.register_forward_hook(hook, with_kwargs=True))

    def _record_plan(self, layer: object, counts: Tensor) -> None:
        place = self._next_place(layer)
        if place is not None:
            first = self._ranks[0]
            self._put(*place, counts[first : first + len(self._ranks)])

    def _next_place(self, layer: Hashable) -> tuple[int, int] | None:
        """Where the counts of this call go: layer and row; None if they are not kept."""
        if self._thread is None:
            raise RuntimeError("the recorder is closed")
        if self._problem is not None:
            raise RuntimeError("the recorder's thread has failed") from self._problem
        if layer not in self._layers:
            rows = self._max_steps * len(self._ranks)
            needed = 4 * (len(self._layers) + 1) * rows * self._experts
            if needed > self._max_bytes:
                raise ValueError(
                    f"{len(self._layers) + 1} layers x {self._max_steps} steps x "
                    f"{len(self._ranks)} ranks x {self._experts} experts take {needed} bytes; the "
                    f"limit is {self._max_bytes}: raise max_bytes, or lower max_steps"
                )
            self._layers[layer] = len(self._layers)
            self._numbers.add_layer()
            self._counts.append(self._empty(self._max_steps, 1)[:, 0])
            self._seen.append(np.zeros(self._max_steps, dtype=np.bool_))
        index = self._layers[layer]
        row, rest = divmod(self._numbers.next(index), self._every)
        return None if rest or row >= self._max_steps else (index, row)

    def _put(self, index: int, row: int, counts: Tensor) -> None:
        event = None
        if counts.is_cuda:
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError("a CUDA graph is being captured: record outside of it")
            counts = counts.to("cpu", non_blocking=True)  # into pinned memory
            event = torch.cuda.Event()
            event.record()
        with suppress(queue.Full):  # the row then stays unseen, and is left out of the file
            self._queue.put_nowait((index, row, counts, event))

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            try:
                index, row, counts, event = item
                if event is not None:
                    event.synchronize()
                self._counts[index][row] = counts.numpy()
                self._seen[index][row] = True
            except BaseException as problem:
                self._problem = problem
            finally:
                self._queue.task_done()
        self._queue.task_done()

    # ---- the file ------------------------------------------------------------------------------

    def trace(self) -> Trace:
        """What has been recorded so far: the microbatches of which every layer is there.

        Raises:
            ValueError: there is none.
            RuntimeError: the thread has failed.
        """
        if self._thread is not None:
            self._queue.join()
        if self._problem is not None:
            raise RuntimeError("the recorder's thread has failed") from self._problem
        whole = np.logical_and.reduce(self._seen) if self._seen else np.zeros(0, dtype=np.bool_)
        numbers = self._numbers
        steps = np.flatnonzero(whole) * self._every
        certain = numbers.completed - numbers.uncertain
        steps = steps[(steps >= numbers.begin) & (steps < certain)]
        if not len(steps):
            raise ValueError("nothing recorded: no microbatch has gone through every layer")
        rows = steps // self._every
        meta = {
            **self._meta,
            "layers": [_name(layer) for layer in self._layers],
            "every": self._every,
            "left_out": -(-numbers.completed // self._every) - len(rows),
            "incomplete": numbers.incomplete[:_NAMED_STEPS],
        }
        return Trace(
            np.stack([counts[rows] for counts in self._counts], axis=1),
            self._topology.node_of_rank,
            self._top_k,
            self._ranks,
            tuple(int(step) for step in steps),
            meta,
        )

    def save(self) -> None:
        """Writes what has been recorded so far; raises like :meth:`trace`."""
        self.trace().save(self._path)

    def close(self) -> None:
        """Stops recording and writes the file, if anything was recorded."""
        if self._thread is None:
            return
        for hook in self._hooks:
            hook.remove()
        self._queue.put(None)
        self._thread.join()
        self._thread = None
        if self._layers:
            self._warn()
            self.save()

    def _warn(self) -> None:
        """Says that steps were not completed."""
        lost, uncertain = self._numbers.incomplete, self._numbers.uncertain
        if lost:
            named = ", ".join(map(str, lost[:_SHOWN_STEPS])) + ", .." * (len(lost) > _SHOWN_STEPS)
            _logger.warning(
                "left out of the trace: %s (%d in all), steps that ended before every recorded "
                "layer was called",
                named,
                len(lost),
            )
        if uncertain:
            _logger.warning(
                "microbatches alternate, and the recorded layers were last called equally often "
                "before step %d: the last %d steps are left out of the trace, because their calls "
                "cannot be told apart",
                self._numbers.completed - uncertain,
                uncertain,
            )

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except Exception as problem:
            if error is None:
                raise
            # What went wrong in the block matters more than what could not be written after it.
            _logger.error("the recorder could not write its trace: %s", problem)


def _name(layer: object) -> str:
    name = type(layer).__name__ if isinstance(layer, nn.Module) else str(layer)
    return name[:_LONGEST_NAME]


def _ids_of_balanced_experts(
    args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
) -> Tensor | Sequence[Tensor]:
    ids: Tensor | Sequence[Tensor] = args[1] if len(args) > 1 else kwargs["topk_ids"]
    return ids
