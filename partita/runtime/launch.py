"""Where this process was launched, and where its user keeps things: the only reader of the environment.  No torch.

torchrun tells a rank its place in variables; no other variable is a setting, but for the user's own cache folder.
"""

import os
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Launched:
    """This process's place among the ranks torchrun made."""

    rank: int
    ranks: int
    local_rank: int
    port: int


def ranks_from_environment() -> Launched | None:
    """Where torchrun put this process; None if it did not."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    if any(name not in os.environ for name in names):
        return None
    rank, ranks, local, _, port = (os.environ[name] for name in names)
    return Launched(int(rank), int(ranks), int(local), int(port))


def first_rank() -> bool:
    """Whether this process tells of the run: the first of those torchrun made, or the only one."""
    launched = ranks_from_environment()
    return launched is None or launched.rank == 0


def cache_folder() -> Path:
    """The user's cache folder for partita, which may not exist yet."""
    root = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(root) if root.startswith("/") else Path.home() / ".cache") / "partita"


def loopback() -> None:
    """Let gloo listen on the loopback interface only."""
    listen_on("lo0" if sys.platform == "darwin" else "lo")


def listen_on(interface: str) -> None:
    """Let gloo listen on this interface only."""
    os.environ["GLOO_SOCKET_IFNAME"] = interface
