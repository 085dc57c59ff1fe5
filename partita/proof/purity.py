"""Saying is pure: while a strategy says what it does, every use of torch raises."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, NoReturn

from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


class TorchUsed(AssertionError):
    """torch was used where only saying is allowed."""


class _Calls(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        raise TorchUsed(f"torch was called: {getattr(func, '__name__', func)}")


class _Ops(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        raise TorchUsed(f"torch was called: {func}")


class _Stub(ModuleType):
    """Stands in for a module of torch: whatever is asked of it raises."""

    def __getattr__(self, name: str) -> NoReturn:
        raise TorchUsed(f"torch was used: {self.__name__}.{name}")


@contextmanager
def without_torch(kind: type) -> Iterator[None]:
    """Every torch call raises, and so does torch itself where the modules of a class and its bases see it.

    Args:
        kind: Whose saying is watched.
    """
    torches = {name: m for name, m in sys.modules.items() if name == "torch" or name.startswith("torch.")}
    known = {id(m) for m in torches.values()}
    homes = [vars(sys.modules[c.__module__]) for c in kind.__mro__ if c.__module__ in sys.modules]
    seen = [(home, name, m) for home in homes for name, m in home.items() if id(m) in known]
    with _Calls(), _Ops():
        try:
            sys.modules.update({name: _Stub(name) for name in torches})
            for home, name, m in seen:
                home[name] = _Stub(m.__name__)
            yield
        finally:
            sys.modules.update(torches)
            for home, name, m in seen:
                home[name] = m
