"""Text as bytes: what is read, what is refused, and that batches hang on seed and step alone."""

import os
import time
from pathlib import Path

import pytest
import torch

from partita.errors import Refused
from partita.runtime.corpus import LIMIT, Corpus, batches_of, decode, held_out_of, own_source, read, text_of
from partita.runtime.task import subject_of
from partita.workload import GPT, Workload


def workload(data=None, sequence=8, vocab=256, **how):
    return Workload("gpt", GPT(sequence=sequence, vocab=vocab), batch=3, data=None if data is None else str(data), **how)


# ---------------------------------------------------------------- batches
@pytest.mark.law
@pytest.mark.parametrize("length", [36, 37, 44, 45, 100, 171, 180, 1000, 1_500_000])
def test_the_two_parts_share_nothing_and_lose_nothing(length):
    text = torch.arange(length, dtype=torch.int64)  # every position is its own value
    corpus = Corpus.of(text, 8)
    both = torch.cat([corpus.training, corpus.held]).sort().values
    assert torch.equal(both, text)
    assert min(len(corpus.training), len(corpus.held)) >= 9
    if length >= 1000:
        assert 0.03 < len(corpus.held) / length < 0.07
    assert corpus.batch(0, 2, 8)["tokens"].shape == corpus.held_out(0, 2, 8)["targets"].shape == (2, 8)


def test_batches_hang_on_seed_and_step_only():
    corpus = Corpus.of((torch.arange(100_000) % 251).to(torch.uint8), 16)
    one = corpus.batch(5, 4, 16, seed=1)
    torch.manual_seed(99)
    assert all(torch.equal(one[k], corpus.batch(5, 4, 16, seed=1)[k]) for k in ("tokens", "targets"))
    assert not torch.equal(one["tokens"], corpus.batch(6, 4, 16, seed=1)["tokens"])
    assert not torch.equal(one["tokens"], corpus.batch(5, 4, 16, seed=2)["tokens"])
    assert torch.equal(one["tokens"][:, 1:], one["targets"][:, :-1])
    assert one["tokens"].dtype == torch.int64
    assert one["tokens"].is_contiguous()


def test_every_window_can_be_drawn():
    corpus = Corpus(torch.arange(5, dtype=torch.uint8), torch.arange(5, dtype=torch.uint8))
    starts = corpus.batch(0, 200, 3)["tokens"][:, 0]
    assert set(starts.tolist()) == {0, 1}


def test_held_out_batches_are_the_same_for_every_seed(tmp_path):
    (tmp_path / "a.txt").write_bytes(os.urandom(5000).replace(b"\0", b"x"))
    first, second = (held_out_of(workload(tmp_path, seed=s)) for s in (0, 1))
    assert torch.equal(first(2)["tokens"], second(2)["tokens"])
    assert not torch.equal(first(2)["tokens"], first(3)["tokens"])


def test_a_subject_reads_its_text(tmp_path):
    (tmp_path / "a.txt").write_text("so it goes, " * 50)
    batch = subject_of(workload(tmp_path)).batches(0)
    assert decode(batch["tokens"][0]) in "so it goes, " * 50
    assert torch.equal(batch["tokens"], batches_of(workload(tmp_path))(0)["tokens"])


def test_decoding_replaces_what_is_no_text():
    assert decode(torch.tensor(list("größe".encode()))) == "größe"
    assert decode([104, 105, 0xC3, 300, -1]) == "hi\ufffd\ufffd\ufffd"


# ---------------------------------------------------------------- reading
def test_the_own_source_is_fast_and_has_no_tests_in_it():
    own_source.cache_clear()
    start = time.perf_counter()
    text = own_source()
    assert time.perf_counter() - start < 5
    assert 2 << 20 < len(text.data) <= LIMIT
    assert torch.equal(text.data, own_source.__wrapped__().data)
    start = bytes(text.data[:2000].tolist())
    assert b"__future__" in start  # the first module by name
    assert len(own_source.__wrapped__(1000).data) == 1000


def test_a_folder_is_read_in_order_without_hidden_and_binary_files(tmp_path):
    for name, raw in {
        "b.txt": b"bb",
        "a/z.txt": b"zz",
        "a/y.bin": b"\0\1",
        ".git/x": b"no",
        ".x": b"no",
        "c.md": "ü".encode(),
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(raw)
    (tmp_path / "loop").symlink_to(tmp_path)
    text = read(tmp_path)
    assert decode(text.data) == "zzbbü"
    assert text.skipped == ("a/y.bin",)
    assert str(text) == "6 B of text in 3 files; skipped, as they hold binary data: a/y.bin"
    assert str(text_of(workload(tmp_path / "b.txt"))) == "2 B of text in 1 file"


def empty(folder):
    return folder


def binary(folder):
    (folder / "x").write_bytes(b"\0\0")
    return folder / "x"


def pipe(folder):
    os.mkfifo(folder / "x")
    return folder / "x"


def no_bytes(folder):
    (folder / "x").write_bytes(b"")
    return folder / "x"


def short(folder):
    (folder / "x").write_bytes(b"y" * 35)
    return folder


@pytest.mark.parametrize(
    ("make", "code", "said"),
    [
        (lambda f: f / "none", "P108", "there is no"),
        (binary, "P109", "zero bytes"),
        (pipe, "P109", "neither a file nor a folder"),
        (empty, "P110", "0 files"),
        (no_bytes, "P110", "1 file, 0 bytes"),
        (short, "P110", "35 bytes, sequence = 8"),
    ],
)
def test_what_cannot_be_trained_on_is_refused(make, code, said, tmp_path):
    with pytest.raises(Refused) as refused:
        batches_of(workload(make(tmp_path)))
    assert refused.value.faults[0].code == code
    assert said in str(refused.value)


@pytest.mark.parametrize("name", ["read_bytes", "iterdir"])
def test_a_file_or_folder_without_permission_is_refused(name, monkeypatch, tmp_path):
    (tmp_path / "x").write_text("x" * 100)

    def denied(self):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, name, denied)
    with pytest.raises(Refused, match=r"P109[\s\S]*Permission denied"):
        batches_of(workload(tmp_path))


def test_a_small_vocabulary_is_refused(tmp_path):
    with pytest.raises(Refused, match=r"P112.*vocab = 65"):
        batches_of(workload(tmp_path, vocab=65))
