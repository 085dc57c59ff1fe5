"""Roles of one kind said once: every figure is that of all roles said one by one."""

import pytest

from partita.cluster import cluster_of
from partita.mesh import Mesh
from partita.runtime.programs import program_of
from partita.simulate import predict
from partita.strategies import GARDEN, OwnSchedule
from partita.strategy import TextFile, check, compose_roles
from partita.workload import GPT, Llama, Workload

CLUSTER = cluster_of("8x8-h100")
GPT_30 = Workload("gpt", GPT(layers=30, hidden=64, heads=4, sequence=32, tie_embeddings=True, dropout=0.1), 64, 8, clip=1.0)
LLAMA_13 = Workload("llama", Llama(layers=13, hidden=64, heads=4, kv_heads=2, sequence=32), 128, 8)
THREE = "".join(",".join(f"{s}{p}{k}" for p in "FB" for k in range(8)) + "\n" for s in range(4))


def both(workload, mesh, strategies):
    """Figures with every role of its own, and with roles of one kind said once; and how many were said."""
    mesh, program = Mesh.of(mesh), program_of(workload)
    assert check(program, strategies, mesh) == []
    ways = [compose_roles(program, strategies, mesh, alike=alike) for alike in (False, True)]
    kinds = len({id(role.tensors) for role in ways[1]})
    for one, other in zip(*ways, strict=True):
        assert one.pipeline == other.pipeline
        assert [(c.op, c.axis, c.nbytes, c.dtype) for c in one.collectives()] == [
            (c.op, c.axis, c.nbytes, c.dtype) for c in other.collectives()
        ]
    return *(predict(roles, CLUSTER, mesh, workload) for roles in ways), kinds


def same(one, other):
    for name in ("step_seconds", "flop", "bubble_fraction", "exposed_communication_seconds"):
        assert getattr(one, name) == pytest.approx(getattr(other, name), rel=1e-12), name
    for name in ("peak", "peak_at", "memory", "traffic", "opaque_share"):
        assert getattr(one, name) == getattr(other, name), name


@pytest.mark.law
@pytest.mark.parametrize("name", ["gpipe", "one_f_one_b", "interleaved", "looped_bfs", "zero_bubble", "zbv", "dualpipev"])
def test_every_figure_is_that_of_roles_said_one_by_one(name):
    plain, shared, kinds = both(GPT_30, {"pp": 4}, [GARDEN[name](microbatches=8)])
    same(plain, shared)
    assert kinds == 3


@pytest.mark.law
def test_inside_data_and_tensor_axes():
    inside = [GARDEN["tensor_parallel"](), GARDEN["ddp"]()]
    plain, shared, kinds = both(LLAMA_13, {"pp": 4, "dp": 2, "tp": 2}, [*inside, GARDEN["zbv"](microbatches=8)])
    same(plain, shared)
    assert kinds == 4  # stages of 1 or 2 blocks


@pytest.mark.law
@pytest.mark.parametrize(
    ("name", "settings"), [("zero1", {}), ("zero2", {}), ("fsdp", {}), ("fsdp", {"reshard": False})], ids=str
)
@pytest.mark.parametrize("schedule", ["one_f_one_b", pytest.param("zbv", marks=pytest.mark.slow)])
def test_with_rows_shared_out_within_stages(name, settings, schedule):
    plain, shared, _ = both(LLAMA_13, {"pp": 4, "dp": 2}, [GARDEN[name](**settings), GARDEN[schedule](microbatches=8)])
    same(plain, shared)


@pytest.mark.law
@pytest.mark.parametrize("policy", ["block", "selective"])
def test_with_blocks_that_are_computed_again(policy):
    plain, shared, kinds = both(GPT_30, {"pp": 4}, [GARDEN["recompute"](policy=policy), GARDEN["one_f_one_b"](microbatches=8)])
    same(plain, shared)
    assert kinds == 3  # 7, 8, 8 and 7 blocks


@pytest.mark.law
def test_a_schedule_of_ones_own_and_cut_points():
    own = OwnSchedule(file=TextFile(THREE), microbatches=8, cut=("blocks.4", "blocks.8", "blocks.12"))
    plain, shared, kinds = both(GPT_30, {"pp": 4}, [own])
    same(plain, shared)
    assert kinds == 3


@pytest.mark.case
def test_stages_that_are_no_runs_of_blocks_are_said_one_by_one():
    own = GARDEN["one_f_one_b"](microbatches=8, cut=("blocks.4.mlp", "blocks.8", "blocks.12"))
    plain, shared, kinds = both(GPT_30, {"pp": 4}, [own])
    same(plain, shared)
    assert kinds == 4


@pytest.mark.law
def test_a_deep_pipeline_is_said_from_few_blocks():
    program = program_of(Workload("gpt", GPT(layers=96, hidden=32, heads=2, sequence=8), 64, 32))
    roles = compose_roles(program, [GARDEN["one_f_one_b"](microbatches=32)], Mesh.of({"pp": 32}), alike=True)
    assert len(roles) == 32
    assert len({id(role.tensors) for role in roles}) == 3
