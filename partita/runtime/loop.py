"""The training loop of one rank: batches in, steps, checkpoints and metrics on the way, and what was measured out.

    set-up    module · loss rule · strategies · optimizer · checkpoint       quiet traffic, part of no step
    step 1    warms up                                  step 2    the recorder listens (audit)
    step 3    peak memory is measured                   step 4..  timed

Every rank runs this; rank 0 writes metrics and files. The result is JSON; whole tensors go to a safetensors file.
"""

import hashlib
import os
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from partita.program import Program
from partita.runtime import metrics, saved
from partita.runtime.batch import Feed
from partita.runtime.checkpoint import Saver
from partita.runtime.evaluate import evaluate
from partita.runtime.marks import Mark
from partita.runtime.meter import Meter
from partita.runtime.net import Net
from partita.runtime.norm import global_norm
from partita.runtime.prepare import prepare
from partita.runtime.record import Recorder
from partita.runtime.schedule import Rate
from partita.runtime.step import Done
from partita.runtime.stopping import Stopping
from partita.runtime.subject import Subject
from partita.runtime.training import Training
from partita.runtime.wire import Wire
from partita.strategy import Strategy


def train_ranks(
    net: Net, subject: Subject, strategies: Sequence[Strategy], program: Program, training: Training
) -> dict[str, Any]:
    """Train on this rank; called by every rank of `run_ranks`.

    Args:
        net: This rank's network.
        subject: What is trained. Its batches may be a function or anything iterable.
        strategies: Innermost first.
        program: One global microbatch of the step on one device, flat.
        training: What to do.

    Returns:
        JSON: `first` (steps done before), `losses`, `seconds`, `norms`, `held_out` [[steps done, loss]], `ledger` (of one
        step), `ledger_changes` [[step, ledger]] where it differs from the step before, `heard`, `recorded` [[step, heard]],
        `digests` [[step, of the parameters after it]] of ranks of a relaxed axis, `period`, `wire_bytes` (per step, or null),
        `memory` {peak, resident}, `timeline` [[name, phase, start, end]] of the newest step, `interrupted`, `rank`, `pid`,
        `coordinate`, `rule`, `files` {kind: its name in `net.folder`}, `transient` (buffers in the state that are no part of
        a state dict), `tied` {name: the first name of the same parameter}, `checkpoints` [{step, bytes, waited_seconds,
        seconds}] (rank 0's).
    """
    run = _Run(net, subject, strategies, program, training)
    run.train()
    return run.result()


class _Run:
    def __init__(
        self, net: Net, subject: Subject, strategies: Sequence[Strategy], program: Program, training: Training
    ) -> None:
        self.net, self.training = net, training
        self.meter = Meter(net.device)
        self.wire = Wire(net.excluded, readable=net.backend == "gloo", datagrams=lambda: net.datagrams)
        net.notes.doing("building the model", slow=True)
        self.feed = subject.batches if isinstance(subject.batches, Feed) else Feed(subject.batches)
        self.subject = replace(subject, batches=self.feed)
        module = self.subject.make().to(net.device)
        self.step = prepare(net, self.subject, module, self.feed(0), strategies, program, training)
        self.site = self.step.site
        optimizer = self.site.optimizer()
        self.site.adopt(optimizer)
        self.optimizer = self.site.stepping(optimizer)
        self.rate = Rate(self.optimizer, training.schedule, training.warmup, training.horizon)
        self.first = self._filled()
        self.saver = Saver(net)
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.norms: list[float | None] = []
        self.held_out: list[tuple[int, float]] = []
        self.ledgers: list[tuple[int, list[Any]]] = []
        self.heard: list[Any] = []
        self.digests: list[tuple[int, str]] = []
        self.recorded: list[tuple[int, list[Any]]] = []
        self.interrupted = False
        self.timeline: list[Mark] = []

    def _filled(self) -> int:
        """Fill the model from where the run starts; returns the steps done before."""
        if self.training.resume:
            return saved.resume(self.site, self.optimizer, self.training.resume)
        if self.training.start:
            saved.start(self.site, self.training.start)
        return 0

    # ---- running
    def train(self) -> None:
        """All steps."""
        net, training = self.net, self.training
        stopping = Stopping(net)
        self._begin_metrics()
        self.wire.start()
        for step in range(self.first, training.steps):
            stopping.begin(step, failed=self.saver.failed)
            self._one(step)
            self.interrupted = stopping.after(step)
            last = step + 1 == training.steps or self.interrupted
            evaluates = training.held_out is not None and (last or _due(step, training.evaluate_every))
            saves = training.folder is not None and (last or _due(step, training.save_every))
            if evaluates or saves or last:
                self.wire.stop()
            self._evaluate(step) if evaluates else None
            self._metrics(step)
            self._save(step, last=last) if saves else None
            if last:
                break
            if evaluates or saves:
                self.wire.start()
        self.saver.wait()
        net.notes.doing("gathering results", slow=True)

    def _save(self, step: int, *, last: bool) -> None:
        assert self.training.folder is not None
        folder = self.training.folder / "checkpoints"
        saved.begin(self.saver, self.site, self.optimizer, folder, step + 1, copy=not last)

    def _evaluate(self, step: int) -> None:
        training = self.training
        assert training.held_out is not None
        self.net.notes.doing("the held-out loss", slow=True)
        loss = evaluate(self.site, self.step.rule, training.held_out, training.held_out_batches, training.microbatches)
        self.held_out.append((step + 1, loss))

    def _one(self, step: int) -> None:
        """One step, measured."""
        net, number = self.net, step - self.first
        net.notes.doing(f"reading the batch of step {step + 1}", slow=True)
        batch = self.feed(step)
        net.notes.doing(f"step {step + 1}")
        self.rate.set(step)
        run = min(3, self.training.steps - self.first)
        audit = step in self.training.record if self.training.record else self.training.audit and number == max(run - 2, 0)
        measured = number == run - 1
        recorder = Recorder(net.axes, self.site.module) if audit else None
        at = len(net.ledger)
        if audit or measured:
            self.saver.rest()
        if measured:
            self.meter.start()
        began = time.perf_counter()
        with recorder or nullcontext():
            done = self.step.run(batch, step, self.optimizer)
        self.seconds.append(time.perf_counter() - began)
        if not audit:
            self.timeline = self.step.marks.marks
        if measured:
            self.meter.stop()
            self.meter.release()
        if recorder is not None:
            self.heard = [[h.op, h.axis, h.nbytes, h.dtype, str(h.phase), h.module] for h in recorder.heard]
            self.recorded.append((step, self.heard))
            self.digests.append((step, digest(self.site.module) if self.site.exchange is not None else ""))
        self._note(step, done, at)

    def _note(self, step: int, done: Done, at: int) -> None:
        net = self.net
        net.notes.stepped()
        self.losses.append(done.loss)
        norm = done.norm
        if (
            norm is None and net.rank == 0 and not self.site.placements and not self.site.apart
        ):  # nothing is cut: it can be had without a message
            norm = float(global_norm(net, self.step.pieces, {}))
        self.norms.append(norm)
        sent = [e.json() for e in net.ledger[at:]]
        del net.ledger[at:]
        if not self.ledgers or self.ledgers[-1][1] != sent:
            self.ledgers.append((step, sent))
        self.optimizer.zero_grad(set_to_none=True) if self._more(step) else None

    def _more(self, step: int) -> bool:
        """Whether gradients may go: another step follows, or nobody asked for them."""
        return step + 1 < self.training.steps or "gradients" not in self.training.keep

    # ---- telling
    def _begin_metrics(self) -> None:
        pids = self.net.gather(os.getpid())
        if self.net.rank == 0 and self.training.folder is not None:
            mesh = dict(self.net.mesh.axes)
            head = {"ranks": self.net.ranks, "pids": pids, "from_step": self.first, "mesh": mesh}
            metrics.begin(self.training.folder, head)

    def _metrics(self, step: int) -> None:
        if self.net.rank:
            return
        loss = self.losses[-1]
        self.net.control.loss = loss
        self.net.control.done = step + 1
        if self.net.progress is not None:
            self.net.progress(step + 1, loss)
        if self.training.folder is not None:
            line = {"step": step + 1, "loss": loss, "seconds": self.seconds[-1], "gradient_norm": self.norms[-1]}
            if self.held_out and self.held_out[-1][0] == step + 1:
                line["held_out_loss"] = self.held_out[-1][1]
            metrics.add(self.training.folder, line)

    def result(self) -> dict[str, Any]:
        """What `train_ranks` returns."""
        net, steps = self.net, len(self.losses)
        files = saved.collect(self.site, self.optimizer, self.training.keep) if net.folder is not None else {}
        return {
            "rank": net.rank,
            "pid": os.getpid(),
            "coordinate": net.coordinate,
            "first": self.first,
            "losses": self.losses,
            "seconds": self.seconds,
            "norms": self.norms,
            "held_out": [list(h) for h in self.held_out],
            "ledger": self.ledgers[-1][1] if self.ledgers else [],
            "ledger_changes": [[step, sent] for step, sent in self.ledgers],
            "heard": self.heard,
            "recorded": [list(one) for one in self.recorded],
            "digests": [list(one) for one in self.digests],
            "period": self.site.program.period,
            "wire_bytes": self.wire.total / steps if self.wire.readable and steps else None,
            "memory": {"peak": self.meter.peak, "resident": self.meter.plain},
            "rule": {"kind": self.step.rule.kind, "nominal": self.step.rule.nominal},
            "timeline": [list(mark) for mark in self.timeline],
            "interrupted": self.interrupted,
            "note": net.switch.note if net.switch else None,
            "files": files,
            "transient": self.site.transient,
            "tied": self.site.tied,
            "checkpoints": [done.json() for done in self.saver.done],
        }


def digest(module: nn.Module) -> str:
    """Of the bits of all parameters: two modules have the same exactly when they are equal."""
    found = hashlib.sha256()
    for p in module.parameters():
        found.update(p.detach().reshape(-1).view(torch.uint8).cpu().numpy().tobytes())
    return found.hexdigest()


def _due(step: int, every: int | None) -> bool:
    return every is not None and (step + 1) % every == 0
