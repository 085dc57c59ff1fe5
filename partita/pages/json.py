"""The JSON of the contract: figures and choices as plain data, and strict text without NaN."""

import json
import math
from collections.abc import Mapping
from typing import Any

from partita.cost.figures import PARTS, Figures, Why
from partita.search import Choices


def dumps(value: Any) -> str:
    """One JSON object; numbers that JSON has no word for (NaN, infinity) become null."""
    return json.dumps(_strict(value), indent=2, allow_nan=False)


def figures_json(figures: Figures, plan_hash: str) -> dict[str, Any]:
    """The `estimate` object: every key of the contract."""
    seconds = figures.step_seconds
    rate = figures.flop / seconds if seconds else None
    peak_rate = figures.device_flop_per_second
    return {
        "plan_hash": plan_hash,
        "step_seconds": seconds,
        "step_seconds_band": list(figures.step_seconds_band or (seconds, seconds)),
        "samples_per_second": figures.samples / seconds if seconds else None,
        "tokens_per_second": figures.tokens / seconds if seconds and figures.tokens is not None else None,
        "flop_per_second_per_device": rate,
        "mfu": rate / peak_rate if rate is not None and peak_rate else None,
        "bubble_fraction": figures.bubble_fraction,
        "exposed_communication_seconds": figures.exposed_communication_seconds,
        "memory_bytes": {"peak": figures.peak, **{part: figures.memory.get(part, 0.0) for part in PARTS}},
        "peak_at": figures.peak_at,
        "fits": figures.fits,
        "traffic": [row.json() for row in figures.traffic],
        "energy_joules": figures.energy_joules,
        "opaque_share": figures.opaque_share,
        "notes": list(figures.notes),
    }


def why_json(why: Why) -> dict[str, Any]:
    """One term of a figure."""
    return {
        "term": why.term,
        "formula": why.formula,
        "amount": why.amount,
        "constant": why.constant,
        "source": why.source,
        "seconds": why.seconds,
    }


def choices_json(choices: Choices) -> dict[str, Any]:
    """The `plan` object: every key of the contract."""
    return {
        "plans": [
            {
                "plan": choice.plan.to_toml(),
                "place": choice.place,
                "family": choice.family,
                "step_seconds": choice.figures.step_seconds,
                "memory_bytes": {"peak": choice.figures.peak, **choice.figures.memory},
            }
            for choice in choices.plans
        ],
        "rejected": [{"family": r.family, "reason": r.reason} for r in choices.rejected],
        "lower_bound_seconds": choices.lower_bound_seconds,
        "gap": choices.gap,
        "search_seconds": choices.search_seconds,
        "candidates": choices.candidates,
    }


def _strict(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): _strict(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_strict(v) for v in value]
    return value if value is None or isinstance(value, bool | int | str) else str(value)
