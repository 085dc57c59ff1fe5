"""Text as bytes: the standard library's own source, or any file or folder.

    text       block 0 | block 1 | ... | block 18 | block 19 | block 20 | ...     every 20th block is held out
    training   block 0 | block 1 | ... | block 18            | block 20 | ...
    held out                                        block 19            | ...

A training batch is drawn by (seed, step) and nothing else; a held-out batch by its number, so that it is the same for whatever
is trained. The token of a byte is its value, and a model needs 256 of them.
"""

import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path

import torch
from torch import Tensor

from partita.errors import Fault, Refused
from partita.units import format_bytes
from partita.workload import Workload

Batches = Callable[[int], dict[str, Tensor]]

LIMIT = 8 << 20  # bytes taken of the standard library: read in a fraction of a second, and more than a small model learns
EVERY = 20  # one block in so many is held out
BLOCK = 64 << 10  # bytes of a block of a large text
FOREIGN = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idle_test",
    "idlelib",
    "lib2to3",
    "__pycache__",
}  # not its own source
BYTES = 256  # values of a byte
AT = "workload.data"


@dataclass(frozen=True)
class Text:
    """What was read.

    Args:
        data: uint8, all files one after another.
        files: How many there are.
        skipped: Those that hold no text, by path.
    """

    data: Tensor
    files: int
    skipped: tuple[str, ...] = ()

    def __str__(self) -> str:
        told = f"{format_bytes(len(self.data))} of text in {self.files} file{'s' * (self.files != 1)}"
        if not self.skipped:
            return told
        more = f" and {len(self.skipped) - 3} more" if len(self.skipped) > 3 else ""
        return f"{told}; skipped, as they hold binary data: {', '.join(self.skipped[:3])}{more}"


@dataclass(frozen=True)
class Corpus:
    """Batches of a text.

    Args:
        training: uint8, longer than a window.
        held: The same, never trained on.
    """

    training: Tensor
    held: Tensor

    @staticmethod
    def of(text: Tensor, sequence: int) -> "Corpus":
        """Divide a text so that both parts have room for a window of `sequence` + 1 bytes; it has at least 4 of them."""
        window = sequence + 1
        block = max(min(BLOCK, len(text) // EVERY), window)
        blocks = list(text.split(block))
        if len(blocks[-1]) < window:  # too short to stand alone
            blocks[-2:] = [torch.cat(blocks[-2:])]
        every = min(EVERY, len(blocks))
        kept = [b for k, b in enumerate(blocks) if k % every != every - 1]
        return Corpus(torch.cat(kept), torch.cat([b for k, b in enumerate(blocks) if k % every == every - 1]))

    def batch(self, step: int, samples: int, sequence: int, seed: int = 0) -> dict[str, Tensor]:
        """The training batch of a step: tokens and targets, int64 (samples, sequence)."""
        return _drawn(self.training, samples, sequence, f"training {seed} {step}")

    def held_out(self, number: int, samples: int, sequence: int) -> dict[str, Tensor]:
        """A held-out batch."""
        return _drawn(self.held, samples, sequence, f"held out {number}")


def _drawn(text: Tensor, samples: int, sequence: int, key: str) -> dict[str, Tensor]:
    seed = int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "big") >> 1  # torch takes 63 bits
    starts = torch.randint(len(text) - sequence, (samples, 1), generator=torch.Generator().manual_seed(seed))
    windows = text[starts + torch.arange(sequence + 1)].long()
    return {"tokens": windows[:, :-1].contiguous(), "targets": windows[:, 1:].contiguous()}


def decode(tokens: Tensor | Iterable[int]) -> str:
    """The text of tokens; what is no text becomes the replacement character."""
    values = tokens.flatten().tolist() if isinstance(tokens, Tensor) else list(tokens)
    return b"".join(bytes([v]) if 0 <= v < BYTES else b"\xff" for v in values).decode("utf-8", errors="replace")


# ---------------------------------------------------------------- of a workload
def batches_of(workload: Workload) -> Batches:
    """Training batches of a workload's text, by step.

    Raises:
        Refused: P108 missing, P109 unreadable, P110 empty or too short, P112 a vocabulary below 256.
    """
    corpus, sequence = corpus_of(workload), workload.sequence or 0
    return lambda step: corpus.batch(step, workload.batch, sequence, workload.seed)


def held_out_of(workload: Workload) -> Batches:
    """Held-out batches of a workload's text, numbered from 0."""
    corpus, sequence = corpus_of(workload), workload.sequence or 0
    return lambda number: corpus.held_out(number, workload.batch, sequence)


def corpus_of(workload: Workload) -> Corpus:
    """The text of a token workload, divided."""
    vocab, sequence = getattr(workload.spec, "vocab", BYTES), workload.sequence or 0
    if vocab < BYTES:
        raise Refused(
            Fault(
                "P112",
                f"vocab = {vocab} cannot hold text read as bytes",
                have=f"vocab = {vocab}, a byte has {BYTES} values",
                law="every byte is a token",
                cure=f"vocab = {BYTES} or more",
                at="workload.vocab",
            )
        )
    data = text_of(workload).data
    if len(data) < 4 * (sequence + 1):
        raise Refused(
            Fault(
                "P110",
                f"the text {workload.data or 'of the standard library'!r} is too short",
                have=f"{len(data)} bytes, sequence = {sequence}",
                law="training and held-out text both need a window of sequence + 1 bytes, and room to choose it",
                cure=f"at least {4 * (sequence + 1)} bytes"
                + (f", or sequence = {len(data) // 4 - 1}" if len(data) >= 8 else ""),
                at=AT,
            )
        )
    return Corpus.of(data, sequence)


def text_of(workload: Workload) -> Text:
    """The text a workload reads; printed, it says what was read and what was skipped."""
    return own_source() if workload.data is None else read(Path(workload.data))


# ---------------------------------------------------------------- reading
@lru_cache(maxsize=1)
def own_source(limit: int = LIMIT) -> Text:
    """The standard library's own source, in order of names, up to `limit` bytes."""
    root = Path(sysconfig.get_path("stdlib"))
    own = [
        f for f in _below(root, FOREIGN) if f.suffix == ".py" and not f.name.startswith("_sysconfigdata")
    ]  # made by each build
    if not own:
        raise Refused(_no_text(f"{root}", "this Python comes without its source", "data = the path of a text file or folder"))
    buffer, files = bytearray(), 0
    for file in own:
        buffer += _bytes(file)
        files += 1
        if len(buffer) >= limit:
            break
    del buffer[limit:]
    return Text(torch.frombuffer(buffer, dtype=torch.uint8), files)


def read(path: Path) -> Text:
    """The bytes of a file, or of all text files in a folder in order of their paths; hidden ones are left out.

    Raises:
        Refused: P108 if it is not there, P109 if it cannot be read or is no text, P110 if it holds nothing.
    """
    buffer, skipped, files = bytearray(), [], 0
    for file in _listed(path):
        raw = _bytes(file)
        if b"\0" in raw:  # no text in a one-byte encoding or UTF-8 has it
            skipped.append(file.name if file == path else file.relative_to(path).as_posix())
            continue
        buffer += raw
        files += 1
    if skipped and not files:
        raise Refused(_unreadable(path, f"{len(skipped)} file{'s' * (len(skipped) != 1)} with zero bytes, which text has not"))
    if not buffer:
        raise Refused(_no_text(str(path), f"{files} file{'s' * (files != 1)}, 0 bytes", "a text file, or a folder of them"))
    return Text(torch.frombuffer(buffer, dtype=torch.uint8), files, tuple(skipped))


def _listed(path: Path) -> list[Path]:
    try:
        if path.is_dir():
            return list(_below(path, frozenset()))
        if path.is_file():
            return [path]
        exists = path.exists()
    except OSError as error:
        raise Refused(_unreadable(path, error.strerror or "")) from None
    if exists:
        raise Refused(_unreadable(path, "it is neither a file nor a folder"))
    near = sorted(p.name for p in path.parent.iterdir())[:8] if path.parent.is_dir() else []
    raise Refused(
        Fault(
            "P108",
            f"there is no {str(path)!r}",
            law="the text is read before anything starts",
            cure=f"{str(path.parent)!r} holds {', '.join(near)}" if near else "the path of a text file or folder",
            at=AT,
        )
    )


def _below(folder: Path, without: Iterable[str]) -> Iterator[Path]:
    """Files below a folder in order of their paths; links to folders are not followed."""
    try:
        entries = sorted(folder.iterdir())
    except OSError as error:
        raise Refused(_unreadable(folder, error.strerror or "")) from None
    for entry in entries:
        if entry.name.startswith(".") or entry.name in without:
            continue
        if entry.is_dir():
            if not entry.is_symlink():
                yield from _below(entry, without)
        elif entry.is_file():
            yield entry


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise Refused(_unreadable(path, error.strerror or "")) from None


def _no_text(name: str, have: str, cure: str) -> Fault:
    return Fault("P110", f"{name!r} holds no text", have=have, law="training needs bytes to learn from", cure=cure, at=AT)


def _unreadable(path: Path, why: str) -> Fault:
    law, cure = "every file of the text is read before anything starts", "a text file you may read, or a folder of them"
    return Fault("P109", f"{str(path)!r} cannot be read", have=why, law=law, cure=cure, at=AT)
