"""Drawing without replacement in time that grows with what is drawn, from a seed that says for whom and when.

    few of many     drawn with replacement, twins left out, until there are enough; the surplus is left out by lot
    most of all     those left out are drawn so

By symmetry every set of `count` elements is as likely as any other.
"""

import hashlib

import torch
from torch import Tensor

SLACK = 8  # more than are missing, so that a second turn is seldom


def source(*what: int) -> torch.Generator:
    """A stream of its own for every tuple of numbers, the same on every rank."""
    digest = hashlib.blake2b(repr(what).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)


def draw(count: int, among: int, generator: torch.Generator) -> Tensor:
    """`count` different numbers below `among`, ascending, int64."""
    assert 0 <= count <= among, f"{count} of {among} cannot be drawn"
    if count > among - count:
        left = torch.ones(among, dtype=torch.bool)
        left[draw(among - count, among, generator)] = False
        return left.nonzero().view(-1)
    found = torch.zeros(0, dtype=torch.int64)
    while len(found) < count:
        missing = count - len(found)
        more = torch.randint(among, (missing + missing // 2 + SLACK,), generator=generator)
        found = torch.unique(torch.cat([found, more]))
    return found[torch.randperm(len(found), generator=generator)[:count].sort().values]
