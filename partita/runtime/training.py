"""What a training run does, as data."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from partita.runtime.batch import Batch


@dataclass(frozen=True)
class Training:
    """What a run does.

    Args:
        steps: In all; a resumed run goes on to this number.
        microbatches: Of a step, on every data rank.
        clip: (largest gradient norm, p), or None.
        schedule, warmup, horizon: Of the learning rate, in steps.
        seed: Of everything that is drawn while training.
        batch_norm: "microbatch" accepts statistics of microbatches.
        folder: The run folder: metrics.jsonl and checkpoints/; None writes none.
        resume: A run folder or checkpoint to go on from.
        start: A safetensors file of the whole model to start from; not read when resuming.
        save_every: Steps between checkpoints; None means at the end only.
        evaluate_every: Steps between held-out losses; None means at the end only.
        held_out: Held-out batches by number, or None.
        held_out_batches: How many.
        keep: What is gathered whole at the end into `net.folder`: any of "state", "gradients", "optimizer".
        audit: Whether one step is recorded.
        record: Numbers of the steps recorded instead.
    """

    steps: int
    microbatches: int = 1
    clip: tuple[float, float] | None = None
    schedule: str = "constant"
    warmup: int = 0
    horizon: int | None = None
    seed: int = 0
    batch_norm: str | None = None
    folder: Path | None = None
    resume: Path | None = None
    start: Path | None = None
    save_every: int | None = None
    evaluate_every: int | None = None
    held_out: Callable[[int], Batch] | None = None
    held_out_batches: int = 4
    keep: frozenset[str] = frozenset({"state"})
    audit: bool = True
    record: frozenset[int] = frozenset()
