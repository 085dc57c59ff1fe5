"""What a checkpoint costs training: written beside it, waited for, or not at all; interleaved."""

import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))
from record import row, write

import partita as pt
from partita.runtime.checkpoint import Saver
from partita.strategies import DDP

WIDTH, DEPTH, SAMPLES = 1024, 8, 512
STEPS, EVERY, REPEATS = 24, 6, 3
SHARE = 0.5  # of what a waited-for save costs


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(DEPTH) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())))


def batches(step: int) -> dict:
    return {"input": torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(step))}


def loss(output: torch.Tensor, batch: dict) -> torch.Tensor:
    return output.square().mean()


@contextlib.contextmanager
def waiting() -> Iterator[None]:
    """Saves that are waited for at once: ranks forked meanwhile inherit it."""
    plain = Saver.begin

    def begin(self: Saver, *args: object, **more: object) -> None:
        began = time.perf_counter()
        plain(self, *args, **{**more, "copy": False})
        self.wait()
        if self.done:
            last = self.done[-1]
            self.done[-1] = type(last)(last.step, last.bytes, time.perf_counter() - began, last.seconds)

    Saver.begin = begin
    yield
    Saver.begin = plain


def once(kind: str) -> dict:
    """One run: seconds a step takes, and what training stood still for each save that was not the last."""
    with tempfile.TemporaryDirectory() as folder, waiting() if kind == "waited for" else contextlib.nullcontext():
        run = pt.train(
            pt.Plan(mesh={"dp": 2}, strategies=[DDP()]), model=make, batches=batches, loss=loss, steps=STEPS,
            out=Path(folder) / "run", save_every=EVERY if kind != "none" else None,
        )  # fmt: skip
    saves = [c for c in run.json()["checkpoints"] if c["step"] < STEPS]
    steps = run.outcome.timed
    cost = (sum(steps) + sum(c["waited_seconds"] for c in saves if c["step"] > 3)) / len(steps)
    return {
        "kind": kind,
        "step": cost,
        "waited": statistics.median(c["waited_seconds"] for c in saves) if saves else 0.0,
        "seconds": statistics.median(c["seconds"] for c in saves) if saves else 0.0,
        "bytes": saves[0]["bytes"] if saves else 0,
    }


def main() -> int:
    runs = [once(kind) for _ in range(REPEATS) for kind in ("none", "beside", "waited for")]
    of = lambda kind, key: statistics.median(r[key] for r in runs if r["kind"] == kind)
    size = of("beside", "bytes")
    share = of("beside", "waited") / of("waited for", "waited")
    ms = lambda seconds: f"{1e3 * seconds:.1f}"
    rows = [
        {"what": "bytes of a checkpoint (MiB)", "measured": round(size / 2**20, 1)},
        row("training stands still for a save, beside / waited for", f"<= {SHARE}", round(share, 3), held=share <= SHARE),
        {
            "what": "training stands still (ms): beside, waited for",
            "measured": f"{ms(of('beside', 'waited'))}, {ms(of('waited for', 'waited'))}",
        },
        {
            "what": "until the checkpoint has its name (ms): beside, waited for",
            "measured": f"{ms(of('beside', 'seconds'))}, {ms(of('waited for', 'seconds'))}",
        },
        {
            "what": f"mean step, saves every {EVERY} included (ms): none, beside, waited for",
            "measured": ", ".join(ms(of(k, "step")) for k in ("none", "beside", "waited for")),
        },
    ]
    return write(__file__, rows, runs=runs)


if __name__ == "__main__":
    sys.exit(main())
