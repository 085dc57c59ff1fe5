"""Ctrl-C, and a checkpoint that failed, between ranks: all stop after the same step, and no step carries a message for it.

    rank 0, before step N      asked to stop?  ->  "N is the last"
    the others, after step N   rank 0 has started N for sure (or is waited for)  ->  was N the last?

Forked ranks read it in shared memory, ranks of torchrun in the store.
"""

import time

from partita.runtime.net import Net

KEY = "partita/last"


class Stopping:
    """One rank's view of whether to go on."""

    def __init__(self, net: Net) -> None:
        self.net, self.control = net, net.control
        self.control.listening = 1

    def begin(self, step: int, *, failed: bool = False) -> None:
        """Before step number `step`; `failed`: rank 0 has seen a checkpoint fail, and this step is the last."""
        if self.net.rank:
            return
        if (self.control.interrupted or failed) and not self.control.last:
            self.control.last = step + 1
            if not self.net.forked and self.net.store is not None:
                self.net.store.set(KEY, str(step + 1))
        self.control.started = step + 1

    def after(self, step: int) -> bool:
        """After step number `step`: whether it was the last."""
        if self.net.rank and self.net.forked:
            while self.control.started <= step:  # only where a step sends nothing along some axis
                time.sleep(0.001)
        elif self.net.rank and self.net.store is not None and self.net.store.check([KEY]):
            self.control.last = int(self.net.store.get(KEY))
        return 0 < self.control.last <= step + 1
