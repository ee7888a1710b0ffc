# SPDX-License-Identifier: Apache-2.0
"""The text to train on, and the batches drawn from it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from topoep.demo.config import DemoConfig

#: Bytes are the tokens.
VOCABULARY = 256


@dataclass(frozen=True)
class Text:
    """A text as bytes.

    Args:
        name: for files and the screen.
        data: uint8 ``[bytes]``.
    """

    name: str
    data: Tensor


def load_text(config: DemoConfig) -> Text:
    """Reads the text of a configuration.

    Raises:
        ValueError: it cannot be read, or is too short for one sequence.
    """
    if config.text is None:
        name, raw = "pydoc_data.topics", _python_topics()
    else:
        try:
            name, raw = config.text.name, config.text.read_bytes()
        except OSError as error:
            raise ValueError(f"cannot read the text {config.text}: {error.strerror}") from error
    # A sequence needs the byte that follows it as its last target.
    if len(raw) < config.sequence + 1:
        raise ValueError(
            f"the text {name} has {len(raw)} bytes; sequences of {config.sequence} need at least "
            f"{config.sequence + 1}"
        )
    return Text(name, torch.frombuffer(bytearray(raw), dtype=torch.uint8))


def _python_topics() -> bytes:
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise ValueError(
            "this Python comes without pydoc_data.topics; give a text of your own (--text FILE)"
        ) from error
    return "\n\n".join(topics[name] for name in sorted(topics)).encode()


def batches(text: Text, config: DemoConfig, rank: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Draws a rank's batches: the same ones whenever seed and rank are the same.

    Yields:
        For every step the inputs and the targets, int64 ``[batch, sequence]`` each.
    """
    draws = np.random.default_rng([config.seed, rank])
    for _ in range(config.steps):
        starts = draws.integers(0, len(text.data) - config.sequence, size=config.batch)
        rows = [text.data[start : start + config.sequence + 1] for start in starts.tolist()]
        tokens = torch.stack(rows).long()
        yield tokens[:, :-1], tokens[:, 1:]
