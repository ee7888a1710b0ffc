# SPDX-License-Identifier: Apache-2.0
"""Where an experts module keeps the weights of each of its experts.

The adapter needs to know that twice: to read the home experts, and to put copies into a second
module of the same kind. A *weight table* says it: for each tensor that an expert has (a *kind*: the
weight of the first linear layer, of the second, their biases) the place of every local expert's
tensor, in the order of the local experts. An experts class of your own becomes known with
:func:`register_weight_table`; what else such a class has to keep to:

- it is built as ``layer.submodules.experts(num_local_experts, config, pg_collection=..)`` and
  called as ``experts(hidden, tokens_per_expert, probs)``: ``[rows, D]``, grouped by local expert,
  ``[num_local_experts]`` and ``[rows]``;
- it reads its weights with ``getattr`` at every call, so that a tensor put in the place of a
  parameter is used;
- with ``gradient_accumulation_fusion`` it adds the gradients of tensors whose names begin with
  ``weight`` to ``tensor.main_grad`` of the very tensor that it was called with; all other gradients
  it returns through autograd;
- with delayed weight gradients it computes them in ``backward_dw()``, in the order of the backward
  passes, and then runs the functions given to the owner's
  ``register_wgrad_accumulation_and_reduce_hooks``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, nn


@dataclass(frozen=True)
class Place:
    """One tensor of one expert: an attribute of a module."""

    owner: nn.Module
    name: str

    def get(self) -> Tensor:
        """The tensor that is there now."""
        return cast(Tensor, getattr(self.owner, self.name))

    def clear(self) -> None:
        """Takes the parameter out of its module, for a tensor to take its place."""
        self.owner._parameters.pop(self.name, None)
        self.put(None)

    def put(self, tensor: Tensor | None) -> None:
        """Puts a tensor there that is no parameter."""
        self.owner.__dict__[self.name] = tensor


#: ``[kind][local expert]``.
Table = list[list[Place]]
WeightTable = Callable[[Any], Table]


def sequential_table(experts: Any) -> Table:
    """The table of ``SequentialMLP``: a module for each expert."""
    names = [name for name, _ in experts.local_experts[0].named_parameters()]
    table = []
    for name in names:
        path, _, attribute = name.rpartition(".")
        owners = [expert.get_submodule(path) for expert in experts.local_experts]
        table.append([Place(owner, attribute) for owner in owners])
    return table


def grouped_table(experts: Any) -> Table:
    """The table of ``TEGroupedMLP``: parameters ``weight0``, ``weight1``, .. of two modules."""
    table = []
    for linear in (experts.linear_fc1, experts.linear_fc2):
        for prefix in ("weight", "bias"):
            names = [f"{prefix}{i}" for i in range(experts.num_local_experts)]
            if linear._parameters.get(names[0]) is not None:
                table.append([Place(linear, name) for name in names])
    if not table:
        raise ValueError(
            f"{type(experts).__name__} has no parameters weight0, weight1, ..; set "
            "moe_single_grouped_weight=False"
        )
    return table


_tables: dict[str, WeightTable] = {
    "SequentialMLP": sequential_table,
    "TEGroupedMLP": grouped_table,
}


def register_weight_table(experts_class: type[nn.Module], table: WeightTable) -> None:
    """Makes an experts class known to the adapter; see the top of this module for its duties."""
    _tables[experts_class.__name__] = table


def weight_table(experts: nn.Module) -> Table:
    """The table of an experts module.

    Raises:
        ValueError: its class is not known.
    """
    for ancestor in type(experts).__mro__:
        if ancestor.__name__ in _tables:
            return _tables[ancestor.__name__](experts)
    raise ValueError(
        f"experts of class {type(experts).__name__} are not known; expected "
        f"{', '.join(sorted(_tables))}, or call register_weight_table first"
    )
