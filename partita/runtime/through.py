"""A torch-function mode that sees the calls inside `torch.nn.functional`.

The Python functions of `torch.nn.functional` ask first whether anybody overrides them and, under a mode, hand themselves over
whole: a mode then never hears the views inside multi-head attention or the dropout inside `F.dropout`. While a `Through` is on,
they are told that nobody asks, and the mode hears the calls they are made of.
"""

from typing import Any, Self

import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

ASKED = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


def nobody(*_: object) -> bool:
    """What `torch.nn.functional` is told."""
    return False


class Through(TorchFunctionMode):
    """Base of the modes that must hear every call."""

    def __enter__(self) -> Self:
        self._kept = [getattr(F, name) for name in ASKED]
        for name in ASKED:
            setattr(F, name, nobody)
        return super().__enter__()

    def __exit__(self, *exc: Any) -> None:
        for name, kept in zip(ASKED, self._kept, strict=True):
            setattr(F, name, kept)
        super().__exit__(*exc)
