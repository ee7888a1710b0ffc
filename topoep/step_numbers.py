# SPDX-License-Identifier: Apache-2.0
"""To which microbatch a call of a layer belongs, told from the order of the calls alone."""

from __future__ import annotations


class StepNumbers:
    """Numbers the microbatches that the layers of a rank go through.

    Usually one microbatch goes through all layers before the next begins. A call of the layer that
    began a step then begins the next one, and a step that an error has ended stays incomplete
    without moving those after it.

    A schedule that alternates between microbatches (interleaved pipeline stages, two batches in
    overlap) shows itself when another layer is called twice in a step. From then on the n-th call
    of a layer belongs to step n. Nothing tells then which step an error has ended, but the layers
    are no longer called equally often: only steps up to the last time that they were are certain.
    """

    def __init__(self) -> None:
        self._first = -1  # the layer that begins each step
        self._last: list[int] = []  # of each layer: the last step that it was called in
        self._lengths: list[int] = []  # of each step: how many layers were called
        self._calls: list[int] = []  # of each layer
        self._even = 0  # steps until the layers were last called equally often
        #: Steps before this one were numbered before it was known that steps alternate.
        self.begin = 0
        self.interleaved = False

    def add_layer(self) -> None:
        """Makes one more layer known; layers are numbered from 0."""
        self._last.append(-1)
        self._calls.append(0)
        self._even = 0

    def next(self, layer: int) -> int:
        """The step of this call of a layer."""
        self._calls[layer] += 1
        if not self.interleaved and not self._count(layer):
            self.interleaved = True
            self.begin = max(self._calls)
        if not self.interleaved:
            return self._last[layer]
        if min(self._calls) == max(self._calls):
            self._even = self._calls[0]
        return self._calls[layer] - 1

    def _count(self, layer: int) -> bool:
        """Counts the call for the present step or a new one; False if steps alternate."""
        step = len(self._lengths) - 1
        if self._last[layer] == step:  # called in this step already, or there is none yet
            if step >= 0 and layer != self._first:
                return False
            self._first = layer
            self._lengths.append(0)
            step += 1
        self._last[layer] = step
        self._lengths[step] += 1
        return True

    @property
    def completed(self) -> int:
        """Steps that are over: each layer that is still to be called in them never will be."""
        if self.interleaved:
            return min(self._calls)
        whole = bool(self._lengths) and self._lengths[-1] == len(self._last)
        return len(self._lengths) - (not whole)

    @property
    def uncertain(self) -> int:
        """How many of the completed steps, the last ones, may be joined wrongly."""
        return self.completed - self._even if self.interleaved else 0

    @property
    def incomplete(self) -> list[int]:
        """Steps that ended before every layer was called; none while steps alternate."""
        if self.interleaved:
            return []
        return [s for s, n in enumerate(self._lengths[:-1]) if n < len(self._last)]
