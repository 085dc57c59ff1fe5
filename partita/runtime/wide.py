"""float32 islands of a model become float64 while a proof looks.

Many models compute norms and softmax in float32 whatever their dtype (`x.float()`, `softmax(..., dtype=torch.float32)`). In a
float64 proof such an island rounds to 1e-7 and would hide an error a thousand times the bound.
"""

from typing import Any

import torch

from partita.runtime.through import Anywhere, Place, Resumable


class Wide(Resumable):
    """Turns every request for float32 into one for float64."""

    def place(self) -> Place:
        return Anywhere(self)

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        wide = tuple(torch.float64 if a is torch.float32 else a for a in args)
        named = {k: torch.float64 if v is torch.float32 else v for k, v in (kwargs or {}).items()}
        widened: Any = torch.Tensor.double if func is torch.Tensor.float else func
        return widened(*wide, **named)
