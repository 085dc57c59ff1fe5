"""The second pass of a module, as whoever follows modules sees it: a module that runs, in the name of the first."""

from collections.abc import Callable
from typing import Any

from torch import nn


class Again(nn.Module):
    """Runs the forward of another module without its hooks, which have run once."""

    def __init__(self, owner: nn.Module) -> None:
        super().__init__()
        self.owner = (owner,)  # in a tuple: it is no part of this one

    def forward(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)


def owner_of(module: nn.Module) -> nn.Module:
    """The module whose forward runs."""
    return module.owner[0] if isinstance(module, Again) else module
