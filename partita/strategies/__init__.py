"""The garden: one method per file.  Names resolve late, so that looking at a plan costs no more than the strategies it names.

An outsider's strategy is found by entry point, group ``partita.strategies``: name -> ``package.module:Class``.
"""

import importlib
from collections.abc import Iterator, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any

from partita.errors import Fault, Refused
from partita.strategy import Strategy

if TYPE_CHECKING:
    from partita.strategies.data.ddp import DDP
    from partita.strategies.data.fsdp import FSDP
    from partita.strategies.data.in_network import InNetwork
    from partita.strategies.data.zero1 import Zero1
    from partita.strategies.data.zero2 import Zero2
    from partita.strategies.memory.offload import Offload
    from partita.strategies.memory.recompute import Recompute
    from partita.strategies.pipeline.dualpipev import DualPipeV
    from partita.strategies.pipeline.gpipe import GPipe
    from partita.strategies.pipeline.interleaved import Interleaved
    from partita.strategies.pipeline.looped_bfs import LoopedBFS
    from partita.strategies.pipeline.one_f_one_b import OneFOneB
    from partita.strategies.pipeline.own_schedule import OwnSchedule
    from partita.strategies.pipeline.zbv import ZBV
    from partita.strategies.pipeline.zero_bubble import ZeroBubble
    from partita.strategies.relaxed.delayed_averaging import DelayedAveraging
    from partita.strategies.relaxed.local_sgd import LocalSGD
    from partita.strategies.relaxed.parameter_server import ParameterServer
    from partita.strategies.relaxed.power_sgd import PowerSGD
    from partita.strategies.relaxed.quantized import Quantized
    from partita.strategies.relaxed.slim_dp import SlimDP
    from partita.strategies.relaxed.top_k import TopK
    from partita.strategies.tensor.grid import Grid
    from partita.strategies.tensor.summa import Summa
    from partita.strategies.tensor.tensor_parallel import TensorParallel
    from partita.strategies.tensor.tesseract import Tesseract

GROUP = "partita.strategies"
HOUSE = {  # name in a plan -> where the class lives
    "ddp": "partita.strategies.data.ddp:DDP",
    "offload": "partita.strategies.memory.offload:Offload",
    "recompute": "partita.strategies.memory.recompute:Recompute",
    "dualpipev": "partita.strategies.pipeline.dualpipev:DualPipeV",
    "gpipe": "partita.strategies.pipeline.gpipe:GPipe",
    "interleaved": "partita.strategies.pipeline.interleaved:Interleaved",
    "looped_bfs": "partita.strategies.pipeline.looped_bfs:LoopedBFS",
    "one_f_one_b": "partita.strategies.pipeline.one_f_one_b:OneFOneB",
    "own_schedule": "partita.strategies.pipeline.own_schedule:OwnSchedule",
    "zbv": "partita.strategies.pipeline.zbv:ZBV",
    "zero_bubble": "partita.strategies.pipeline.zero_bubble:ZeroBubble",
    "zero1": "partita.strategies.data.zero1:Zero1",
    "zero2": "partita.strategies.data.zero2:Zero2",
    "fsdp": "partita.strategies.data.fsdp:FSDP",
    "delayed_averaging": "partita.strategies.relaxed.delayed_averaging:DelayedAveraging",
    "local_sgd": "partita.strategies.relaxed.local_sgd:LocalSGD",
    "parameter_server": "partita.strategies.relaxed.parameter_server:ParameterServer",
    "power_sgd": "partita.strategies.relaxed.power_sgd:PowerSGD",
    "quantized": "partita.strategies.relaxed.quantized:Quantized",
    "top_k": "partita.strategies.relaxed.top_k:TopK",
    "slim_dp": "partita.strategies.relaxed.slim_dp:SlimDP",
    "grid": "partita.strategies.tensor.grid:Grid",
    "summa": "partita.strategies.tensor.summa:Summa",
    "in_network": "partita.strategies.data.in_network:InNetwork",
    "tensor_parallel": "partita.strategies.tensor.tensor_parallel:TensorParallel",
    "tesseract": "partita.strategies.tensor.tesseract:Tesseract",
}
_CLASSES = {target.partition(":")[2]: target for target in HOUSE.values()}

__all__ = [
    "DDP",
    "FSDP",
    "GARDEN",
    "ZBV",
    "DelayedAveraging",
    "DualPipeV",
    "GPipe",
    "Garden",
    "Grid",
    "InNetwork",
    "Interleaved",
    "LocalSGD",
    "LoopedBFS",
    "Offload",
    "OneFOneB",
    "OwnSchedule",
    "ParameterServer",
    "PowerSGD",
    "Quantized",
    "Recompute",
    "SlimDP",
    "Summa",
    "TensorParallel",
    "Tesseract",
    "TopK",
    "Zero1",
    "Zero2",
    "ZeroBubble",
]


class Garden(Mapping[str, type[Strategy]]):
    """Name -> class of every strategy there is, ours and those found by entry point; classes are imported when asked for."""

    def __getitem__(self, name: str) -> type[Strategy]:
        if name in HOUSE:
            return _resolve(HOUSE[name])
        for point in entry_points(group=GROUP):
            if point.name == name:
                return _outside(point)
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        yield from HOUSE
        yield from sorted({point.name for point in entry_points(group=GROUP)} - set(HOUSE))

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __contains__(self, name: object) -> bool:
        return name in list(iter(self))


GARDEN = Garden()


def _resolve(target: str) -> type[Strategy]:
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


def _outside(point: EntryPoint) -> type[Strategy]:
    """An outsider's class; what cannot be imported, or is no strategy, is refused with the reason."""
    try:
        kind = point.load()
    except Exception as error:
        what, have = f"strategy {point.name!r} cannot be imported", f"{type(error).__name__}: {error}"
        law, cure = "a strategy is imported when a plan names it", f"mend or uninstall the package of {point.value!r}"
        raise Refused(Fault("P108", what, have, law, cure, f"entry point {point.value}")) from error
    if not (isinstance(kind, type) and issubclass(kind, Strategy)):
        law = "an entry point of this group names a subclass of partita.strategy.Strategy"
        raise Refused(Fault("P102", f"{point.value!r} is no strategy", f"{kind!r}", law, at=f"entry point {point.value}"))
    return kind


def __getattr__(name: str) -> Any:
    if name in _CLASSES:
        return _resolve(_CLASSES[name])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
