"""metrics.jsonl: one line of JSON a step, whole after every death.

    {"ranks": 2, "pids": [7, 8], "from_step": 4, "before": [{"ranks": 2, "pids": [5, 6], "from_step": 0}]}     of the ranks now
    {"step": 1, "loss": 5.5, "seconds": 0.1, "gradient_norm": 1.0}

A run that goes on from step N keeps the lines of the steps up to N, each once, and takes the later ones and a half-written last
one away: their steps are run again.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from partita.errors import RunFailed

NAME = "metrics.jsonl"


def begin(folder: Path, head: Mapping[str, Any]) -> None:
    """Start the file of a run, or go on with it from step `head["from_step"]`.

    Raises:
        RunFailed: If it cannot be written.
    """
    file = folder / NAME
    rows = read(file)
    kept = {row["step"]: row for row in rows if "step" in row and row["step"] <= head["from_step"]}
    older = [earlier for row in rows if "step" not in row for earlier in (*row.pop("before", ()), row)]
    first = {**head, "before": older} if older else dict(head)
    part = file.with_name(f"{NAME}.partial")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        part.write_text("".join(json.dumps(row) + "\n" for row in (first, *(kept[step] for step in sorted(kept)))))
        part.replace(file)
    except OSError as error:
        raise _failed(file, error) from None


def add(folder: Path, line: Mapping[str, Any]) -> None:
    """One more line.

    Raises:
        RunFailed: If it cannot be written.
    """
    try:
        with (folder / NAME).open("a") as file:
            file.write(json.dumps(line) + "\n")
    except OSError as error:
        raise _failed(folder / NAME, error) from None


def read(file: Path) -> list[dict[str, Any]]:
    """The whole lines of a file; none if there is no file."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return []
    return [row for row in map(_parsed, lines) if isinstance(row, dict)]


def _parsed(line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None


def _failed(file: Path, error: OSError) -> RunFailed:
    return RunFailed(f"rank 0 cannot write {str(file)!r}: {error.strerror or error}")
