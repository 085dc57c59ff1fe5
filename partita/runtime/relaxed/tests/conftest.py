"""Workers of a relaxed axis as threads of one process, on a network that is a barrier and a table."""

import copy
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn


class Table:
    """What the workers lay down for each other, call by call."""

    def __init__(self, ranks):
        self.ranks, self.barrier, self.slots = ranks, threading.Barrier(ranks, timeout=60), [None] * ranks

    def all(self, rank, value):
        self.slots[rank] = value.clone()
        self.barrier.wait()
        found = [v.clone() for v in self.slots]
        self.barrier.wait()
        return found


@dataclass
class Threads:
    """One worker's network."""

    table: Table
    rank: int
    ledger: list = field(default_factory=list)
    hushed: bool = False
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def coordinate(self):
        return {"dp": self.rank}

    def size(self, axis):
        return self.table.ranks

    @contextmanager
    def quiet(self):
        before, self.hushed = self.hushed, True
        yield
        self.hushed = before

    def _note(self, op, t, label):
        if not self.hushed:
            self.ledger.append((op, t.nbytes, str(t.dtype).removeprefix("torch."), label))

    def all_reduce(self, t, axis, *, op="sum", label="", overlapped=False):
        self._note("all_reduce", t, label)
        rows = self.table.all(self.rank, t)
        total = rows[0]
        for row in rows[1:]:
            total = total + row if op == "sum" else torch.maximum(total, row)
        t.copy_(total)
        return Done() if overlapped else None

    def all_gather_into(self, out, mine, axis, *, label="", overlapped=False):
        self._note("all_gather", out, label)
        out.copy_(torch.cat([row.reshape(-1) for row in self.table.all(self.rank, mine)]))

    def all_to_all_into(self, out, sent, axis, *, label=""):
        self._note("all_to_all", sent, label)
        rows = [row.reshape(self.table.ranks, -1)[self.rank] for row in self.table.all(self.rank, sent)]
        out.copy_(torch.cat(rows).view(out.shape))


class Done:
    done = True

    def wait(self):
        pass


@dataclass
class Worker:
    """A rank: its module, exchange, optimizer and network."""

    module: nn.Module
    exchange: object
    optimizer: torch.optim.Optimizer
    net: Threads

    @property
    def flat(self):
        return torch.cat([lane.flat[: lane.size] for lane in self.exchange.lanes])

    def step(self, number):
        """Random gradients, the same for the same worker and step."""
        g = torch.Generator().manual_seed(1000 * number + self.net.rank)
        for p in self.module.parameters():
            p.grad = torch.randn(p.shape, generator=g, dtype=p.dtype) / self.net.table.ranks
        self.exchange.begin(number)
        self.exchange.gradients()
        self.optimizer.step()
        self.exchange.parameters()
        self.optimizer.zero_grad()


SGD = lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9)
ADAMW = lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1)


def _run(threads):
    for t in threads:
        t.start()
    for t in threads:
        t.join()


@pytest.fixture
def together():
    """together(exchange_of, steps, ...) -> the workers after their steps; `each(worker, step)` is called after every one."""

    def run(exchange_of, steps, *, ranks=4, optimizer=SGD, each=None, dtype=torch.float64, sizes=(7, 13)):
        table, workers, errors = Table(ranks), [None] * ranks, []
        torch.manual_seed(0)
        first = nn.Sequential(nn.Linear(*sizes), nn.Linear(sizes[1], 3)).to(dtype)
        made = [copy.deepcopy(first) for _ in range(ranks)]

        def work(rank):
            try:
                net = Threads(table, rank)
                exchange = exchange_of(net, dict(made[rank].named_parameters()))
                stepped = exchange.pieces or dict(made[rank].named_parameters())
                workers[rank] = Worker(made[rank], exchange, optimizer(list(stepped.values())), net)
                exchange.optimizer = workers[rank].optimizer
                for k in range(steps):
                    workers[rank].step(k)
                    if each is not None:
                        each(workers[rank], k)
            except Exception as error:
                errors.append(error)
                table.barrier.abort()

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(ranks)]
        _run(threads)
        own = [error for error in errors if not isinstance(error, threading.BrokenBarrierError)]
        if own:
            raise own[0]
        return workers

    return run
