"""Random numbers that do not depend on the layout: what one device would draw.

Every draw is keyed by (seed, step, number of the call in the forward pass, global number of the sample): each sample's row is
drawn whole by a generator of its own, and a rank then keeps the part it holds. Data rank, microbatch and tensor shard therefore
do not matter; one rank under the same stream is the reference.

    call 3 of step 7, samples 4 and 5, heads split in two:

        key (seed, 7, 3, 4) -> row of sample 4   | rank 0 keeps | rank 1 keeps |
        key (seed, 7, 3, 5) -> row of sample 5   | rank 0 keeps | rank 1 keeps |

Served are dropout of every kind, inside attention too, and plain noise (`rand_like`, `randn`, `bernoulli_`, ...). Numbers are
drawn in float32 whatever the model's dtype, so a float64 proof sees the masks of the float32 run.
"""

import hashlib
import math
import struct
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from partita.errors import Fault
from partita.program import Compute, Phase, Program
from partita.runtime.through import Place, Resumable, Through

SERVED = {  # ops that draw and are served: dropout is made of the first three
    "bernoulli_", "bernoulli", "native_dropout", "rand", "rand_like", "randn", "randn_like", "uniform_", "normal_",
}  # fmt: skip
OTHER = {  # ops that draw otherwise
    "randint", "randint_like", "randperm", "normal", "multinomial", "exponential_", "log_normal_", "cauchy_", "geometric_",
    "poisson", "rrelu_with_noise", "rrelu_with_noise_", "random_",
}  # fmt: skip
WHOLE = -1  # the sample number of a draw that belongs to no sample


@dataclass(frozen=True, slots=True)
class Row:
    """Where a drawn tensor carries the samples: dim number `dim` is (outer, samples, rest); dim None means nowhere."""

    dim: int | None = 0
    outer: int = 1


@dataclass(frozen=True, slots=True)
class Part:
    """The part of a dim this rank holds: `spans` of (start, length) of the whole dim of `size`."""

    dim: int
    size: int
    spans: tuple[tuple[int, int], ...]

    def of(self, whole: Tensor, dim: int) -> Tensor:
        """The part of `whole` along `dim`."""
        pieces = [whole.narrow(dim, start, length) for start, length in self.spans]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)


def key(*numbers: int) -> int:
    """63 well-mixed bits of a few integers."""
    digest = hashlib.blake2b(struct.pack(f"<{len(numbers)}q", *numbers), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def draws(program: Program) -> bool:
    """Whether a training step of the program draws anything a stream serves."""
    return any(isinstance(e, Compute) and e.op in SERVED for e in program.events())


def faults(program: Program) -> list[Fault]:
    """Draws that cannot be the same under every layout, and recomputed ones, which would be drawn anew."""
    found: dict[tuple[str, str], Fault] = {}
    for e in program.events():
        if isinstance(e, Compute) and e.phase != Phase.OPTIMIZER:
            again = e.op in SERVED and e.phase == Phase.RECOMPUTE
            if again or e.op in OTHER:
                found[e.module, e.op] = Fault(
                    "P115",
                    f"{e.module or 'the model'!r} draws random numbers with {e.op!r}"
                    + (" again when recomputed" if again else ""),
                    law="a split run must draw what one device draws",
                    cure="dropout 0 inside checkpointed modules"
                    if again
                    else "rand, randn, bernoulli or dropout, or noise passed in with the batch",
                )
    return list(found.values())


def rows(program: Program) -> list[Row]:
    """Per draw of the forward pass, in order: where its tensor carries the samples."""
    found = []
    for segment in program.segments:
        for _ in range(segment.count):
            for e in segment.events:
                if isinstance(e, Compute) and e.phase == Phase.FORWARD and e.op in SERVED:
                    found.append(row(program, e))
    return found


def row(program: Program, event: Compute) -> Row:
    """Where the tensor an event draws carries the samples."""
    batch = program.classes.get("batch", frozenset())
    for number, dim in enumerate(program.tensors[event.outs[-1]].dims):
        for k, atom in enumerate(dim):
            if atom in batch:
                return Row(number, math.prod(program.atoms[a] for a in dim[:k]))
    return Row(None)


Answer = Callable[..., Tensor]


class Stream(Through, Resumable):
    """Serves dropout from keyed generators while a step runs.

    Args:
        seed: Of the run.
        where: Per call, where the samples are (`rows`); calls beyond the list take dim 0.
    """

    def __init__(self, seed: int, where: list[Row] | None = None) -> None:
        super().__init__()
        self.seed, self.where = seed, where or []
        self.part: Part | None = None  # set around one call by whoever runs it on a shard
        self._at = 0, 0, 1  # step, first sample, samples
        self._calls = 0
        self._generators: dict[torch.device, torch.Generator] = {}

    @contextmanager
    def step(self, step: int, first_sample: int, samples: int) -> Iterator["Stream"]:
        """One forward pass: over `samples` samples of the global batch, from number `first_sample` on."""
        self._at, self._calls = (step, first_sample, samples), 0
        with self:
            yield self

    def place(self) -> Place:
        return _Drawn(self, self._at, self._calls)

    @contextmanager
    def resumed(self, at: tuple[int, int, int], calls: int) -> Iterator[None]:
        """Once more from a place on: what is drawn is what was drawn there."""
        kept, (self._at, self._calls) = (self._at, self._calls), (at, calls)
        try:
            with self.on():
                yield
        finally:
            self._at, self._calls = kept

    @contextmanager
    def split(self, part: Part | None) -> Iterator[None]:
        """The next call runs on this part of its tensor."""
        self.part = part
        try:
            yield
        finally:
            self.part = None

    def draw(self, shape: tuple[int, ...], device: torch.device, what: Answer = torch.rand) -> Tensor:
        """The next draw of the stream, float32: this rank's part of the whole tensor, of local `shape`."""
        step, first, samples = self._at
        row = self._row(shape)
        call, self._calls = self._calls, self._calls + 1
        out = torch.empty(shape, dtype=torch.float32, device=device)
        if row.dim is None:
            self._fill(out, key(self.seed, step, call, WHOLE), self.part, what)
            return out
        wide = out.unflatten(row.dim, (row.outer, samples, -1)).movedim(row.dim + 1, 0)
        part = self.part and Part(self.part.dim + (self.part.dim >= row.dim), self.part.size, self.part.spans)
        for i in range(samples):
            self._fill(wide[i], key(self.seed, step, call, first + i), part, what)
        return out

    def _row(self, shape: tuple[int, ...]) -> Row:
        """Where the samples of the next draw are: as captured, else the outermost dim they fit in, else nowhere."""
        samples = self._at[2]
        known = self.where[self._calls] if self._calls < len(self.where) else Row()
        for row in (known, Row()):
            if row.dim is None or (row.dim < len(shape) and shape[row.dim] and shape[row.dim] % (samples * row.outer) == 0):
                return row
        return Row(None)

    @property
    def count(self) -> int:
        """Draws of this forward pass so far."""
        return self._calls

    def skip(self) -> None:
        """Count a draw that is not served."""
        self._calls += 1

    def _fill(self, out: Tensor, seed: int, part: Part | None, what: Answer) -> None:
        generator = self._generators.setdefault(out.device, torch.Generator(out.device)).manual_seed(seed)
        shape = [part.size if part and d == part.dim else n for d, n in enumerate(out.shape)]
        with torch._C.DisableTorchFunction():  # a mode that widens float32 must not change what is drawn
            whole = what(shape, dtype=torch.float32, device=out.device, generator=generator)
            out.copy_(part.of(whole, part.dim) if part else whole)

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        serve = SERVE.get(func)
        return func(*args, **(kwargs or {})) if serve is None else serve(self, func, *args, **(kwargs or {}))


@dataclass(frozen=True)
class _Drawn(Place):
    """Where a stream stands: step, first sample and samples of the pass, and its draws so far."""

    stream: Stream
    at: tuple[int, int, int]
    calls: int

    def passed(self) -> None:
        pass

    def resumed(self) -> AbstractContextManager[None]:
        return self.stream.resumed(self.at, self.calls)


# ---------------------------------------------------------------- what is served, each with torch's own arithmetic
BY_FEATURE = {torch.feature_dropout, torch.feature_dropout_, torch.feature_alpha_dropout, torch.feature_alpha_dropout_}
IN_PLACE = {torch.dropout_, torch.feature_dropout_, torch.alpha_dropout_, torch.feature_alpha_dropout_}
# Minus what a dropped unit becomes: scale x alpha of SELU.  Source: Klambauer et al. 2017, arXiv:1706.02515, section 3.
ALPHA = 1.7580993408473766


def _noise(stream: Stream, x: Tensor, p: float, *, by_feature: bool = False) -> Tensor:
    """0 with chance p, else 1, in x's dtype; one number for a whole feature map if so asked."""
    shape = (*x.shape[:2], *(1 for _ in x.shape[2:])) if by_feature else tuple(x.shape)
    return (stream.draw(shape, x.device) >= p).to(x.dtype)


def _dropout(stream: Stream, func: Any, input: Tensor, p: float = 0.5, train: bool = True) -> Tensor:  # noqa: FBT001, FBT002
    if not train or not p:
        return func(input, p, train)
    noise = _noise(stream, input, p, by_feature=func in BY_FEATURE)
    noise = noise.div_(1 - p) if p < 1 else noise
    return input.mul_(noise) if func in IN_PLACE else input * noise


def _alpha(stream: Stream, func: Any, input: Tensor, p: float = 0.5, train: bool = True) -> Tensor:  # noqa: FBT001, FBT002
    if not train or not p:
        return func(input, p, train)
    noise = _noise(stream, input, p, by_feature=func in BY_FEATURE)
    a = 1 / math.sqrt((ALPHA * ALPHA * p + 1) * (1 - p)) if p < 1 else 0.0
    scale, shift = noise * a, (noise - 1) * (ALPHA * a) + ALPHA * a * p
    return input.mul_(scale).add_(shift) if func in IN_PLACE else input * scale + shift


def _attention(stream: Stream, func: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Attention written out where its weights are dropped, so that their mask can be served."""
    given = {**dict(zip(ATTENTION, args, strict=False)), **kwargs}
    query, key, value, mask = given["query"], given["key"], given["value"], given.get("attn_mask")
    rate, scale = given.get("dropout_p", 0.0), given.get("scale")
    if not rate:
        return func(*args, **kwargs)
    if given.get("enable_gqa"):
        repeats = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(repeats, -3), value.repeat_interleave(repeats, -3)
    scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if given.get("is_causal"):
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    return _dropout(stream, torch.dropout, torch._safe_softmax(scores, -1), rate) @ value


def _like(stream: Stream, func: Any, input: Tensor, **how: Any) -> Tensor:
    """rand_like, randn_like."""
    if how.get("generator") is not None:
        stream.skip()
        return func(input, **how)
    drawn = stream.draw(tuple(input.shape), input.device, torch.randn if func is torch.randn_like else torch.rand)
    return drawn.to(how.get("dtype") or input.dtype).requires_grad_(how.get("requires_grad", False))


def _created(stream: Stream, func: Any, *size: Any, **how: Any) -> Tensor:
    """rand, randn."""
    if how.get("generator") is not None or how.get("out") is not None:
        stream.skip()
        return func(*size, **how)
    given = size or (how["size"],)
    shape = tuple(given[0]) if isinstance(given[0], tuple | list) else given
    drawn = stream.draw(shape, torch.empty(0, device=how.get("device")).device, func)
    return drawn.to(how.get("dtype") or torch.get_default_dtype()).requires_grad_(how.get("requires_grad", False))


def _written(stream: Stream, func: Any, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """uniform_, normal_, bernoulli_."""
    if kwargs.get("generator") is not None:
        stream.skip()
        return func(input, *args, **kwargs)
    normal = func is Tensor.normal_
    drawn = stream.draw(tuple(input.shape), input.device, torch.randn if normal else torch.rand)
    if func is Tensor.bernoulli_:
        return input.copy_(drawn < (args[0] if args else kwargs.get("p", 0.5)))
    names, usual = (("mean", "std"), (0.0, 1.0)) if normal else (("from", "to"), (0.0, 1.0))
    low, high = (args[i] if len(args) > i else kwargs.get(n, d) for i, (n, d) in enumerate(zip(names, usual, strict=True)))
    return input.copy_(drawn.to(input.dtype).mul_(high if normal else high - low).add_(low))


def _bernoulli(stream: Stream, func: Any, input: Tensor, p: float | None = None, **kwargs: Any) -> Tensor:
    """bernoulli: of the chances given, or of one chance."""
    if kwargs.get("generator") is not None or kwargs.get("out") is not None:
        stream.skip()
        return func(input, **({"p": p} if p is not None else {}), **kwargs)
    return (stream.draw(tuple(input.shape), input.device) < (input if p is None else p)).to(input.dtype)


ATTENTION = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
SERVE: dict[Any, Answer] = {
    torch.dropout: _dropout,
    torch.dropout_: _dropout,
    torch.feature_dropout: _dropout,
    torch.feature_dropout_: _dropout,
    torch.alpha_dropout: _alpha,
    torch.alpha_dropout_: _alpha,
    torch.feature_alpha_dropout: _alpha,
    torch.feature_alpha_dropout_: _alpha,
    F.scaled_dot_product_attention: _attention,
    torch.rand: _created,
    torch.randn: _created,
    torch.rand_like: _like,
    torch.randn_like: _like,
    torch.bernoulli: _bernoulli,
    Tensor.bernoulli: _bernoulli,
    Tensor.bernoulli_: _written,
    Tensor.uniform_: _written,
    Tensor.normal_: _written,
}
