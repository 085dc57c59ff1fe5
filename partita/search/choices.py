"""What a search found: plans in their order, and why each other one lost."""

from dataclasses import dataclass

from partita.cost.figures import Figures
from partita.plans import Plan
from partita.units import format_bytes

Candidate = tuple[Plan, Figures, str]  # with its family
AIMS = ("time", "memory", "traffic")


@dataclass(frozen=True)
class Choice:
    """A legal plan that fits: its place in the ranking (1 is best) and its predicted figures."""

    plan: Plan
    figures: Figures
    family: str
    place: int


@dataclass(frozen=True)
class Rejected:
    """A plan that lost: its family, as `ddp(dp=4) x tensor_parallel(tp=2)`, and why, with a number."""

    family: str
    reason: str


@dataclass(frozen=True)
class Choices:
    """What a search found.

    Args:
        plans: Legal plans that fit, best first.
        rejected: Every other candidate, and every plan behind the best, each with its reason.
        lower_bound_seconds: Compute divided evenly, no communication.
        gap: How far the best plan's time is above the bound, as a fraction.
        search_seconds: Wall time.
        candidates: Plans looked at.
    """

    plans: tuple[Choice, ...]
    rejected: tuple[Rejected, ...]
    lower_bound_seconds: float
    gap: float
    search_seconds: float
    candidates: int

    @property
    def best(self) -> Plan:
        return self.plans[0].plan

    @property
    def runner_up(self) -> Plan | None:
        return self.plans[1].plan if len(self.plans) > 1 else None


def aimed(figures: Figures, minimise: str) -> float:
    """The figure that a search makes small."""
    if minimise == "memory":
        return figures.peak
    if minimise == "traffic":
        return sum(row.bytes for row in figures.traffic)
    return figures.step_seconds


def behind(figures: Figures, best: Figures, minimise: str) -> str:
    """By how much a plan that fits is not the best."""
    mine, least = aimed(figures, minimise), aimed(best, minimise)
    if minimise == "time":
        return f"{100 * (mine / least - 1):.3g} % slower"
    more = f"{100 * (mine / least - 1):.3g} % more" if least else format_bytes(mine)
    return f"{more} {minimise}"


def over(figures: Figures, room: float, saved: list[Candidate], best: Candidate | None) -> str:
    """Why a plan does not fit, and what would make it."""
    more, peak = format_bytes(figures.peak - room), format_bytes(figures.peak)
    reason = f"does not fit: {more} over the {format_bytes(room)} of a device (peak {peak})"
    if best is not None:
        slower = 100 * (best[1].step_seconds / figures.step_seconds - 1)
        return f"{reason}; fits as {best[2]}, {slower:.3g} % slower"
    if saved:
        least = min(saved, key=lambda s: s[1].peak)
        return f"{reason}; as {least[2]} still {format_bytes(least[1].peak - room)} over"
    return reason
