"""The proof matrix: strategies x workloads x meshes on real ranks, either axis outermost."""

import pytest

from partita.pages import text
from partita.proof.matrix import MESHES, hf_workloads, prove_matrix, small_workloads

QUICK = {  # every workload, every kind of mesh
    "gpt": ({"dp": 4}, {"dp": 2, "tp": 2}),
    "llama": ({"tp": 4}, {"tp": 2, "dp": 2}),
    "resnet": ({"dp": 2}, {"tp": 2, "dp": 2}),
    "mlp": ({"tp": 2}, {"dp": 2, "tp": 2}),
}


def held(rows):
    """Every row proved; else the table says which is not."""
    wrong = [row for row in rows if row["proof"] is None or not row["proof"]["proved"]]
    assert not wrong, f"\n{text.matrix(rows)}\n" + "\n".join(f"{r['error']} {(r['proof'] or {}).get('reasons')}" for r in wrong)


@pytest.mark.gloo
@pytest.mark.law
@pytest.mark.parametrize("name", QUICK)
def test_the_square_commutes(name):
    rows = prove_matrix({name: small_workloads()[name]}, QUICK[name])
    held(rows)
    assert [row["workload"] for row in rows] == [name] * 2


@pytest.mark.gloo
@pytest.mark.law
@pytest.mark.parametrize("name", ["hf-gpt2"])
def test_the_square_commutes_for_a_module_of_transformers(name, tmp_path):
    held(prove_matrix({name: hf_workloads(tmp_path)[name]}, [{"tp": 2}]))


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.law
@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: "_".join(f"{a}{n}" for a, n in mesh.items()))
@pytest.mark.parametrize("kinds", ["catalogue", "transformers"])
def test_the_square_commutes_everywhere(kinds, mesh, tmp_path):
    rows = prove_matrix(small_workloads() if kinds == "catalogue" else hf_workloads(tmp_path), [mesh])
    held(rows)
    if "tp" in mesh:
        kept = {row["workload"]: row["proof"]["notes"] for row in rows}
        assert kinds != "catalogue" or any("nothing is split over tp" in note for note in kept["resnet"])


@pytest.mark.gloo
def test_a_row_that_is_refused_says_why():
    (row,) = prove_matrix({"mlp": small_workloads()["mlp"]}, [{"tp": 3}])
    assert row["proof"] is None
    assert row["error"].startswith("P104 TensorParallel(axis='tp') cannot split dim 'ffn'")
    assert "refused" in text.matrix([row])
