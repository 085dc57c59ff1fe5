"""A switch that adds up what workers send through it: in the kernel of a testbed (XDP), or in a thread behind a UDP socket.

    rank ── packets ──▶ switch ── sums ──▶ every rank        rules: protocol.py; bytes: packets.py; floats: blocks.py

`opened` sets one up beside forked ranks; each of them is a `Client` of it.
"""

from partita.runtime.switch.client import Address, Client
from partita.runtime.switch.faults import Faults
from partita.runtime.switch.opening import Opened, opened

__all__ = ["Address", "Client", "Faults", "Opened", "opened"]
