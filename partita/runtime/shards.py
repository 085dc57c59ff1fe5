"""One safetensors file: written in one pass and forced to disk, or mapped and read slice by slice.

    8 bytes     length of the header, little endian
    header      JSON: name -> dtype, shape, data_offsets; padded with spaces
    data        the tensors' bytes, widest elements first so that each is aligned

Nothing in such a file is ever executed. A header is checked before any of it is believed.
"""

import hashlib
import json
import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.complex64: "C64",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.bool: "BOOL",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
TYPES = {name: dtype for dtype, name in NAMES.items()}
ALIGN = 64  # bytes: where the data begins, a multiple of every element's width and of a cache line
CHUNK = 1 << 24  # bytes hashed and written at a time
LIMIT = 100 << 20  # bytes of the longest header believed; the format's own limit


class Malformed(Exception):
    """A file is not what it should be; the text says why."""


@dataclass(frozen=True, slots=True)
class Written:
    """A file on disk."""

    bytes: int
    sha256: str


def write(path: Path, tensors: Mapping[str, Tensor]) -> Written:
    """Write a new file and force it to disk.

    Raises:
        OSError: If the disk is full or the folder cannot be written.
    """
    order = sorted(tensors, key=lambda name: -tensors[name].element_size())
    head: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name in order:
        t = tensors[name]
        head[name] = {"dtype": NAMES[t.dtype], "shape": list(t.shape), "data_offsets": [at, at + t.nbytes]}
        at += t.nbytes
    text = json.dumps(head, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % ALIGN)
    digest, written = hashlib.sha256(), 0
    with path.open("xb") as file:
        for block in (struct.pack("<Q", len(text)) + text, *(_raw(tensors[name]) for name in order)):
            for start in range(0, len(block), CHUNK):
                digest.update(block[start : start + CHUNK])
                written += file.write(block[start : start + CHUNK])
        file.flush()
        os.fsync(file.fileno())
    return Written(written, digest.hexdigest())


def _raw(t: Tensor) -> memoryview:
    flat = t.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if t.numel() else memoryview(b"")


def digest_of(path: Path) -> str:
    """The file's sha256."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(folder: Path) -> None:
    """Force a folder's entries to disk."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class Shard:
    """A mapped file: only the pages that are read are loaded.

    Raises:
        Malformed: If the header is not that of a safetensors file of this length.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        size = path.stat().st_size
        with path.open("rb") as file:
            first = file.read(8)
            length = struct.unpack("<Q", first)[0] if len(first) == 8 else size
            if length > min(size - 8, LIMIT):
                raise Malformed("its header is longer than the file")
            try:
                head = json.loads(file.read(length))
            except (ValueError, RecursionError):
                raise Malformed("its header is not JSON") from None
        if not isinstance(head, dict):
            raise Malformed("its header is not a table")
        self._start, self._bytes = 8 + length, size
        self.entries = {name: self._entry(name, e) for name, e in head.items() if name != "__metadata__"}
        self._map: Tensor | None = None

    def _entry(self, name: str, entry: Any) -> tuple[torch.dtype, tuple[int, ...], int]:
        """(dtype, shape, byte where it starts)."""
        try:
            dtype, shape, (first, last) = TYPES[entry["dtype"]], tuple(entry["shape"]), entry["data_offsets"]
        except (KeyError, TypeError, ValueError):
            raise Malformed(f"its entry {name!r} is not one of dtype, shape and data_offsets") from None
        if not all(type(n) is int and n >= 0 for n in (*shape, first, last)):
            raise Malformed(f"its entry {name!r} has sizes that are no counts")
        if last - first != math.prod(shape) * dtype.itemsize or self._start + last > self._bytes:
            raise Malformed(f"its entry {name!r} does not fit its bytes")
        return dtype, shape, self._start + first

    def kind(self, name: str) -> tuple[torch.dtype, tuple[int, ...]] | None:
        """(dtype, shape) of an entry; None if there is no such entry."""
        return self.entries[name][:2] if name in self.entries else None

    def tensor(self, name: str) -> Tensor:
        """A read-only view of an entry; nothing is loaded yet."""
        dtype, shape, start = self.entries[name]
        if math.prod(shape) == 0:
            return torch.empty(shape, dtype=dtype)
        if self._map is None:
            self._map = torch.from_file(str(self.path), shared=False, size=self._bytes, dtype=torch.uint8)
        raw = self._map[start : start + math.prod(shape) * dtype.itemsize]
        if start % dtype.itemsize:  # another writer's file need not be aligned
            raw = raw.clone()
        return raw.view(dtype).view(shape)
