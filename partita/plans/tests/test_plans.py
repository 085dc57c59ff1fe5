"""A plan file is read whole or refused whole: every fault at once, each with its place, numbers, law and cure."""

import json
import os
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partita.errors import CODES, Refused
from partita.plans import Plan, load, load_text, read_workload
from partita.plans.writing import toml
from partita.strategy import Place, Promise, Strategy
from partita.workload import GPT, MLP, Workload


class Silent(Strategy):
    promise = Promise.REORDERED

    def check(self, program, mesh):
        return []

    def rewrite(self, program, mesh):
        return program

    def apply(self, site):
        raise AssertionError("a plan file applies nothing")

    @classmethod
    def cases(cls):
        return ()


@dataclass(frozen=True)
class Ddp(Silent):
    name: ClassVar[str] = "ddp"
    place: ClassVar[Place] = Place.DATA
    axis: str = "dp"
    bucket: int = 4096


@dataclass(frozen=True)
class TensorParallel(Silent):
    name: ClassVar[str] = "tensor_parallel"
    place: ClassVar[Place] = Place.TENSOR
    axis: str = "tp"


GARDEN = {"ddp": Ddp, "tensor_parallel": TensorParallel}

PLAN = """
partita = 1
[workload]
model = "gpt"
layers = 4
hidden = 256
heads = 8
vocab = 256
sequence = 128
batch = 32
dtype = "float32"
optimizer = "adamw"
learning_rate = 3e-4
seed = 0
[cluster]
name = "here"
ranks = 4
[mesh]
dp = 2
tp = 2
[[strategy]]
name = "tensor_parallel"
axis = "tp"
[[strategy]]
name = "ddp"
axis = "dp"
"""


def read(text=PLAN, overrides=None, folder=None):
    return load_text(text, overrides, strategies=GARDEN, folder=folder)


def refused(text=PLAN, overrides=None, folder=None):
    with pytest.raises(Refused) as caught:
        read(text, overrides, folder)
    return caught.value.faults


def only(*args, **kwargs):
    faults = refused(*args, **kwargs)
    assert len(faults) == 1, [str(f) for f in faults]
    return faults[0]


# ---- what is right


def test_a_plan_file_is_read_as_written():
    plan = read()
    assert plan.workload.spec == GPT(4, 256, 8, 256, 128)
    assert (plan.cluster, plan.ranks, plan.mesh.axes) == ("here", 4, (("dp", 2), ("tp", 2)))
    assert plan.strategies == (TensorParallel(), Ddp())


def test_what_is_left_out_has_its_default():
    plan = read('[workload]\nmodel = "gpt"\n')
    assert (plan.cluster, plan.ranks, plan.mesh.ranks, plan.strategies) == ("here", 1, 1, ())
    assert plan.workload == Workload("gpt", GPT())


@pytest.mark.law
def test_ranks_default_to_all_devices_of_the_cluster():
    text = '[workload]\nmodel = "gpt"\nbatch = 64\n[cluster]\nname = "2x4-h100"\n[mesh]\ndp = 8\n[[strategy]]\nname = "ddp"\n'
    assert read(text).ranks == 8
    assert only(text.replace("dp = 8", "dp = 4")).code == "P103"


def test_any_number_of_ranks_is_legal_here():
    text = PLAN.replace("dp = 2", "dp = 32").replace("ranks = 4", "ranks = 64")
    assert read(text).ranks == 64


def test_an_axis_of_size_1_is_legal():
    assert read(overrides={"mesh.tp": "1", "cluster.ranks": "2"}).mesh.size("tp") == 1


@pytest.mark.law
def test_a_written_plan_reads_back_as_itself():
    plan = read(overrides={"clip": "1.0", "schedule": "cosine", "horizon": "10", "dtype": "bfloat16", "master": "bfloat16"})
    again = read(plan.to_toml())
    assert again == plan
    assert again.hash == plan.hash


@pytest.mark.law
def test_a_plan_is_hashable_and_its_hash_forgets_spelling(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "text").write_text("some text " * 100)
    one = read(overrides={"data": "a/text"}, folder=tmp_path)
    two = read(overrides={"data": f"{tmp_path}/a/../a/text"}, folder=Path("/"))
    lines = PLAN.splitlines()
    at = lines.index("layers = 4")
    swapped = "\n".join([*lines[:at], lines[at + 1], lines[at], *lines[at + 2 :]])
    assert one.hash == two.hash == read(swapped, {"data": str(tmp_path / "a/text")}).hash
    assert {one: 1}[two] == 1
    assert read(swapped).hash == read().hash != one.hash
    assert read(overrides={"seed": "1"}).hash != read().hash


def test_mesh_order_matters_to_the_hash():
    assert read(PLAN.replace("dp = 2\ntp = 2", "tp = 2\ndp = 2")).hash != read().hash


def test_paths_are_relative_to_the_file_and_written_relative_to_a_folder(tmp_path):
    (tmp_path / "text").write_text("x" * 1000)
    (tmp_path / "plan.toml").write_text(PLAN.replace("seed = 0", 'seed = 0\ndata = "text"'))
    plan = load(tmp_path / "plan.toml", strategies=GARDEN)
    assert plan.workload.data == str(tmp_path / "text")
    run = tmp_path / "run"
    run.mkdir()
    text = plan.to_toml(run)
    assert str(tmp_path) not in text
    (run / "plan.toml").write_text(text)
    assert load(run / "plan.toml", strategies=GARDEN) == plan


def test_half_types_have_a_float32_master_unless_said():
    assert read(overrides={"dtype": "bfloat16"}).workload.master == "float32"
    assert read(overrides={"dtype": "bfloat16", "master": "bfloat16"}).workload.master is None
    assert read().workload.master is None


def test_named_sizes_are_models_with_their_fields_overridable():
    plan = read('[workload]\nmodel = "llama2-70b"\nlayers = 2\n')
    assert (plan.workload.spec.layers, plan.workload.spec.kv_heads, plan.workload.spec.ffn) == (2, 8, 28672)


def test_a_python_factory_takes_the_other_keys():
    plan = read('[workload]\nmodel = "python:a.b:make"\nwidth = 3\nbatch = 8\n')
    assert (plan.workload.extra, plan.workload.batch, plan.workload.spec) == ({"width": 3}, 8, None)
    assert read(plan.to_toml()).hash == plan.hash


# ---- overrides


def test_overrides_reach_every_table():
    said = {"batch": "64", "mesh.tp": "4", "cluster.ranks": "8", "strategy.ddp.bucket": "1"}
    said["strategy.tp.modules"] = '["blocks.*"]'

    plan = read(overrides=said)
    assert (plan.workload.batch, plan.mesh.size("tp"), plan.ranks) == (64, 4, 8)
    assert plan.strategies == (TensorParallel(modules=("blocks.*",)), Ddp(bucket=1))


def test_an_override_that_is_no_toml_value_is_a_string():
    assert read(overrides={"dtype": "float64"}).workload.dtype == "float64"
    fault = only(overrides={"seed": "1\nbatch = 3"})
    assert (fault.code, fault.at) == ("P102", "--set seed")


@pytest.mark.parametrize(
    ("key", "cure"),
    [("mehs.tp", "'mesh'?"), ("bath", "'batch'?"), ("strategy.zz.axis", "strategy.ddp.axis"), ("a.b.c", "mesh.dp=2")],
)
def test_an_override_that_leads_nowhere_is_refused(key, cure):
    fault = only(overrides={key: "1"})
    assert fault.code == "P101"
    assert fault.at == f"--set {key}"
    assert cure in fault.cure


# ---- refusals

LLAMA = PLAN.replace('"gpt"', '"llama"')
CASES = [  # what, text or overrides, code, place, words in the message
    ("unknown key", {"hiden": "3"}, "P101", "hiden", "'hidden'?"),
    ("unknown key of the cluster", {"cluster.rank": "3"}, "P101", "cluster.rank", "'ranks'?"),
    ("unknown key of a strategy", {"strategy.ddp.bukket": "3"}, "P101", "strategy.ddp.bukket", "'bucket'?"),
    ("string for int", {"layers": '"4"'}, "P102", "layers", "4 without quotes"),
    ("bool is no int", {"layers": "true"}, "P102", "layers", "a boolean"),
    ("float for int", {"layers": "4.0"}, "P102", "layers", "try    4"),
    ("int for bool", {"tie_embeddings": "1"}, "P102", "tie_embeddings", "true or false"),
    ("list for string", {"dtype": "[1]"}, "P102", "dtype", "a list"),
    ("bool for ranks", {"cluster.ranks": "true"}, "P102", "cluster.ranks", "an integer"),
    ("float for an axis", {"mesh.tp": "2.0"}, "P102", "mesh.tp", "an integer"),
    ("text for globs", {"strategy.tp.modules": '"x"'}, "P102", "strategy.tp.modules", "a list, each a string"),
    ("unknown model", {"model": "gpt22"}, "P107", "model", "'gpt2'?"),
    ("unknown strategy", {"strategy.ddp.name": "dpp"}, "P107", "name", "'ddp'?"),
    ("unknown cluster", {"cluster.name": "8x8-x100"}, "P107", "cluster.name", "8x8-h100"),
    ("unknown dtype", {"dtype": "fp32"}, "P107", "dtype", "float32, float64, bfloat16, float16"),
    ("unknown optimizer", {"optimizer": "adam"}, "P107", "optimizer", "adamw, sgd"),
    ("unknown schedule", {"schedule": "linear"}, "P107", "schedule", "constant, cosine"),
    ("negative size", {"layers": "-1"}, "P112", "layers", "at least 1"),
    ("size zero", {"sequence": "0"}, "P112", "sequence", "at least 1"),
    ("batch zero", {"batch": "0"}, "P112", "batch", "at least 1"),
    ("axis of size zero", {"mesh.tp": "0"}, "P112", "mesh.tp", "at least 1"),
    ("negative setting", {"strategy.ddp.bucket": "-1"}, "P112", "strategy.ddp.bucket", "never negative"),
    ("negative seed", {"seed": "-1"}, "P112", "seed", "63-bit"),
    ("not a number", {"learning_rate": "nan"}, "P112", "learning_rate", "finite"),
    ("infinity", {"learning_rate": "inf"}, "P112", "learning_rate", "finite"),
    ("rate zero", {"learning_rate": "0"}, "P112", "learning_rate", "above 0"),
    ("rate beyond floats", {"learning_rate": "1" + "0" * 400}, "P112", "learning_rate", "out of range"),
    ("clip off by -1", {"clip": "-1"}, "P112", "clip", "leave the key out"),
    ("dropout of all", {"dropout": "1.0"}, "P112", "dropout", "[0, 1)"),
    ("empty string", {"data": '""'}, "P112", "data", "left out"),
    ("vocabulary below bytes", {"vocab": "128"}, "P112", "vocab", "256"),
    ("vocabulary of one", {"vocab": "1"}, "P112", "vocab", "2 or more"),
    ("unknown format", {"partita": "2"}, "P112", "partita", "format 1"),
    ("format as text", {"partita": '"1"'}, "P102", "partita", "an integer"),
    ("heads and hidden", {"heads": "6"}, "P104", "heads", "1, 2, 4, 8, 16"),
    ("batch and data ranks", {"batch": "33"}, "P104", "batch", "batch = 32 or 34"),
    ("batch and accumulate", {"accumulate": "5"}, "P104", "batch", "accumulate = 1, 2, 4, 8 or 16"),
    ("mesh and ranks", {"mesh.tp": "4"}, "P103", "mesh", "ranks = 8"),
    ("more ranks than devices", {"cluster.name": "1x2-h100"}, "P118", "cluster.ranks", "devices = 2"),
    ("axis without strategy", {"mesh.pp": "1"}, "P105", "mesh.pp", "exactly one strategy"),
    ("axis of two strategies", {"strategy.tensor_parallel.axis": "dp"}, "P105", "mesh.dp", "tensor_parallel, ddp"),
    ("cosine without horizon", {"schedule": "cosine"}, "P119", "horizon", "--steps never changes"),
    ("warmup beyond horizon", {"warmup": "9", "horizon": "9"}, "P112", "warmup", "warmup = 8 or less"),
    ("master of a full type", {"master": "bfloat16"}, "P112", "master", "half type"),
    ("data that is missing", {"data": "nowhere.txt"}, "P108", "data", "does not exist"),
    ("config that is missing", {"model": "hf:nowhere/config.json"}, "P108", "model", "does not exist"),
    ("malformed target", {"model": "python:a.b"}, "P112", "model", "package.module:factory"),
]


@pytest.mark.case
@pytest.mark.parametrize(("overrides", "code", "place", "words"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_refused_with_place_numbers_law_and_cure(overrides, code, place, words, tmp_path):
    faults = refused(overrides=overrides, folder=tmp_path)
    found = [f for f in faults if f.code == code]
    assert found, [str(f) for f in faults]
    fault = found[0]
    assert words in str(fault)
    assert fault.law
    assert fault.cure
    assert fault.code in CODES
    assert place in fault.at
    assert fault.at.startswith(("plan.toml: ", "--set "))


def test_faults_are_in_the_file_not_in_set():
    fault = only(PLAN.replace("layers = 4", "layers = true"))
    assert fault.at == "plan.toml: workload.layers"
    assert str(fault) == (
        "WrongType [P102] layers = True is not an integer\n"
        "  have   a boolean\n"
        "  law    layers is an integer\n"
        "  try    an integer\n"
        "  at     plan.toml: workload.layers                  docs: errors/P102"
    )


def test_every_fault_is_reported_at_once():
    text = PLAN.replace("layers = 4", "layers = true").replace("dp = 2", "dp = 3").replace("seed = 0", "sede = 0\nbatsh = 2")
    assert sorted(f.code for f in refused(text)) == ["P101", "P101", "P102", "P103", "P104"]


def test_a_fault_does_not_silence_the_laws_of_other_fields():
    text = PLAN.replace("heads = 8", "heads = 6").replace("layers = 4", 'layers = "4"').replace("batch = 32", "batch = 31")
    assert [f.code for f in refused(text)] == ["P102", "P104", "P104"]


def test_a_fault_brings_no_follow_up_faults():
    assert only(PLAN.replace('"ddp"', '"dpp"')).code == "P107"
    assert only(PLAN.replace("tp = 2", "tp = 0")).code == "P112"
    assert only(PLAN.replace('"gpt"', '"gtp"').replace("hidden = 256", "hidden = 255")).code == "P107"


@pytest.mark.parametrize("dim", ["heads", "kv_heads", "ffn", "vocab"])
def test_a_dim_that_does_not_divide_names_it_and_the_legal_sizes(dim):
    sizes = {"heads": 12, "kv_heads": 12, "ffn": 24, "vocab": 264, "hidden": 24}
    wrong = {"heads": {"heads": 4, "kv_heads": 4}, "kv_heads": {"kv_heads": 4}, "ffn": {"ffn": 25}, "vocab": {"vocab": 257}}
    sizes |= wrong[dim]
    drop = ("heads", "hidden", "vocab")
    text = "\n".join(line for line in LLAMA.splitlines() if line.split(" ")[0] not in drop)
    said = {k: str(v) for k, v in sizes.items()} | {"mesh.tp": "3", "cluster.ranks": "6"}
    faults = refused(text, said)
    named = [f for f in faults if f"dim {dim!r}" in f.what]
    assert len(named) == 1
    assert f"{dim} = {sizes[dim]}, tp = 3" in named[0].have
    assert named[0].cure.startswith("tp = 1")


def test_the_right_order_is_shown():
    tables = PLAN.split("[[strategy]]")
    fault = only("[[strategy]]".join([tables[0], tables[2], tables[1]]))
    assert (fault.code, fault.have, fault.cure) == ("P106", "ddp, tensor_parallel", "tensor_parallel, ddp")


def test_a_strategy_on_an_axis_the_mesh_lacks_is_refused():
    faults = refused(PLAN.replace("tp = 2\n", "").replace("ranks = 4", "ranks = 2"))
    assert [f.code for f in faults] == ["P105"]
    assert "axis 'tp'" in faults[0].what


def test_an_absent_model_is_named():
    assert only(PLAN.replace('model = "gpt"\n', "").split("layers")[0] + "\n[cluster]\nname = 'here'\n").code == "P119"


# ---- the file itself


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"", "P110"),
        (b"# nothing\n", "P110"),
        (b"model = gpt", "P109"),
        (b"[workload]\nmodel = 'gpt'\nmodel = 'gpt'\n", "P109"),
        (b"[mesh]\ndp = 1\ndp = 2\n", "P109"),
        (b"\xff\xfe\x00", "P109"),
        (b'{"model": 1}', "P109"),
        (b"a = " + b"[" * 5000, "P109"),
        (b"a = " + b"9" * 5000, "P109"),
    ],
)
def test_a_file_that_is_no_plan_is_refused(tmp_path, content, code):
    path = tmp_path / "plan.toml"
    path.write_bytes(content)
    with pytest.raises(Refused) as caught:
        load(path, strategies=GARDEN)
    assert [f.code for f in caught.value.faults] == [code]
    assert "plan.toml" in caught.value.faults[0].at


def test_a_path_that_is_missing_or_a_folder_is_refused(tmp_path):
    (tmp_path / "plan.toml").write_text(PLAN)
    for path, code, words in ((tmp_path / "plam.toml", "P108", "'plan.toml'?"), (tmp_path, "P109", "plan.toml")):
        with pytest.raises(Refused) as caught:
            load(path, strategies=GARDEN)
        assert caught.value.faults[0].code == code
        assert words in caught.value.faults[0].cure


def test_a_byte_order_mark_is_no_fault(tmp_path):
    (tmp_path / "plan.toml").write_bytes(b"\xef\xbb\xbf" + PLAN.encode())
    assert load(tmp_path / "plan.toml", strategies=GARDEN) == read()


@pytest.mark.parametrize(
    "text", ["workload = 3", "mesh = [1]", "strategy = 'ddp'", "[strategy]\nname = 'ddp'", "cluster = 'here'"]
)
def test_a_table_of_the_wrong_shape_is_refused(text):
    assert "P102" in [f.code for f in refused(text)]


# ---- data


def test_data_that_is_empty_short_or_no_file_is_refused(tmp_path):
    (tmp_path / "empty").write_text("")
    (tmp_path / "short").write_text("x" * 400)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / ".hidden").write_text("x" * 1000)
    for name, code in (("empty", "P110"), ("folder", "P110"), ("short", "P110")):
        fault = only(overrides={"data": name}, folder=tmp_path)
        assert (fault.code, fault.at) == (code, "--set data")
    assert "sequence = 99 or less" in only(overrides={"data": "short"}, folder=tmp_path).cure


def test_data_that_is_a_pipe_is_refused_and_never_opened(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    assert only(overrides={"data": "pipe"}, folder=tmp_path).code == "P109"


def test_data_is_read_as_bytes_too(tmp_path):
    (tmp_path / "text").write_text("abab" * 1000)
    assert only(overrides={"data": "text", "vocab": "128"}, folder=tmp_path).code == "P112"


def test_a_model_without_tokens_reads_no_data(tmp_path):
    (tmp_path / "text").write_text("abab" * 100)
    assert only('[workload]\nmodel = "mlp"\ndata = "text"\n', folder=tmp_path).code == "P115"


# ---- Hugging Face configs


def config(folder, **values):
    (folder / "config.json").write_text(json.dumps(values))
    return '[workload]\nmodel = "hf:config.json"\n'


def test_a_gpt2_config_has_no_more_positions_than_its_table(tmp_path):
    text = config(tmp_path, model_type="gpt2", n_positions=64)
    assert read(text, {"sequence": "64"}, tmp_path).workload.sequence == 64
    fault = only(text, {"sequence": "65"}, tmp_path)
    assert (fault.code, fault.cure) == ("P112", "sequence = 64 or less")


def test_a_config_of_another_type_has_no_spec(tmp_path):
    text = config(tmp_path, model_type="bert", hidden_size=64)
    plan = read(text, {"sequence": "16"}, tmp_path)
    assert (plan.workload.spec, plan.workload.extra) == (None, {"sequence": 16})
    assert plan.workload.model == f"hf:{tmp_path}/config.json"
    assert only(text, {"hidden_sise": "3"}, tmp_path).cure == "'hidden_size'?"


@pytest.mark.parametrize(
    ("content", "code"),
    [("", "P109"), ("[]", "P112"), ("{}", "P112"), ('{"model_type": "llama", "hidden_size": -4}', "P112")],
)
def test_a_config_that_is_none_is_refused(tmp_path, content, code):
    (tmp_path / "config.json").write_text(content)
    assert only('[workload]\nmodel = "hf:config.json"\n', folder=tmp_path).code == code


# ---- Python


def test_a_plan_made_in_python_needs_no_workload():
    plan = Plan(mesh={"dp": 2, "tp": 2}, strategies=[TensorParallel(), Ddp()], accumulate=1)
    assert (plan.ranks, plan.accumulate, plan.cluster, plan.workload) == (4, 1, "here", None)
    assert plan == Plan(mesh={"dp": 2, "tp": 2}, strategies=(TensorParallel(), Ddp()))
    assert Plan(accumulate=2).hash != Plan().hash


@pytest.mark.parametrize(
    ("values", "code"),
    [
        ({"mesh": {"dp": 0}, "strategies": [Ddp()]}, "P112"),
        ({"mesh": {"dp": True}, "strategies": [Ddp()]}, "P102"),
        ({"mesh": {"dp": 2}, "strategies": [Ddp]}, "P102"),
        ({"mesh": {"dp": 2}}, "P105"),
        ({"mesh": {"dp": 2}, "strategies": [Ddp()], "ranks": 3}, "P103"),
        ({"mesh": {"dp": 2, "tp": 2}, "strategies": [Ddp(), TensorParallel()]}, "P106"),
        ({"accumulate": 0}, "P112"),
        ({"cluster": "nowhere"}, "P107"),
        ({"workload": Workload("gtp")}, "P107"),
        ({"workload": Workload("gpt", GPT(heads=5))}, "P104"),
        ({"workload": Workload("gpt", batch=-1)}, "P112"),
    ],
)
def test_a_plan_made_in_python_obeys_the_same_laws(values, code):
    with pytest.raises(Refused) as caught:
        Plan(**values)
    assert [f.code for f in caught.value.faults] == [code]
    assert caught.value.faults[0].at.startswith("Plan: ")


def test_a_workload_made_by_name_gets_its_sizes():
    assert Plan(Workload("mlp")).workload.spec == MLP()


def test_a_plan_can_be_changed_by_replace():
    plan = read()
    assert replace(plan, path=Path("x")) == plan
    assert replace(plan, mesh={"dp": 1, "tp": 2}, ranks=2).ranks == 2


# ---- workloads by name


def test_a_workload_is_a_name_a_file_or_a_target(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "w.toml").write_text('[workload]\nmodel = "gpt"\nbatch = 8\n')
    assert read_workload("gpt2").spec.layers == 12
    assert read_workload("w.toml", {"layers": "3"}) == Workload("gpt", GPT(layers=3), batch=8)
    assert read_workload("python:a:b").model == "python:a:b"
    for text, code in (("gpt9000", "P107"), ("none.toml", "P108"), ("hf:none", "P108")):
        with pytest.raises(Refused) as caught:
            read_workload(text)
        assert caught.value.faults[0].code == code


# ---- writing TOML

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
VALUES = st.recursive(
    st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.law
@settings(max_examples=150, deadline=None)
@given(st.dictionaries(TEXT, VALUES, max_size=5))
def test_written_toml_parses_back(table):
    assert tomllib.loads(toml({"a": table})) == {"a": table}
    assert tomllib.loads(toml(table)) == table
