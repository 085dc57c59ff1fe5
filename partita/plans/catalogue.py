"""Named model sizes, read from catalog/models.toml: each with its source and date."""

import tomllib
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any

from partita.workload import MODELS, Model

NAMED = Path(__file__).parents[1] / "catalog" / "models.toml"


@dataclass(frozen=True)
class Named:
    """A model size: the model's kind, its fields, and where the numbers were printed."""

    name: str
    kind: str
    source: str
    date: str
    values: dict[str, Any] = field(default_factory=dict)

    def spec(self) -> Model:
        return MODELS[self.kind](**self.values)


@cache
def named() -> dict[str, Named]:
    """Every named size, in the order of the catalogue."""
    tables = tomllib.loads(NAMED.read_text(encoding="utf-8"))
    own = {f.name for f in fields(Named)} - {"name", "values"}
    return {
        name: Named(name, values={k: v for k, v in table.items() if k not in own}, **{k: str(table[k]) for k in own})
        for name, table in tables.items()
    }
