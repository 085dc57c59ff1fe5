"""The run folder: where a run writes, what it goes on from, and what stands in it before the first rank starts.

plan.toml · predicted.json · metrics.jsonl · checkpoints/step-N/ · summary.json        no absolute path inside: it may be moved
"""

from datetime import datetime
from pathlib import Path

from partita.api.planning import Estimate, with_workload
from partita.errors import Fault
from partita.pages.json import dumps
from partita.plans import Plan
from partita.runtime.checkpoint import latest, peek
from partita.runtime.launch import first_rank


def folders(plan: Plan, out: str | Path | None, resume: str | Path | None, *, own: bool) -> tuple[Path | None, Path | None]:
    """(where this run writes, where it goes on from)."""
    source = Path(resume) if resume else None
    if out is not None:
        return Path(out), source
    if source is not None:
        return source, source
    if own:
        return None, None
    name = with_workload(plan).model.rpartition(":")[2].replace("/", "-").removesuffix("-config.json").strip("-")
    return Path("runs") / f"{name}-{datetime.now():%Y%m%d-%H%M%S}", None


def folder_faults(folder: Path | None, source: Path | None) -> list[Fault]:
    if folder is None or folder == source or not folder.exists():
        return []
    if folder.is_dir() and not any(folder.iterdir()):
        return []
    have = f"{len(list(folder.iterdir()))} entries" if folder.is_dir() else "a file"
    law = "a run never writes over another; an empty folder is fine"
    return [Fault("P113", f"{str(folder)!r} is in use", have, law, f"another folder, or resume={str(folder)!r}", "out")]


def steps_left(source: Path | None, steps: int) -> list[Fault]:
    if source is None:
        return []
    done = peek(latest(source / "checkpoints" if (source / "checkpoints").is_dir() else source)).step
    if done < steps:
        return []
    law = "steps counts all steps of the run, those before the checkpoint included"
    return [
        Fault(
            "P112", f"steps = {steps} leaves nothing to do", f"the checkpoint has {done} steps", law, f"steps > {done}", "steps"
        )
    ]


def opened(folder: Path, plan: Plan, predicted: Estimate) -> None:
    """Write what is known before the first rank starts."""
    if not first_rank():
        return
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "plan.toml").exists() and plan.workload is not None:
        (folder / "plan.toml").write_text(plan.to_toml(folder))
    (folder / "predicted.json").write_text(dumps(predicted.json()) + "\n")
