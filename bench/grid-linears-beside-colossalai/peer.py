"""ColossalAI's legacy grid layers on CPU ranks that already have a process group: what stands in for its launch.

Its own launch wants CUDA and an address of its own. Here the ranks' gloo group is registered as its global one, its groups are
made by its own initialisers, and the switch of CUDA random streams around parameter initialisation does nothing.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from colossalai.context import Config
from colossalai.legacy.context import ParallelMode
from colossalai.legacy.core import global_context
from colossalai.legacy.nn.layer.parallel_2d import Linear2D
from colossalai.legacy.nn.layer.parallel_2d import layers as layers_2d
from colossalai.legacy.nn.layer.parallel_2p5d import Linear2p5D
from colossalai.legacy.nn.layer.parallel_2p5d import layers as layers_2p5d
from colossalai.legacy.nn.layer.parallel_3d import Linear3D
from colossalai.legacy.nn.layer.parallel_3d import layers as layers_3d

LINEAR = {"2d": Linear2D, "2.5d": Linear2p5D, "3d": Linear3D}


@contextmanager
def no_seed(mode: ParallelMode) -> Iterator[None]:
    yield


def launch(mode: str, ranks: int, rank: int, **settings: int) -> None:
    """Make its parallel context of the process group that is there; `settings` as in its `parallel.tensor` table."""
    for layers in (layers_2d, layers_2p5d, layers_3d):
        layers.seed = no_seed
    tensor = {"size": ranks, "mode": mode, **settings}
    global_context.load_config(Config({"parallel": {"pipeline": 1, "tensor": tensor}}))
    global_context._register_dist(
        rank, ranks, dist.GroupMember.WORLD, dist.GroupMember.WORLD, list(range(ranks)), ParallelMode.GLOBAL
    )
    global_context.add_global_rank(ParallelMode.GLOBAL, rank)
    global_context.init_parallel_groups()
