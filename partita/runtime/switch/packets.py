"""Packets as bytes: a header of 32, then the lanes of the form; 64 bytes in the small form, 1056 in the pool form.

    cookie u32 · seq u32 · kind u8 · worker u8 · job u16 · lanes u16 · attempt u16 · mask u32 · 12 unused      little-endian

The cookie is drawn anew by every switch: what another one, or a stranger, has sent is told apart and dropped.
"""

import struct
from typing import NamedTuple

import numpy as np

from partita.runtime.switch.protocol import DATA, FREE, MAX, POOL, RESULT, SMALL, WAIT, Form, Packet

PORT = 9999  # inside a testbed; on the loopback any free one
HEADER = struct.Struct("<IIBBHHHI12x")
FORMS = {form.lanes: form for form in (SMALL, POOL)}
KINDS = frozenset({*range(DATA, MAX + 1), RESULT, FREE, WAIT})


class Line(NamedTuple):
    """What tells one group of workers and its switch from all others."""

    cookie: int
    job: int


def size_of(form: Form) -> int:
    """Bytes of a packet, without the headers of UDP and below."""
    return HEADER.size + 4 * form.lanes


def to_bytes(packet: Packet, form: Form, line: Line) -> bytes:
    """The packet as it goes onto the link."""
    head = HEADER.pack(
        line.cookie, packet.seq, packet.kind, packet.worker, line.job, form.lanes, packet.attempt & 0xFFFF, packet.mask
    )
    return head + (bytes(4 * form.lanes) if packet.values is None else packet.values.tobytes())


def from_bytes(raw: bytes) -> tuple[Line, Form, Packet] | None:
    """What was received; None if it is no packet of ours."""
    if len(raw) < HEADER.size:
        return None
    cookie, seq, kind, worker, job, lanes, attempt, mask = HEADER.unpack_from(raw)
    form = FORMS.get(lanes)
    if form is None or kind not in KINDS or len(raw) != size_of(form):
        return None
    values = np.frombuffer(raw, np.int32, lanes, HEADER.size)
    return Line(cookie, job), form, Packet(kind, seq, worker, values, attempt, mask)
