"""A torch-function mode that sees the calls inside `torch.nn.functional`.

The Python functions of `torch.nn.functional` ask first whether anybody overrides them and, under a mode, hand themselves over
whole: a mode then never hears the views inside multi-head attention or the dropout inside `F.dropout`. While a `Through` is on,
they are told that nobody asks, and the mode hears the calls they are made of.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Self

import torch.nn.functional as F
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

ASKED = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


def nobody(*_: object) -> bool:
    """What `torch.nn.functional` is told."""
    return False


@contextmanager
def hearing_all() -> Iterator[None]:
    """`torch.nn.functional` is told that nobody asks."""
    kept = [getattr(F, name) for name in ASKED]
    for name in ASKED:
        setattr(F, name, nobody)
    try:
        yield
    finally:
        for name, old in zip(ASKED, kept, strict=True):
            setattr(F, name, old)


class Through(TorchFunctionMode):
    """Base of the modes that must hear every call."""

    def __enter__(self) -> Self:
        self._hearing = hearing_all()
        self._hearing.__enter__()
        return super().__enter__()

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        self._hearing.__exit__(None, None, None)


class Resumable(TorchFunctionMode):
    """Base of the modes that what is computed again must find on, and where they stood.

    While autograd runs they are off even where they are entered around it: a mode that hands `backward` on is not on inside it.
    """

    @abstractmethod
    def place(self) -> "Place":
        """Where it stands now."""

    @contextmanager
    def on(self) -> Iterator[None]:
        """Around a second pass: on, and once only, as it stands."""
        if self in _get_current_function_mode_stack():
            yield
            return
        with hearing_all() if isinstance(self, Through) else nullcontext():
            TorchFunctionMode.__enter__(self)
            try:
                yield
            finally:
                TorchFunctionMode.__exit__(self, None, None, None)


class Place(ABC):
    """Where a mode stood before a first pass."""

    @abstractmethod
    def passed(self) -> None:
        """The first pass is over: the mode stands behind it."""

    @abstractmethod
    def resumed(self) -> AbstractContextManager[None]:
        """Around a second pass: the mode on, where it stood; afterwards it is as it was."""


def resumables() -> list[Resumable]:
    """Those modes that are on, outermost first."""
    return [mode for mode in _get_current_function_mode_stack() if isinstance(mode, Resumable)]


@dataclass(frozen=True)
class Anywhere(Place):
    """The place of a mode that counts nothing."""

    mode: Resumable

    def passed(self) -> None:
        pass

    def resumed(self) -> AbstractContextManager[None]:
        return self.mode.on()
