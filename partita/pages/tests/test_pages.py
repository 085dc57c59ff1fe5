"""Pages: contract keys in the JSON, strict JSON, human units in the text."""

import json as plain

import pytest

from partita.cost.figures import PARTS, Figures, Traffic, Why
from partita.pages import json, text, trace
from partita.simulate import Span

FIGURES = Figures(
    step_seconds=0.5,
    peak=3 * 2**30,
    traffic=(Traffic("dp", "all_reduce", 4, 8e6, 16e6),),
    step_seconds_band=(0.4, 0.7),
    memory={"parameters": 2**30, "gradients": 2**30, "optimizer": 0.5 * 2**30, "activations": 0.5 * 2**30},
    peak_at="addmm",
    flop=1e12,
    device_flop_per_second=4e12,
    samples=32,
    tokens=4096,
    notes=("a note",),
    why=(Why("matmul", "flop / peak", "1 Tflop", "peak = 4e12", "a data sheet", 0.4),),
)
CONTRACT = {
    "plan_hash", "step_seconds", "step_seconds_band", "samples_per_second", "tokens_per_second", "flop_per_second_per_device",
    "mfu", "bubble_fraction", "exposed_communication_seconds", "memory_bytes", "fits", "traffic", "energy_joules",
    "opaque_share",
}  # fmt: skip


def test_an_estimate_has_every_key_of_the_contract():
    got = json.figures_json(FIGURES, "abc")
    assert set(got) >= CONTRACT
    assert set(got["memory_bytes"]) == {"peak", *PARTS}
    assert got["traffic"] == [{"axis": "dp", "op": "all_reduce", "count": 4, "bytes": 8e6, "backend_bytes": 16e6}]
    assert (got["mfu"], got["samples_per_second"], got["tokens_per_second"]) == (0.5, 64, 8192)
    assert plain.loads(json.dumps(got)) == got


def test_a_model_without_tokens_has_no_rate_of_tokens():
    assert json.figures_json(Figures(0.5, 1.0, ()), "")["tokens_per_second"] is None


@pytest.mark.law
def test_json_is_strict_whatever_a_number_is():
    got = plain.loads(json.dumps({"a": float("nan"), "b": [float("inf"), 1.5], "c": {"d": -float("inf")}, 3: None, "e": True}))
    assert got == {"a": None, "b": [None, 1.5], "c": {"d": None}, "3": None, "e": True}


@pytest.mark.golden
def test_the_page_of_an_estimate():
    page = text.estimate(json.figures_json(FIGURES, "abc"), [json.why_json(w) for w in FIGURES.why])
    assert page == (
        "  step time              500 ms  400 ms to 700 ms\n"
        "  samples per second         64\n"
        "  tokens per second      8.19 k\n"
        "  flop/s per device         2 T  50.0 % of its peak\n"
        "  exposed communication    0 ns\n"
        "  peak memory             3 GiB  fits\n"
        "\n"
        "  memory at the peak (at addmm)\n"
        "    parameters     1 GiB\n"
        "    gradients      1 GiB\n"
        "    optimizer    512 MiB\n"
        "    activations  512 MiB\n"
        "\n"
        "  traffic of a rank in one step\n"
        "    axis  op          calls     bytes  backend sends\n"
        "    dp    all_reduce      4  7.63 MiB       15.3 MiB\n"
        "\n"
        "  why time\n"
        "     share    time  term     amount  formula      constant     source\n"
        "    80.0 %  400 ms  matmul  1 Tflop  flop / peak  peak = 4e12  a data sheet\n"
        "\n"
        "  note: a note"
    )


TRAIN = {
    "steps": 3,
    "losses": [5.5, 4.0, 3.25],
    "step_seconds": 0.4,
    "memory_bytes": {"peak": 2 * 2**30},
    "traffic": [{"axis": "dp", "op": "all_reduce", "count": 4, "bytes": 8e6, "backend_bytes": 16e6}],
    "predicted": json.figures_json(FIGURES, "abc"),
    "error": {"time": 0.25, "memory": 0.5, "traffic": 0.0},
    "run_dir": "runs/a",
    "sample": "import os\ndef",
}


@pytest.mark.golden
def test_the_page_of_a_run_ends_with_predicted_measured_error():
    assert text.run(TRAIN) == (
        "  3 steps   loss 5.5000 -> 3.2500\n"
        "\n"
        "  a sample of what it learned\n"
        "\n"
        "  | import os\n"
        "  | def\n"
        "\n"
        "                         predicted             measured    error\n"
        "  step time                 500 ms               400 ms  +25.0 %\n"
        "  peak memory                3 GiB                2 GiB  +50.0 %\n"
        "  traffic      7.63 MiB in 4 calls  7.63 MiB in 4 calls        0\n"
        "\n"
        "  runs/a"
    )


def test_what_was_not_measured_is_said():
    page = text.run(TRAIN | {"memory_bytes": {"peak": None}, "error": {"time": 0.1, "memory": None, "traffic": 0.0}})
    assert "not measured" in page
    assert "nan" not in page


FIRST = {"rank": 1, "index": 3, "said": "a", "heard": "b"}


@pytest.mark.golden
def test_the_page_of_a_proof_names_the_field_and_the_worst_tensor():
    call = {"op": "all_reduce", "axis": "dp", "nbytes": 64, "dtype": "float32"}
    got = {
        "proved": False,
        "promise": "REORDERED",
        "differs": ["nbytes", "numerics"],
        "reasons": ["square: ...", "numerics: gradient head.weight is off by 0.5, bound 1e-10"],
        "square": {
            "equal": False,
            "said": 8,
            "heard": 8,
            "first_difference": {
                "rank": 1,
                "index": 3,
                "axis": "dp",
                "fields": ["nbytes"],
                "said": call,
                "heard": call | {"nbytes": 32},
            },
        },
        "numerics": {"max_relative_error": 0.5, "bound": 1e-10, "worst_tensor": "gradient head.weight"},
        "traffic": {"algorithmic_equal": False, "wire_error": None},
        "memory": {"error": 0.01},
        "shrunk": ["layers: 4 -> 2"],
    }
    assert text.proof(got) == (
        "  NOT proved   promise REORDERED   differs in nbytes, numerics\n"
        "\n"
        "  square    NO  said 8 calls, heard 8\n"
        "  numerics  NO  largest error 0.5, bound 1e-10 at gradient head.weight\n"
        "  traffic   NO  no payload of 1 MB to judge the wire by\n"
        "  memory        error +1.0 %\n"
        "\n"
        "  first difference: rank 1, call 3 on dp: nbytes\n"
        "    said   all_reduce on dp of 64 bytes float32\n"
        "    heard  all_reduce on dp of 32 bytes float32\n"
        "\n"
        "  numerics: gradient head.weight is off by 0.5, bound 1e-10\n"
        "\n"
        "  shrunk: layers: 4 -> 2"
    )
    got["square"]["first_difference"]["heard"] = None
    assert "heard  nothing" in text.proof(got)


@pytest.mark.golden
def test_a_matrix_of_proofs_is_a_table():
    proof = {"proved": True, "differs": [], "numerics": {"max_relative_error": 2e-14}, "square": {"said": 8}}
    rows = [
        {"strategies": "ddp", "workload": "gpt", "mesh": "dp=2", "seconds": 2.0, "proof": proof},
        {
            "strategies": "ddp",
            "workload": "mlp",
            "mesh": "dp=2",
            "seconds": 1.0,
            "proof": proof | {"proved": False, "differs": ["axis"]},
        },
        {"strategies": "ddp", "workload": "bert", "mesh": "dp=3", "seconds": 0.5, "proof": None, "error": "P104"},
    ]
    assert text.matrix(rows) == (
        "  strategies  workload  mesh  verdict    largest error  calls    time\n"
        "  ddp         gpt       dp=2  proved     2e-14              8     2 s\n"
        "  ddp         mlp       dp=2  NOT: axis  2e-14              8     1 s\n"
        "  ddp         bert      dp=3  refused    P104                  500 ms"
    )


@pytest.mark.golden
def test_the_page_of_choices_says_why_the_others_lost():
    got = {
        "plans": [{"plan": "", "place": 1, "family": "ddp(dp=2)", "step_seconds": 0.1, "memory_bytes": {"peak": 2**30}}],
        "rejected": [{"family": "tensor_parallel(tp=2)", "reason": "12 % slower"}],
        "lower_bound_seconds": 0.09,
        "gap": 0.1,
        "search_seconds": 0.02,
        "candidates": 2,
    }
    assert text.choices(got) == (
        "     plan       step time  peak memory\n"
        "  1  ddp(dp=2)     100 ms        1 GiB\n"
        "\n"
        "  why the others lost\n"
        "    tensor_parallel(tp=2)  12 % slower\n"
        "\n"
        "  2 candidates in 20 ms; no plan is faster than 90 ms (gap +10.0 %)"
    )


def test_facts_are_indented_and_rows_are_tables():
    got = {
        "name": "x",
        "on": True,
        "rows": [{"a": 1, "b": "two"}, {"a": 3, "c": 0.5}],
        "inner": {"k": None},
        "about": "one\ntwo",
    }
    assert text.facts(got) == (
        "  name   x\n"
        "  on     yes\n"
        "  rows\n"
        "    a  b      c\n"
        "    1  two\n"
        "    3       0.5\n"
        "  inner\n"
        "    k\n"
        "  about\n"
        "    one\n"
        "    two"
    )


def test_an_empty_table_is_empty():
    assert text.table([]) == ""
    assert text.estimate(json.figures_json(Figures(0.5, 1.0, ()), "")).count("traffic: none") == 1


def test_a_trace_has_a_row_per_stream_in_microseconds():
    spans = (Span("addmm", "compute", "forward", "head", 0.0, 1e-3), Span("all_reduce", "dp", "backward", "head", 1e-3, 3e-3))
    rows = trace.chrome(spans, "plan")["traceEvents"]
    assert [r["args"]["name"] for r in rows if r["ph"] == "M"] == ["plan", "compute", "dp"]
    assert [(r["name"], r["tid"], r["ts"], r["dur"]) for r in rows if r["ph"] == "X"] == [
        ("addmm", 0, 0.0, 1e3),
        ("all_reduce", 1, 1e3, pytest.approx(2e3)),
    ]
