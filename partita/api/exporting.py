"""A run folder's model as one file: `model.safetensors`, which plain torch and, for `hf:` models, transformers load."""

from pathlib import Path

from partita import plans
from partita.errors import RunFailed
from partita.plans import Plan
from partita.runtime.task import config_text
from partita.runtime.weights import export as write
from partita.runtime.weights import write_model
from partita.strategies import GARDEN

CONFIG = "config.json"


def export(source: str | Path, file: str | Path) -> list[Path]:
    """Write the newest checkpoint's model as one file; returns what was written.

    Args:
        source: A run folder, or one checkpoint in it.
        file: To write; never over another. Beside the file of an `hf:` model its config.json is written, unless one is there.

    Raises:
        Refused: P108, P113, P117.
        RunFailed: If it cannot be written.
    """
    source, file = Path(source), Path(file)
    described = next((p for p in (source, *source.parents[:2]) if (p / "plan.toml").is_file()), None)
    plan = plans.load(described / "plan.toml", strategies=GARDEN) if described else None
    return [write(source, file, once=stored_once(plan)), *_config(plan, file)]


def export_run(plan: Plan, tensors: dict, tied: dict[str, str], file: Path) -> Path:
    """Write a finished run's own tensors."""
    written = write_model(tensors, tied, file, once=stored_once(plan))
    _config(plan, file)
    return written


def stored_once(plan: Plan | None) -> bool:
    """Whether a model file of the plan has each tied tensor once: as transformers stores it."""
    return plan is not None and plan.workload is not None and plan.workload.model.startswith("hf:")


def _config(plan: Plan | None, file: Path) -> list[Path]:
    beside = file.with_name(CONFIG)
    if plan is None or plan.workload is None or not stored_once(plan) or beside.exists():
        return []
    try:
        beside.write_text(config_text(plan.workload), encoding="utf-8")
    except OSError as error:
        raise RunFailed(f"cannot write {str(beside)!r}: {error.strerror or error}") from None
    return [beside]
