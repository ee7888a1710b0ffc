# SPDX-License-Identifier: Apache-2.0
"""Streams that only write down what is asked of them, in the place of torch.cuda's.

Nothing runs beside anything: the log says what would. Autograd does not know of these streams, so
:meth:`Streams.follow` does what its engine does on a GPU: a backward runs on the stream that was
current when its forward did.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch


class CudaOnCpu(str):
    """The name of the CPU, which claims to be of type cuda."""

    type = "cuda"

    def __eq__(self, other: object) -> bool:
        return str(other) == "cpu"

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


class Stream:
    """A named stream; ``log`` is shared by all of them."""

    def __init__(self, streams: Streams, name: str) -> None:
        self.streams, self.name = streams, name

    def wait_stream(self, other: Stream) -> None:
        self.streams.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: Event) -> None:
        self.streams.log.append(f"{self.name} waits for {event.name}")


class Event:
    def __init__(self, streams: Streams) -> None:
        self.streams, self.name = streams, ""

    def record(self, stream: Stream) -> None:
        self.name = f"event {self.streams.count('record')} of {stream.name}"
        self.streams.log.append(f"record {self.name}")


class Streams:
    """What stands in for torch.cuda's streams while the patch lasts."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.main = Stream(self, "main")
        self.current = self.main
        self._made = 0
        self._patch = patch
        patch.setattr(torch.cuda, "Stream", self._make)
        patch.setattr(torch.cuda, "Event", lambda: Event(self))
        patch.setattr(torch.cuda, "current_stream", lambda device=None: self.current)
        patch.setattr(torch.cuda, "stream", self._use)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        patch.setattr(torch.Tensor, "record_stream", self._keep, raising=False)
        self.kept: set[int] = set()  # addresses of memory that a side stream may still use

    def count(self, word: str) -> int:
        return sum(line.startswith(word) for line in self.log)

    def note(self, text: str) -> None:
        """Something enqueued on the current stream."""
        self.log.append(f"{text} on {self.current.name}")

    def follow(self, function: Any) -> None:
        """Runs the backward of an autograd function on the stream of its forward."""
        forward, backward = function.forward, function.backward

        def on_stream(ctx: Any, *arguments: Any) -> Any:
            ctx.stream = self.current
            return forward(ctx, *arguments)

        def on_the_same(ctx: Any, *arguments: Any) -> Any:
            with self._use(ctx.stream):
                return backward(ctx, *arguments)

        self._patch.setattr(function, "forward", staticmethod(on_stream))
        self._patch.setattr(function, "backward", staticmethod(on_the_same))

    def _make(self, device: object, priority: int) -> Stream:
        assert priority == -1
        self._made += 1
        return Stream(self, f"side {self._made}")

    @contextlib.contextmanager
    def _use(self, stream: Stream) -> Iterator[None]:
        outer, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = outer

    @staticmethod
    def _keep(tensor: torch.Tensor, stream: Stream) -> None:
        stream.streams.kept.add(tensor.data_ptr())
