"""Buckets of gradients: which parameters are reduced together, in which order.

    registration order   embed | block 0 | block 1 | ... | block n-1 | norm, head
    launched             <-------------------------------------------------------

Reverse registration order, the order in which backward makes gradients. A bucket closes at the end of a block once it holds
`FLOOR` bytes, or anywhere once it holds its limit; it has one dtype. Blocks of at least `FLOOR` bytes so give the same
buckets each, which is what lets a folded Program say them once: what is left at a block's end and is less than that goes
with the bucket before it.
"""

import re
from collections.abc import Iterable, Mapping, Sequence

FLOOR = 1 << 20  # bytes; below it latency outweighs overlap (torch's reducer also opens with a bucket of 1 MiB)
LIMIT = 25 << 20  # bytes; torch's own default, so that both can be compared

Entry = tuple[str, int, str]  # name, bytes on this rank, dtype


def block_of(name: str) -> str:
    """The block a parameter belongs to: its path up to the first number; "" outside blocks.

    Example:
        >>> block_of("blocks.3.mlp.up.weight"), block_of("head.weight")
        ('blocks.3', '')
    """
    found = re.match(r"(?:.*?\.)?\d+(?=\.)", name)
    return found[0] if found else ""


def cut_buckets(parameters: Iterable[Entry], *, limit: int = LIMIT, floor: int = FLOOR) -> list[list[str]]:
    """Names per bucket, in launch order.

    Args:
        parameters: In registration order; those without a gradient left out.
        limit: Bytes at which a bucket closes.
        floor: Bytes from which on a bucket closes at the end of a block.
    """
    buckets: list[list[str]] = []
    size, before = 0, None  # of this bucket: bytes, and block and dtype of its last name
    last = None  # block and dtype of the last name before it
    for name, nbytes, dtype in reversed(list(parameters)):
        here = (block_of(name), dtype)
        ended = before is not None and (here[1] != before[1] or size >= limit or (here[0] != before[0] and size >= floor))
        if not ended and before is not None and here[0] != before[0] and last == before:
            buckets[-2:] = [[*buckets[-2], *buckets[-1]]]
            ended = True
        if before is None or ended:
            buckets.append([])
            size, last = 0, before
        buckets[-1].append(name)
        size += nbytes
        before = here
    return buckets


def cut_apart(parameters: Iterable[Entry], stages: Mapping[str, Sequence[int]], *, limit: int = LIMIT) -> list[list[str]]:
    """The same for a rank of a pipeline, stage by stage: from its last stage to its first, then what several of them read.

    Args:
        parameters, limit: As of `cut_buckets`.
        stages: Name -> the stages of the rank that read it.
    """
    found = list(parameters)
    homes = sorted({tuple(stages[name]) for name, _, _ in found}, key=lambda at: (len(at) > 1, [-s for s in at]))
    return [b for at in homes for b in cut_buckets([e for e in found if tuple(stages[e[0]]) == at], limit=limit)]
