"""Batches that are no mappings: a tensor, or a tuple (inputs ..., target), named after the arguments of the model's forward.

(x, y)   ->   {"input": x, "(target)": y}      forward(input) runs, loss_fn(output, (x, y)) judges
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from partita.errors import Fault, Refused
from partita.runtime.batch import Batch

TARGET = "(target)"  # name of a tuple's last entry
LossFunction = Callable[[Any, Any], Tensor | tuple[Tensor, Tensor]]


class Form:
    """What a user's batches look like.

    Args:
        model: Whose forward names the inputs.
        batch: The first batch: a mapping, a tensor, or a tuple (inputs ..., target).
    """

    def __init__(self, model: nn.Module, batch: Any) -> None:
        self.names: list[str] | None = None
        if not isinstance(batch, Mapping):
            count = len(batch) - 1 if isinstance(batch, tuple | list) and len(batch) > 1 else 1
            kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
            names = [n for n, p in inspect.signature(model.forward).parameters.items() if p.kind in kinds][:count]
            if len(names) < count:
                raise Refused(_unnamed(model, count))
            self.forward: tuple[str, ...] | None = tuple(names)
            self.names = [*names, TARGET] if isinstance(batch, tuple | list) and len(batch) > 1 else names
        else:
            self.forward = None

    def named(self, batch: Any) -> Batch:
        """A batch as a mapping."""
        if self.names is None:
            return dict(batch)
        return dict(zip(self.names, batch if isinstance(batch, tuple | list) else (batch,), strict=True))

    def like(self, batch: Any, named: Batch) -> Any:
        """A mapping in the form the batch has."""
        if self.names is None:
            return named
        items = [named[n] for n in self.names]
        return type(batch)(items) if isinstance(batch, tuple | list) else items[0]

    def loss(self, loss_fn: LossFunction, batch: Any) -> Callable[[Any, Batch], Any]:
        """The user's loss, given batches in the user's form."""
        return lambda output, named: loss_fn(output, self.like(batch, named))


def _unnamed(model: nn.Module, count: int) -> Fault:
    return Fault(
        "P102",
        f"the batch is a tuple with {count} inputs, which {type(model).__name__}.forward does not take by name",
        law="of a tuple, all but the last are given to forward, by the names of its arguments",
        cure='a mapping: {"x": x, "y": y}',
        at="session.shard",
    )
