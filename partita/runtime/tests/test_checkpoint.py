"""Checkpoints: bit-equal under any other split, whole or not at all, and nothing believed that is not what was written."""

import hashlib
import io
import itertools
import json
import os
import pickle
import resource
import signal
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from partita.errors import RankLost, Refused, RunFailed
from partita.mesh import Mesh
from partita.runtime import index, saving
from partita.runtime.boxes import Box, crossing, gap, parts, spans
from partita.runtime.checkpoint import check, latest, load, peek, read_whole, save, steps
from partita.runtime.net import Net
from partita.runtime.ranks import run_ranks

ALONE = Mesh()


def whole():
    """A small model, its optimizer state and everything awkward."""
    g = torch.Generator().manual_seed(1)
    t = {
        "blocks.0.qkv.weight": torch.randn(12, 4, generator=g),
        "blocks.0.out.weight": torch.randn(4, 8, generator=g).to(torch.bfloat16),
        "grid": torch.randn(4, 8, generator=g, dtype=torch.float64),
        "norm.weight": torch.randn(5, generator=g),
        "batches": torch.tensor(7),
        "mask": torch.tensor([True, False, True]),
        "empty": torch.zeros(0, 3),
        "half": torch.randn(3, generator=g).half(),
    }
    return t | {
        "optimizer/blocks.0.qkv.weight/exp_avg": torch.randn(12, 4, generator=g),
        "optimizer/norm.weight/step": torch.tensor(3.0),
    }


CUTS = {
    "blocks.0.qkv.weight": (0, 3),
    "optimizer/blocks.0.qkv.weight/exp_avg": (0, 3),
    "blocks.0.out.weight": (1, 1),
    "grid": (1, 1),
}


def placement(name, size, at):
    """Each of the `summands` blocks of the dim is divided among the ranks of tp."""
    if name not in CUTS or size == 1:
        return []
    dim, summands = CUTS[name]
    n = whole()[name].shape[dim]
    block, mine = n // summands, n // summands // size
    return [("tp", dim, tuple((s * block + at * mine, mine) for s in range(summands)))]


def placed(net):
    found = {name: placement(name, net.size("tp"), net.coordinate.get("tp", 0)) for name in whole()}
    if net.size("row") > 1:
        n = 4 // net.size("row")
        found["grid"] = [*found["grid"], ("row", 0, ((net.coordinate["row"] * n, n),))]
    return found


def cut(t, placement):
    for at in spans_index(t, placement):
        t = t.index_select(*at)
    return t


def spans_index(t, placement):
    for dim in {d for _, d, _ in placement}:
        kept = set(range(t.shape[dim]))
        for _, at, ranges in placement:
            if at == dim:
                kept &= {i for s, n in ranges for i in range(s, s + n)}
        yield dim, torch.tensor(sorted(kept))


def mine(net):
    return {name: cut(t, placed(net)[name]).clone() for name, t in whole().items()}


def work_save(net, folder, step, keep=2):
    tensors, placements = mine(net), placed(net)
    tensors[f"rng/rank-{net.rank}"] = torch.full((4,), net.rank, dtype=torch.uint8)
    tensors["head.weight"] = tensors["norm.weight"]  # tied
    assert save(folder, step, tensors, placements, net, {"step": step, "rate": 1e-3}, keep=keep) == folder / f"step-{step}"


def work_load(net, folder):
    want = mine(net)
    empty = {name: torch.full_like(t, 1) for name, t in want.items()}
    empty["head.weight"] = torch.zeros_like(want["norm.weight"])
    extra = load(folder, {name: (t, placed(net).get(name, ())) for name, t in empty.items()}, net, spare=("rng/",))
    assert extra["rate"] == 1e-3
    return all(torch.equal(empty[name], t) for name, t in want.items()) and torch.equal(
        empty["head.weight"], want["norm.weight"]
    )


def saved(folder, step=1, **how):
    work_save(Net(ALONE, 0), folder, step, **how)
    return folder / f"step-{step}"


# ---------------------------------------------------------------- boxes
@pytest.mark.law
@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.lists(st.integers(1, 3), min_size=1, max_size=3))
def test_parts_tile_the_whole_and_agree_with_plain_indexing(sizes, summands):
    shape = tuple(2 * s * n for s, n in zip(sizes, summands, strict=False))
    full = torch.arange(torch.Size(shape).numel()).view(shape)
    boxes = []
    for coordinate in itertools.product(range(2), repeat=len(shape)):
        cuts = [
            ("a", d, tuple((k * 2 * s + c * s, s) for k in range(n)))
            for d, (c, s, n) in enumerate(zip(coordinate, sizes, summands, strict=False))
        ]
        part = cut(full, cuts)
        for box, local in parts(spans(part.shape, cuts)):
            assert torch.equal(full[box.index], part[local.index])
            boxes.append(box)
    assert gap(boxes, shape) == ""
    assert gap(boxes[1:], shape) != ""
    assert gap([*boxes, boxes[0]], shape) != ""
    assert gap(boxes, (shape[0] + 1, *shape[1:])) != ""


@pytest.mark.case
def test_cuts_of_one_dim_by_two_axes_intersect():
    found = spans((2, 5), [("a", 0, ((0, 4),)), ("b", 0, ((2, 2), (6, 2)))])
    assert found == [[(2, 2)], [(0, 5)]]
    assert crossing(Box((0, 0), (2, 2)), Box((1, 1), (3, 3))) == Box((1, 1), (1, 1))
    assert crossing(Box((0, 0), (2, 2)), Box((2, 0), (3, 3))) is None


# ---------------------------------------------------------------- every split to every other
@pytest.mark.gloo
@pytest.mark.parametrize("source", [{"dp": 2, "tp": 2}, {"tp": 2}, {"row": 2, "tp": 2}, {}], ids=str)
def test_any_split_opens_under_any_other_bit_for_bit(source, tmp_path):
    run_ranks(Mesh.of(source), partial(work_save, folder=tmp_path, step=3))
    tensors, extra = read_whole(tmp_path)
    assert extra == {"step": 3, "rate": 1e-3}
    assert all(torch.equal(tensors[name], t) and tensors[name].dtype == t.dtype for name, t in whole().items())
    assert tensors["head.weight"] is tensors["norm.weight"]
    assert [name for name in tensors if name.startswith("rng/")] == [f"rng/rank-{r}" for r in range(Mesh.of(source).ranks)]
    for target in ({}, {"tp": 4}, {"tp": 2, "dp": 1}, {"row": 2}):
        assert all(run_ranks(Mesh.of(target), partial(work_load, folder=tmp_path)))


@pytest.mark.gloo
def test_a_replicated_block_is_written_once_and_ranks_share_the_writing(tmp_path):
    run_ranks(Mesh.of({"dp": 2}), partial(work_save, folder=tmp_path, step=3))
    found = peek(tmp_path)
    assert all(len(s.pieces) == 1 for name, s in found.tensors.items() if name != "empty")
    assert found.aliases == {"head.weight": "norm.weight"}
    sizes = [size for size, _ in found.files.values()]
    assert len(sizes) == 2
    assert sum(sizes) < 2 * sum(t.nbytes for t in whole().values()) + 3000


def test_another_reader_opens_the_files(tmp_path):
    with safe_open(saved(tmp_path) / "rank-0.safetensors", "pt") as file:
        assert torch.equal(file.get_tensor("grid"), whole()["grid"])
        assert torch.equal(file.get_tensor("blocks.0.out.weight"), whole()["blocks.0.out.weight"])


# ---------------------------------------------------------------- whole or not at all
def test_the_newest_stay_and_none_is_overwritten(tmp_path):
    (tmp_path / "step-2.partial").mkdir()
    (tmp_path / "step-7").mkdir()  # somebody's own folder, no checkpoint
    for step in (9, 10, 11, 100):
        saved(tmp_path, step)
    assert steps(tmp_path) == [11, 100]
    assert latest(tmp_path).name == "step-100"
    assert sorted(d.name for d in tmp_path.iterdir()) == ["step-100", "step-11", "step-7"]
    with pytest.raises(Refused, match="P113"):
        saved(tmp_path, 100)
    saved(tmp_path, 5)  # resumed from an older one: what was just written stays
    assert 5 in steps(tmp_path)


def work_die(net, folder, at):
    if net.rank == 0:
        setattr(saving, at, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    work_save(net, folder, 2)


@pytest.mark.gloo
@pytest.mark.parametrize(("at", "left"), [("write_index", [1]), ("commit", [1]), ("prune", [1, 2])])
def test_a_rank_killed_at_any_moment_leaves_a_readable_checkpoint(at, left, tmp_path):
    saved(tmp_path, 1)
    with pytest.raises(RankLost, match="rank 0"):
        run_ranks(Mesh.of({"dp": 2}), partial(work_die, folder=tmp_path, at=at))
    assert steps(tmp_path) == left
    assert all(not check(tmp_path / f"step-{s}") for s in left)
    assert run_ranks(Mesh.of({"tp": 2}), partial(work_load, folder=tmp_path)) == [True, True]
    run_ranks(Mesh.of({"dp": 2}), partial(work_save, folder=tmp_path, step=3))
    assert steps(tmp_path)[-1] == 3
    assert not list(tmp_path.glob("*.partial"))


def work_full(net, folder):
    if net.rank == 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (200, 200))
    try:
        work_save(net, folder, 2)
    except RunFailed as failed:
        return str(failed)
    return ""


@pytest.mark.gloo
def test_a_full_disk_ends_every_rank_with_the_checkpoint_to_resume_from(tmp_path):
    saved(tmp_path, 1)
    told = run_ranks(Mesh.of({"dp": 2}), partial(work_full, folder=tmp_path))
    assert told[0] == told[1]
    assert f"into {str(tmp_path)!r}: rank 1: File too large" in told[0]
    assert f"resume from {str(tmp_path / 'step-1')!r}" in told[0]
    assert [d.name for d in tmp_path.iterdir()] == ["step-1"]


def test_a_folder_that_cannot_be_made_fails_the_run(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFailed, match="no earlier checkpoint"):
        saved(tmp_path / "file")


def test_no_checkpoint_is_said(tmp_path):
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(Refused, match="P108"):
            latest(folder)


# ---------------------------------------------------------------- what is refused
def edited(folder, edit):
    """Change the index and seal it again, as somebody who means harm would."""
    table = json.loads((folder / "index.json").read_text())
    del table["sha256"]
    edit(table)
    (folder / "index.json").write_text(json.dumps({**table, "sha256": index.sealed(table)}))


def renamed(name):
    def edit(table):
        table["files"][name] = table["files"].pop("rank-0.safetensors")
        for t in table["tensors"].values():
            for p in t["pieces"]:
                p["file"] = name

    return edit


def piece(table, name="grid"):
    return table["tensors"][name]["pieces"]


def wrong_byte(file):
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)


class Bomb:
    """A pickle that leaves a trace if anybody loads it."""

    def __reduce__(self):
        return os.mkdir, ("executed",)


def replaced(folder, raw):
    """Another file in the place of a shard, with an index that vouches for it."""
    (folder / "rank-0.safetensors").write_bytes(raw)
    size, digest = len(raw), hashlib.sha256(raw).hexdigest()
    edited(folder, lambda table: table["files"].update({"rank-0.safetensors": [size, digest]}))


def archive():
    file = io.BytesIO()
    torch.save(Bomb(), file)
    return file.getvalue()


def of_another(folder):
    """The index of another model's checkpoint."""
    tensors = {"other.weight": torch.ones(3, 3)}
    save(folder.parent / "another", 2, tensors, {}, Net(ALONE, 0), {})
    (folder / "index.json").write_bytes((folder.parent / "another/step-2/index.json").read_bytes())


DAMAGE = {
    "pickle": (lambda d: replaced(d, pickle.dumps(Bomb())), "'rank-0.safetensors' cannot be read"),
    "pickle in torch's archive": (lambda d: replaced(d, archive()), "'rank-0.safetensors' cannot be read"),
    "index of another model": (of_another, "'rank-0.safetensors' is longer than what was written"),
    "no index": (lambda d: (d / "index.json").write_bytes(b""), "index.json cannot be read"),
    "truncated": (lambda d: os.truncate(d / "rank-0.safetensors", 100), "'rank-0.safetensors' is truncated"),
    "longer": (lambda d: os.truncate(d / "rank-0.safetensors", 1 << 20), "longer than what was written"),
    "altered": (lambda d: wrong_byte(d / "rank-0.safetensors"), "'rank-0.safetensors' was altered"),
    "missing file": (lambda d: (d / "rank-0.safetensors").unlink(), "'rank-0.safetensors' cannot be read"),
    "index altered": (
        lambda d: (d / "index.json").write_text((d / "index.json").read_text().replace('"step": 2', '"step": 4')),
        "altered",
    ),
    "index no JSON": (lambda d: (d / "index.json").write_bytes(pickle.dumps({})), "index.json cannot be read"),
    "index deep": (lambda d: (d / "index.json").write_text("[" * 100_000), "index.json cannot be read"),
    "index a list": (lambda d: (d / "index.json").write_text("[1]"), "index.json cannot be read"),
    "another format": (lambda d: edited(d, lambda t: t.update(format=2)), "unknown format"),
    "no tensors": (lambda d: edited(d, lambda t: t.pop("tensors")), "malformed"),
    "negative": (lambda d: edited(d, lambda t: piece(t)[0]["offset"].__setitem__(0, -1)), "malformed"),
    "absolute": (lambda d: edited(d, renamed(str(d / "rank-0.safetensors"))), "is not in its folder"),
    "parent": (lambda d: edited(d, renamed("../step-1/rank-0.safetensors")), "is not in its folder"),
    "separator": (lambda d: edited(d, renamed("a\\b")), "is not in its folder"),
    "missing piece": (lambda d: edited(d, lambda t: piece(t).pop()), "tensor 'grid' is not whole"),
    "held twice": (lambda d: edited(d, lambda t: piece(t).append(piece(t)[0])), "tensor 'grid' is not whole"),
    "other shape": (lambda d: edited(d, lambda t: t["tensors"]["grid"].update(shape=[4, 9])), "tensor 'grid' is not whole"),
    "other dtype": (lambda d: edited(d, lambda t: t["tensors"]["grid"].update(dtype="int64")), "tensor 'grid' is not what"),
    "other key": (lambda d: edited(d, lambda t: piece(t)[0].update(key="mask")), "tensor 'grid' is not what"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_refused_by_name_and_the_older_good_one_is_offered(damage, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    saved(tmp_path, 1)
    do, expected = DAMAGE[damage]
    do(saved(tmp_path, 2))
    with pytest.raises(Refused) as refused:
        work_load(Net(ALONE, 0), tmp_path)
    assert "P117" in str(refused.value)
    assert expected in str(refused.value)
    assert "resume from step-1" in str(refused.value)
    assert check(tmp_path / "step-2")
    with pytest.raises(Refused, match="P117"):
        read_whole(tmp_path)
    assert not (tmp_path / "executed").exists()
    (tmp_path / "step-2").rename(tmp_path / "step-2.bad")  # as the cure says
    assert work_load(Net(ALONE, 0), tmp_path)


def test_a_link_out_of_the_folder_is_refused(tmp_path):
    folder = saved(tmp_path / "checkpoints")
    (folder / "rank-0.safetensors").rename(tmp_path / "elsewhere")
    (folder / "rank-0.safetensors").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(Refused, match=r"not in its folder[\s\S]*start again"):
        read_whole(folder)


def test_a_linked_checkpoint_is_read_and_never_removed(tmp_path):
    saved(tmp_path / "archive", 3)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/step-3").symlink_to(tmp_path / "archive/step-3")
    assert work_load(Net(ALONE, 0), tmp_path / "run")
    for step in (4, 5, 6):
        saved(tmp_path / "run", step)
    assert steps(tmp_path / "run") == [3, 5, 6]


def damaged_load(net, folder):
    return work_load(net, folder)


@pytest.mark.gloo
def test_ranks_refuse_together(tmp_path):
    saved(tmp_path, 1)
    run_ranks(Mesh.of({"tp": 2}), partial(work_save, folder=tmp_path, step=2))
    wrong_byte(tmp_path / "step-2" / "rank-1.safetensors")
    with pytest.raises(Refused, match=r"'rank-1.safetensors' was altered[\s\S]*resume from step-1"):
        run_ranks(Mesh.of({"tp": 2}), partial(damaged_load, folder=tmp_path))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda w: w.update(grid=torch.zeros(4, 9, dtype=torch.float64)), "'grid' has another shape"),
        (lambda w: w.update(grid=torch.zeros(4, 8)), "'grid' has another dtype"),
        (lambda w: w.update(more=torch.zeros(4)), "no tensor 'more'"),
        (lambda w: w.pop("grid"), "'grid' is not in the model"),
    ],
)
def test_another_model_is_refused(change, expected, tmp_path):
    saved(tmp_path)
    wanted = {name: t.clone() for name, t in whole().items()}
    change(wanted)
    before = wanted["mask"].clone()
    with pytest.raises(Refused, match=expected):
        load(tmp_path, {name: (t, ()) for name, t in wanted.items()}, Net(ALONE, 0), spare=("rng/",))
    assert torch.equal(wanted["mask"], before)  # nothing is filled
    wanted = {name: (t.clone(), ()) for name, t in whole().items()}
    with pytest.raises(Refused, match="'rng/rank-0' is not in the model"):
        load(tmp_path, wanted, Net(ALONE, 0))
