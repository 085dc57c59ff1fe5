"""Stages that are equal but for their position, said once: a shorter pipeline with one rank of each kind.

    whole     | embed 0 1 | 2 3 | 4 5 | 6 7 | 8 9 | 10 11 head |        6 ranks, 12 blocks
    short     | embed 0 1 | 2 3 |                 | 4 5 head   |        3 kinds,  6 blocks

The middle blocks of a folded program are copies of one block, so stages of as many middle blocks are alike. One rank of each
kind is cast from a program of fewer blocks and stands for all of its kind; it shares its tensors and events with them, by
which whoever reads roles knows them. Its module paths are those of the short pipeline.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from partita.program.blocks import block_number
from partita.program.fold import stretch, unfold
from partita.program.program import Pipeline, Program, Turn
from partita.program.schedules import Schedule
from partita.program.stages import Stages, cut

LEAST = 3  # blocks of a folded program: a first, a middle and a last one


@dataclass(frozen=True)
class Short:
    """A pipeline with one rank of each kind.

    Args:
        program: Flat, of as many blocks as its stages have.
        stages: It cut.
        stands: Rank -> the rank of its kind that is cast.
        place: Stage of a rank that is cast -> its number in `stages`.
        prefix: Of the paths of blocks, before their number.
        edges: Block that each stage of the whole pipeline begins with.
        short_edges: The same of the short one.
    """

    program: Program
    stages: Stages
    stands: tuple[int, ...]
    place: dict[int, int]
    prefix: str
    edges: Sequence[int]
    short_edges: Sequence[int]

    def behind(self, held: Sequence[int], kind: Sequence[int]) -> tuple[tuple[int, str], ...]:
        """By how many blocks the stages of the rank that is cast are behind those of another of its kind."""
        pairs = zip(held, kind, strict=True)
        return tuple((self.edges[s] - self.short_edges[self.place[k]], self.prefix) for s, k in pairs)


def shortened(program: Program, starts: Sequence[str], schedule: Schedule) -> Short | None:
    """The short pipeline; None where nothing is gained, or where a stage is more than a run of blocks.

    Args:
        program: As the strategies inside left it, folded.
        starts: Where the stages after the first begin.
        schedule: Who holds which stage.
    """
    prefix, edges = runs_of_blocks(program, starts)
    blocks, sizes = edges[-1], [b - a for a, b in pairwise(edges)]
    if not sizes:
        return None
    stands = _stands(sizes, schedule)
    kept = sorted(s for rank in set(stands) for s in schedule.held[rank])
    few = sum(sizes[s] for s in kept)
    if few >= blocks or few < LEAST or not _as_far_apart(schedule, stands, kept):
        return None
    ends = [sum(sizes[s] for s in kept[: n + 1]) for n in range(len(kept) - 1)]
    flat = unfold(stretch(program, few))
    stages = cut(flat, [f"{prefix}{end}" for end in ends])
    if any(len(at) > 1 and not {0, len(kept) - 1}.issuperset(at) for at in stages.holders.values()):
        return None  # a parameter of many stages: how many hold it counts
    return Short(flat, stages, stands, {s: n for n, s in enumerate(kept)}, prefix, edges, [0, *ends])


def runs_of_blocks(program: Program, starts: Sequence[str]) -> tuple[str, list[int]]:
    """The path of a folded program's blocks before their number, and the blocks at which stages begin, their count last.

    Of stages that are anything else than runs of whole blocks: [0].
    """
    body = next((s for s in program.segments if s.block), None)
    prefix = body.block[:-1] if body else ""
    numbers = [block_number(prefix, s) if body else None for s in starts]
    whole = [n for n, s in zip(numbers, starts, strict=True) if n is not None and s == f"{prefix}{n}"]
    edges = [0, *whole, body.count + 2 if body else 0]
    legal = len(whole) == len(starts) and all(a < b for a, b in pairwise(edges))
    return prefix, edges if legal else [0]


def standing_for(role: Program, pipeline: Pipeline) -> Program:
    """The role of another rank of the same kind: its own turns, the same tensors and events."""
    own = role.pipeline
    assert own is not None, "only a role has turns"
    names = {str(old): str(new) for old, new in zip(own.stages, pipeline.stages, strict=True)}
    segments = tuple(replace(s, part=_renamed(s.part, names)) if s.part else s for s in role.segments)
    return replace(role, segments=segments, pipeline=pipeline)


def turned(turns: Sequence[Turn], place: dict[int, int]) -> tuple[Turn, ...]:
    """Turns with the stages of the short pipeline."""
    names = {str(old): str(new) for old, new in place.items()}
    return tuple(Turn(_renamed(turn.part, names), turn.microbatch) for turn in turns)


def _renamed(part: str, names: dict[str, str]) -> str:
    kind = part.lstrip("0123456789")
    return names[part[: len(part) - len(kind)]] + kind


def _stands(sizes: Sequence[int], schedule: Schedule) -> tuple[int, ...]:
    """Per rank, the first rank of its kind: as many blocks in each stage, at an end or not, next to each other or not."""
    last = len(sizes) - 1
    first: dict[tuple, int] = {}
    found = []
    for rank, held in enumerate(schedule.held):
        near = tuple(schedule.placement[s + way] == rank if 0 <= s + way <= last else None for s in held for way in (-1, 1))
        passes = {(held.index(a.stage), a.kind) for a in schedule.order[rank]}
        found.append(first.setdefault((tuple(sizes[s] for s in held), near, frozenset(passes)), rank))
    return tuple(found)


def _as_far_apart(schedule: Schedule, stands: Sequence[int], kept: Sequence[int]) -> bool:
    """Whether stages that follow each other on a rank do so in the short pipeline, and no others."""
    number = {s: n for n, s in enumerate(kept)}
    pairs = ((a, b) for rank in set(stands) for a, b in pairwise(schedule.held[rank]))
    return all((b - a == 1) == (number[b] - number[a] == 1) for a, b in pairs)
