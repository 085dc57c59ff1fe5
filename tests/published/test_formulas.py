"""Published closed forms, as folds of captured Programs. Each row names its source; all are exact."""

import pytest

from partita.cluster import named
from partita.cost.memory import gradient_buffers, occupancy
from partita.mesh import Mesh
from partita.program.events import Phase
from partita.program.fold import unfold
from partita.runtime.programs import program_of
from partita.simulate import estimate, simulate, traffic
from partita.strategies.data.ddp import DDP
from partita.strategies.data.fsdp import FSDP
from partita.strategies.data.zero1 import Zero1
from partita.strategies.data.zero2 import Zero2
from partita.strategies.tensor.tensor_parallel import TensorParallel
from partita.strategy import compose
from partita.workload import GPT, Llama, Workload

L, D, T, B, V = 5, 320, 16, 8, 96  # blocks of more than 1 MiB on two ranks: buckets then close at their ends
GPT_WORK = Workload("gpt", GPT(L, D, 4, V, T), batch=B)
WORKS = {"gpt": GPT_WORK, "llama": Workload("llama", Llama(L, D, 4, 2, V, T, 832), batch=B)}


@pytest.fixture(scope="module")
def programs():
    return {name: program_of(work) for name, work in WORKS.items()}


@pytest.mark.published
def test_flop_of_a_step(programs):
    """Narayanan et al. 2021, arXiv:2104.04473, section 5.1: forward 24 B T d^2 + 4 B T^2 d a layer and 2 B T d V for the head;
    backward twice that, but 2.5 times for fused attention (Dao 2023, arXiv:2307.08691, section 4.1)."""
    layer, attention, head = 24 * B * T * D**2, 4 * B * T**2 * D, 2 * B * T * D * V
    assert programs["gpt"].flop() == 3 * (L * layer + head) + 3.5 * L * attention


@pytest.mark.published
@pytest.mark.parametrize("name", WORKS)
def test_six_flop_a_parameter_and_token(programs, name):
    """Kaplan et al. 2020, arXiv:2001.08361, section 2.1: 6 N T over the parameters that multiply, plus attention."""
    program = programs[name]
    n = sum(
        a.shape[0] * a.shape[1]
        for a in unfold(program).parameters()
        if len(a.shape) == 2 and not a.name.startswith(("tokens", "positions"))
    )
    assert program.flop() == 6 * n * B * T + 3.5 * L * 4 * B * T**2 * D


@pytest.mark.published
@pytest.mark.parametrize("name", WORKS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_four_all_reduces_a_layer(programs, name, ranks):
    """Shoeybi et al. 2019, arXiv:1909.08053, section 3: two all-reduces of b s h in forward and two in backward per layer."""
    if name == "llama" and ranks == 4:
        pytest.skip("two kv heads split over two ranks")
    said = TensorParallel().rewrite(programs[name], Mesh.of({"tp": ranks}))
    inside = [e for e in said.collectives() if "blocks." in e.module and e.nbytes == B * T * D * 4]
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        middle = [e for e in inside if e.phase == phase]
        assert len(middle) >= 2 * (L - 1)
    at_edges = [e for e in said.collectives() if "blocks." not in e.module and e.nbytes == B * T * D * 4]
    assert len(inside) + len(at_edges) == 4 * L + 2  # and one for the embedding, one behind the head
    assert all(e.op == "all_reduce" for e in (*inside, *at_edges))


@pytest.mark.published
def test_data_parallel_bytes(programs):
    """Patarasuk & Yuan 2009, doi:10.1016/j.jpdc.2008.09.002: a rank sends 2 (p-1)/p n; n = all gradients and 16 B of loss."""
    mesh, program = Mesh.of({"dp": 4}), programs["gpt"]
    (row,) = traffic(DDP().rewrite(program, mesh), named("8x8-h100"), mesh)
    gradients = sum(t.nbytes for t in unfold(program).parameters())
    assert row.bytes == gradients + 16
    assert row.backend_bytes == 2 * 3 / 4 * (gradients + 16)


@pytest.mark.law
@pytest.mark.parametrize("name", WORKS)
@pytest.mark.parametrize(
    ("mesh", "strategies"),
    [({}, ()), ({"dp": 2}, (DDP(),)), ({"tp": 2}, (TensorParallel(),)), ({"dp": 2, "tp": 2}, (TensorParallel(), DDP()))],
)
def test_every_fold_is_the_same_folded_and_flat(programs, name, mesh, strategies):
    mesh, work = Mesh.of(mesh), WORKS[name]
    folded, flat = programs[name], unfold(programs[name])
    assert any(s.count > 1 for s in folded.segments)
    for cluster in (named("8x8-h100"), named("cpu")):
        a, b = (estimate(compose(p, strategies, mesh), cluster, mesh, work) for p in (folded, flat))
        assert a.step_seconds == pytest.approx(b.step_seconds, rel=1e-12)
        assert a.exposed_communication_seconds == pytest.approx(b.exposed_communication_seconds, rel=1e-9, abs=1e-12)
        assert (a.peak, a.memory, a.flop, a.traffic) == (b.peak, b.memory, b.flop, b.traffic)


@pytest.mark.law
def test_depth_is_linear_in_time_and_memory(programs):
    """A layer more costs what the layer before it cost."""
    shallow, deep, deeper = (program_of(Workload("gpt", GPT(n, D, 4, V, T), batch=B)) for n in (4, 5, 6))
    cluster, mesh = named("8x8-h100"), Mesh()
    seconds = [simulate(p, cluster, mesh).seconds for p in (shallow, deep, deeper)]
    peaks = [occupancy(p).peak for p in (shallow, deep, deeper)]
    assert seconds[2] - seconds[1] == pytest.approx(seconds[1] - seconds[0])
    assert peaks[2] - peaks[1] == peaks[1] - peaks[0]


@pytest.mark.published
@pytest.mark.parametrize(
    ("kind", "parameters", "gradients", "state"), [(DDP, 1, 1, 1), (Zero1, 1, 1, 64), (Zero2, 1, 64, 64), (FSDP, 64, 64, 64)]
)
def test_model_states_of_mixed_precision_adam(kind, parameters, gradients, state):
    """Rajbhandari et al. 2020, arXiv:1910.02054, figure 1 (7.5 B parameters, 64 ranks, K = 12): bytes a parameter are
    2 + 2 + 12 of parameters, gradients and optimizer state, each divided by the ranks once its stage shares it out."""
    work = Workload("gpt", GPT(36, 4096, 32, 50304, 1024, tie_embeddings=True), batch=64, dtype="bfloat16", master="float32")
    program = program_of(work)
    n = sum(t.nbytes for t in unfold(program).parameters()) / 2
    said = compose(program, [kind()], Mesh.of({"dp": 64}))
    parts = occupancy(said).parts
    assert parts["parameters"] == pytest.approx(2 * n / parameters, rel=1e-3)
    assert parts["optimizer"] == pytest.approx(12 * n / state, rel=1e-3)
    flat = unfold(said)
    own = sum(flat.owned_bytes(p.id) for p in flat.parameters()) if kind is FSDP else gradient_buffers(flat)
    rows = 2 * n / 64 if kind is Zero1 else 0  # ours keeps room for a rank's rows of the sums beside the whole gradients
    assert own == pytest.approx(2 * n / gradients + rows, rel=1e-3)


@pytest.mark.published
@pytest.mark.parametrize("kind", [Zero1, Zero2, FSDP])
def test_volume_of_shared_states(programs, kind):
    """Rajbhandari et al. 2020, arXiv:1910.02054, section 7: sharing out state and gradients sends what data parallelism sends,
    2 n numbers a rank; sharing out parameters as well sends 3 n: a gather in forward, one in backward, a scatter."""
    program = programs["gpt"]
    n = sum(t.nbytes for t in unfold(program).parameters())
    root = sum(t.nbytes for t in unfold(program).parameters() if not t.name.startswith("blocks."))
    said = sum(c.nbytes for c in compose(program, [kind()], Mesh.of({"dp": 2})).collectives() if c.tensors and c.nbytes != 16)
    assert said == (3 * n - root if kind is FSDP else 2 * n)  # the root is gathered once
