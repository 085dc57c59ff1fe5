"""A program cut by depth: where stages begin, what crosses, who holds what, and what cannot be cut."""

from dataclasses import replace

import pytest

from partita.errors import Refused
from partita.mesh import Mesh
from partita.program import Compute, Kind, Phase
from partita.program.fold import unfold
from partita.program.schedules import SCHEDULES, generate
from partita.program.stages import EVERYWHERE, cut, even
from partita.runtime.programs import program_of
from partita.strategies import DDP, GARDEN, Interleaved, OneFOneB, TensorParallel, ZeroBubble
from partita.strategy import compose_roles
from partita.workload import GPT, Llama, Workload

SIZES = {"layers": 6, "hidden": 32, "heads": 4, "vocab": 64, "sequence": 16}


def gpt(batch=4, **changes):
    return program_of(Workload("gpt", GPT(**{**SIZES, **changes}), batch=batch))


# ---------------------------------------------------------------- where stages begin
@pytest.mark.law
@pytest.mark.parametrize("layers", [5, 6, 30])
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_even_stages_hold_runs_of_blocks_as_alike_as_can_be(layers, stages):
    starts = even(gpt(layers=layers, vocab=64), stages, "memory")
    numbers = [int(s.removeprefix("blocks.")) for s in starts]
    sizes = [b - a for a, b in zip([0, *numbers], [*numbers, layers], strict=True)]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.law
def test_a_folded_program_is_cut_where_the_flat_one_is():
    program = gpt(layers=9)
    for stages in (2, 4):
        assert even(program, stages) == even(unfold(program), stages)


@pytest.mark.case
def test_a_heavy_head_takes_blocks_from_the_last_stage():
    light, heavy = even(gpt(vocab=8), 2), even(gpt(vocab=8192), 2)
    assert light == ("blocks.3",)
    assert int(heavy[0].removeprefix("blocks.")) > 3


# ---------------------------------------------------------------- what crosses
@pytest.mark.published
def test_one_activation_crosses_each_cut_and_its_gradient_comes_back():
    """Narayanan et al. 2021, arXiv:2104.04473, section 3.2: batch x sequence x hidden a microbatch and direction."""
    program = unfold(gpt())
    stages = cut(program, ("blocks.2", "blocks.4"))
    for crossing in stages.crossings:
        (value,) = crossing.forward
        assert program.tensors[value].shape == (4, 16, 32)
        assert crossing.backward == crossing.forward


@pytest.mark.law
def test_every_event_has_one_stage_or_runs_on_all():
    program = unfold(program_of(Workload("llama", Llama(**SIZES, kv_heads=2), batch=4)))
    stages = cut(program, ("blocks.2", "blocks.4"))
    seen = {}
    for event, stage in zip(program.events(), stages.of, strict=True):
        assert stage in (EVERYWHERE, 0, 1, 2)
        if stage != EVERYWHERE and isinstance(event, Compute) and event.module.startswith("blocks."):
            seen.setdefault(event.module, set()).add(stage)
    assert all(len(where) == 1 for where in seen.values())  # forward and backward of a module are on one stage


@pytest.mark.case
def test_a_tied_embedding_has_two_holders():
    stages = cut(unfold(gpt(tie_embeddings=True)), ("blocks.3",))
    assert stages.holders["tokens.weight"] == (0, 1)
    assert stages.holders["blocks.3.mlp.up.weight"] == (1,)


# ---------------------------------------------------------------- roles
@pytest.mark.law
@pytest.mark.parametrize("name", SCHEDULES)
def test_roles_together_compute_what_one_device_computes(name):
    flat = replace(unfold(gpt()), microbatches=4)
    strategy = _strategy(name)
    roles = compose_roles(flat, [strategy], Mesh.of({"pp": 2}))
    assert sum(r.flop() for r in roles) == flat.flop()
    names = sorted(t.name for r in roles for t in r.parameters())
    assert names == sorted(t.name for t in flat.parameters())
    assert sum(len(r.gradients) for r in roles) == len(flat.gradients)
    state = [sum(r.local_bytes(t.id) for t in r.tensors if t.kind == Kind.OPTIMIZER) for r in (*roles, flat)]
    assert sum(state[:-1]) == state[-1]


@pytest.mark.law
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_message_that_is_sent_is_received_in_the_same_order(name):
    flat = replace(unfold(gpt(tie_embeddings=True)), microbatches=8)
    roles = compose_roles(flat, [_strategy(name, 8)], Mesh.of({"pp": 2}))
    one, two = ([(c.op, c.nbytes) for c in r.collectives() if c.op in ("send", "receive")] for r in roles)
    for mine, theirs in ((one, two), (two, one)):
        sent, received = ([n for op, n in some if op == what] for some, what in ((mine, "send"), (theirs, "receive")))
        assert sent == received
        assert len(sent) > 8


@pytest.mark.law
@pytest.mark.parametrize("virtual", [1, 2, 3])
def test_a_rank_sends_one_activation_a_cut_and_microbatch(virtual):
    """A rank sends forward over each of its cuts, and back over each: virtual times as much as one stage a rank."""
    flat = replace(unfold(gpt()), microbatches=4)
    strategy = Interleaved(microbatches=4, virtual=virtual) if virtual > 1 else OneFOneB(microbatches=4)
    roles = compose_roles(flat, [strategy], Mesh.of({"pp": 2}))
    sent = sum(c.nbytes for r in roles for c in r.collectives() if c.op == "send")
    assert sent == 2 * 4 * (2 * virtual - 1) * (4 * 16 * 32 * 4)


@pytest.mark.law
def test_buckets_of_a_data_axis_are_of_the_parameters_a_rank_holds():
    flat = unfold(gpt())
    mesh = Mesh.of({"dp": 2, "pp": 2})
    roles = compose_roles(replace(flat, microbatches=2), [DDP(), OneFOneB(microbatches=2)], mesh)
    for role in roles:
        reduced = sum(c.nbytes for c in role.collectives() if c.axis == "dp" and c.dtype == "float32")
        assert reduced == sum(role.local_bytes(g) for g in role.gradients.values())


@pytest.mark.law
def test_a_split_backward_keeps_the_calls_of_the_tensor_axis_with_the_input():
    mesh = Mesh.of({"pp": 2, "tp": 2})
    roles = compose_roles(replace(unfold(gpt()), microbatches=2), [TensorParallel(), ZeroBubble(microbatches=2)], mesh)
    parts = {s.part: s.events for s in roles[1].segments}
    assert not any(e.phase == Phase.BACKWARD and not isinstance(e, Compute) for e in parts["1W"])
    assert sum(isinstance(e, Compute) and e.flop > 0 for e in parts["1W"]) > 0


def _strategy(name, microbatches=4):
    return GARDEN[name](microbatches=microbatches)


# ---------------------------------------------------------------- refusals
@pytest.mark.case
@pytest.mark.parametrize(
    ("starts", "words"),
    [
        (("blocks.9",), ["no stage can begin with 'blocks.9'"]),
        (("blocks.4", "blocks.2"), ["out of order"]),
        (("nope", "neither"), ["'nope'", "'neither'"]),
    ],
)
def test_what_cannot_be_cut_is_refused_all_faults_at_once(starts, words):
    with pytest.raises(Refused) as refused:
        cut(unfold(gpt()), starts)
    assert all(f.code == "P121" for f in refused.value.faults)
    assert all(word in str(refused.value) for word in words)


@pytest.mark.case
def test_more_stages_than_blocks_are_refused_with_the_number_there_are():
    with pytest.raises(Refused, match="6 blocks") as refused:
        even(gpt(), 7)
    assert "6 stages or fewer" in refused.value.faults[0].cure


@pytest.mark.law
@pytest.mark.parametrize("name", SCHEDULES)
def test_fewer_microbatches_than_ranks_are_refused_with_the_law_and_the_cure(name):
    strategy = _strategy(name, 3)
    (fault, *_) = strategy.check(gpt(layers=8), Mesh.of({"pp": 4}))
    assert fault.code == "P112"
    assert f"microbatches = {4 * SCHEDULES[name].least} or more" in fault.cure
    assert fault.at.endswith(".microbatches")


@pytest.mark.law
def test_the_schedule_of_a_role_is_the_generator_s():
    strategy = OneFOneB(microbatches=4)
    roles = compose_roles(replace(unfold(gpt()), microbatches=4), [strategy], Mesh.of({"pp": 2}))
    schedule = generate("one_f_one_b", 2, 4)
    for role, order in zip(roles, schedule.order, strict=True):
        assert role.pipeline is not None
        passes = [f"{t.part}{t.microbatch}" for t in role.pipeline.turns if not t.part.endswith(("_F", "_B"))]
        assert passes == list(map(str, order))
