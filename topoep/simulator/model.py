# SPDX-License-Identifier: Apache-2.0
"""The models that a simulation trains."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from topoep.checks import check_int
from topoep.plan import MAX_EXPERTS
from topoep.simulator.cluster import read_object
from topoep.trace import MAX_TOP_K


@dataclass(frozen=True)
class MoEModel:
    """Sizes of a mixture-of-experts transformer.

    Args:
        name: for messages.
        moe_layers: layers with experts.
        hidden: D.
        intermediate: I, the width of one expert.
        experts: E, in each layer.
        top_k: K.
        attention_weights: weights of the projections of one attention, all together.
        attention_width: heads x (width of a key + width of a value): FLOP of attention per token
            and position of context.
        shared_intermediate: width of the shared experts of a layer, all together.
        dense_layers: layers with one dense feed-forward network instead of experts.
        dense_intermediate: its width.
        vocabulary: rows of the output matrix.

    Raises:
        TypeError: a size that is no int.
        ValueError: a size out of range.
    """

    name: str
    moe_layers: int
    hidden: int
    intermediate: int
    experts: int
    top_k: int
    attention_weights: int
    attention_width: int
    shared_intermediate: int = 0
    dense_layers: int = 0
    dense_intermediate: int = 0
    vocabulary: int = 0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if field.name == "name":
                continue
            least = 0 if field.default == 0 or field.name.startswith("attention") else 1
            value = check_int(getattr(self, field.name), f"MoEModel {field.name}")
            if value < least:
                raise ValueError(f"MoEModel {field.name}={value}; expected at least {least}")
        if self.experts > MAX_EXPERTS:
            raise ValueError(f"MoEModel experts={self.experts}; expected at most {MAX_EXPERTS}")
        if self.top_k > min(self.experts, MAX_TOP_K):
            raise ValueError(
                f"MoEModel top_k={self.top_k}; expected 1 to {min(self.experts, MAX_TOP_K)}"
            )

    @classmethod
    def preset(cls, name: str) -> MoEModel:
        """The preset of that name; raises ValueError for an unknown one."""
        if name not in MODELS:
            raise ValueError(f"model {name!r}; presets are {', '.join(MODELS)}")
        return MODELS[name]

    @classmethod
    def parse(cls, text: str) -> MoEModel:
        """A model from what a user types: a preset's name, or a JSON file.

        The file holds an object with the arguments of this class, or only some of them and
        ``preset``.

        Raises:
            OSError: the file cannot be read.
            ValueError: something else, or sizes that make no model.
        """
        if not text.endswith(".json"):
            return cls.preset(text)
        values = read_object(Path(text))
        try:
            preset = values.pop("preset", None)
            if preset is not None:
                return dataclasses.replace(cls.preset(str(preset)), **values)  # type: ignore[arg-type]
            return cls(**{"name": Path(text).stem, **values})  # type: ignore[arg-type]
        except (TypeError, ValueError) as error:
            raise ValueError(f"{text}: {error}") from None


def _grouped_query(hidden: int, heads: int, kv_heads: int, width: int) -> tuple[int, int]:
    """Weights and width of attention whose heads share keys and values."""
    return hidden * width * (2 * heads + 2 * kv_heads), 2 * heads * width


def _latent(
    hidden: int, heads: int, query: int, nope: int = 128, rope: int = 64
) -> tuple[int, int]:
    """Weights and width of DeepSeek's multi-head latent attention, with latent keys of 512."""
    nope, rope = 128, 64
    key = nope + rope
    queries = query * (hidden + heads * key) if query else hidden * heads * key
    latent = hidden * (512 + rope) + 512 * heads * (nope + 128)
    return queries + latent + heads * 128 * hidden, heads * (key + 128)


#: Presets by name, from the models' published configurations.
MODELS = {
    model.name: model
    for model in (
        MoEModel(
            "Qwen3-30B-A3B", 48, 2048, 768, 128, 8,
            *_grouped_query(2048, 32, 4, 128), vocabulary=151936,
        ),
        MoEModel(
            "Qwen3-235B-A22B", 94, 4096, 1536, 128, 8,
            *_grouped_query(4096, 64, 4, 128), vocabulary=151936,
        ),
        MoEModel(
            "GLM-4.5-Air", 45, 4096, 1408, 128, 8,
            *_grouped_query(4096, 96, 8, 128),
            shared_intermediate=1408, dense_layers=1, dense_intermediate=10944, vocabulary=151552,
        ),
        MoEModel(
            "DeepSeek-V2-Lite", 26, 2048, 1408, 64, 6,
            *_latent(2048, 16, 0),
            shared_intermediate=2816, dense_layers=1, dense_intermediate=10944, vocabulary=102400,
        ),
        MoEModel(
            "DeepSeek-V2", 59, 5120, 1536, 160, 6,
            *_latent(5120, 128, 1536),
            shared_intermediate=3072, dense_layers=1, dense_intermediate=12288, vocabulary=102400,
        ),
        MoEModel(
            "DeepSeek-V3", 58, 7168, 2048, 256, 8,
            *_latent(7168, 128, 1536),
            shared_intermediate=2048, dense_layers=3, dense_intermediate=18432, vocabulary=129280,
        ),
        MoEModel(
            "Kimi-K2", 60, 7168, 2048, 384, 8,
            *_latent(7168, 64, 1536),
            shared_intermediate=2048, dense_layers=1, dense_intermediate=18432, vocabulary=163840,
        ),
        MoEModel(
            "Mixtral-8x7B", 32, 4096, 14336, 8, 2,
            *_grouped_query(4096, 32, 8, 128), vocabulary=32000,
        ),
        MoEModel(
            "gpt-oss-120b", 36, 2880, 2880, 128, 4,
            *_grouped_query(2880, 64, 8, 64), vocabulary=201088,
        ),
    )
}  # fmt: skip
