"""Leaves a rank its stages of a module: what it holds, the mode its calls run under, and its part of the pipeline."""

from dataclasses import dataclass, replace

from torch import nn

from partita.program import Kind, Program
from partita.runtime.installing import hear_whole
from partita.runtime.net import Net
from partita.runtime.pipeline import Pipe
from partita.runtime.random import Stream
from partita.runtime.replay import Replay, Talk
from partita.runtime.stages import Staged, keep_stage, plain_script
from partita.runtime.steps import Script
from partita.runtime.subject import Subject
from partita.strategy import Pipelined


@dataclass(frozen=True)
class Own:
    """A rank's part of a pipeline, and the program of its role."""

    pipe: Pipe
    role: Program


def own_stages(  # noqa: PLR0913 - what a rank has when its module is cut
    net: Net,
    module: nn.Module,
    subject: Subject,
    program: Program,
    samples: int,
    strategy: Pipelined,
    replay: Replay | None,
    stream: Stream | None,
) -> Own:
    """Keep this rank's stages of a module.

    Args:
        net: Of the rank.
        module: Whole when it comes in; changed in place.
        subject: What is trained.
        program: Under the axes inside the pipeline.
        samples: What it was captured with.
        strategy: The pipeline.
        replay: Of a tensor axis, if one cuts the module.
        stream: Serves draws; None if nothing draws.
    """
    size = net.size(strategy.axis)
    stages, schedule = strategy.stages(program, size), strategy.schedule(size)
    role = strategy.cast(program, net.mesh)[net.coordinate[strategy.axis]]
    assert role.pipeline is not None, "a pipeline of several ranks gives each a role"
    staged = _staged(net, module, subject, samples, stages.starts[1:], replay, stream)
    keep_stage(module, {t.name for t in role.parameters() if t.kind == Kind.PARAMETER})
    owners = staged.owners([name for name, _ in module.named_buffers()])
    return Own(Pipe(net, module, staged, schedule, role.pipeline, stages.holders, owners), role)


def _staged(
    net: Net, module: nn.Module, subject: Subject, samples: int, starts: tuple[str, ...],
    replay: Replay | None, stream: Stream | None,
) -> Staged:  # fmt: skip
    """The mode that runs one stage at a time, over the calls of a tensor axis if there is one."""

    def script(of: Subject) -> Script:
        program, heard = hear_whole(of, samples)
        return plain_script(heard.calls, {t.id: t.name for t in program.parameters()})

    if replay is not None:
        talk, training, evaluation = replay.talk, replay.scripts[True], replay.evaluation
        assert evaluation is not None, "a replay that was installed can write the script of evaluation"
    else:
        talk, training = Talk(net), script(subject)
        evaluation = lambda: script(replace(subject, make=lambda: subject.make().eval()))
    return Staged(talk, training, module, evaluation, starts, subject.evaluate, stream)
