"""A corpus is any UTF-8 text: memory-mapped, split once, drawn the same for the same step."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from oomguard.errors import InputError
from oomguard.model.corpus import Corpus

TEXT = "".join(f"line {i}: grüße, κόσμε\n" for i in range(400))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


def test_corpus_is_the_bytes_of_the_file_split_at_its_end(file: Path) -> None:
    corpus = Corpus.open(file, 32, 0.1)
    assert bytes(corpus.training) + bytes(corpus.validation) == TEXT.encode()
    assert len(corpus.validation) == int(0.1 * len(TEXT.encode()))
    assert corpus.size_bytes == len(TEXT.encode())


def test_corpus_is_mapped_not_read(file: Path) -> None:
    corpus = Corpus.open(file, 32, 0.1)
    assert isinstance(corpus.training, np.memmap)
    assert isinstance(corpus.validation, np.memmap)


def test_corpus_targets_are_the_inputs_one_byte_on(file: Path) -> None:
    inputs, targets = Corpus.open(file, 32, 0.1).batch(step=3, seed=0, sequences=5)
    assert inputs.shape == targets.shape == (5, 32)
    assert inputs.dtype == targets.dtype == np.int32
    assert (inputs[:, 1:] == targets[:, :-1]).all()
    for row in np.concatenate([inputs, targets[:, -1:]], axis=1):
        assert bytes(row.astype(np.uint8)) in TEXT.encode()


def test_corpus_draws_the_same_batch_for_a_step_and_a_seed_and_no_other(file: Path) -> None:
    corpus = Corpus.open(file, 32, 0.1)
    first, again = corpus.batch(7, 1, 4)[0], Corpus.open(file, 32, 0.1).batch(7, 1, 4)[0]
    assert (first == again).all()
    assert (first != corpus.batch(8, 1, 4)[0]).any()
    assert (first != corpus.batch(7, 2, 4)[0]).any()


def test_corpus_training_batches_never_show_what_is_held_out(tmp_path: Path) -> None:
    path = tmp_path / "two.txt"
    path.write_bytes(b"a" * 900 + b"b" * 100)
    corpus = Corpus.open(path, 16, 0.1)
    drawn = [corpus.batch(step, 0, 64) for step in range(20)]
    assert {int(x) for inputs, targets in drawn for x in (*inputs.flat, *targets.flat)} == {ord("a")}
    held = corpus.validation_batches(4, 100)
    assert {int(x) for inputs, targets in held for x in (*inputs.flat, *targets.flat)} == {ord("b")}


@pytest.mark.parametrize(("sequences", "at_most"), [(1, 1), (4, 3), (64, 8)])
def test_corpus_validation_batches_all_have_the_planned_shape(
    file: Path, sequences: int, at_most: int
) -> None:
    batches = Corpus.open(file, 32, 0.05).validation_batches(sequences, at_most)
    assert 1 <= len(batches) <= at_most
    assert {array.shape for batch in batches for array in batch} == {(sequences, 32)}


def test_corpus_just_long_enough_gives_a_window_to_each_side(tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_bytes(b"x" * 34)
    corpus = Corpus.open(path, 16, 0.05)
    assert (len(corpus.training), len(corpus.validation)) == (17, 17)
    assert corpus.batch(1, 0, 2)[0].shape == (2, 16)
    assert len(corpus.validation_batches(2, 8)) == 1


def test_corpus_without_validation_is_all_training(file: Path) -> None:
    corpus = Corpus.open(file, 32, 0)
    assert len(corpus.training) == corpus.size_bytes
    assert corpus.validation_batches(4, 8) == []


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b"x", "holds 1 byte, too little"),
        (b"x" * 16, "holds 16 bytes, fewer than one window of 17; --ctx 15 would fit"),
        (b"x" * 33, "holds 33 bytes; training and validation each need a window of 17"),
        (b"abc\xff" * 20, "is not UTF-8 text: byte 0xff at position 3"),
        ("grüße".encode("utf-16") * 20, "is not UTF-8 text: byte 0xff at position 0"),
        (b"abc\0" * 20, "is not text: a zero byte at position 3"),
        (b"x" * 40 + "ü".encode()[:1], "is not UTF-8 text: byte 0xc3 at position 40"),
    ],
    ids=["empty", "one-byte", "short", "short-with-validation", "latin", "utf-16", "binary", "cut-letter"],
)
def test_corpus_that_cannot_be_learnt_from_is_refused(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "bad.txt"
    path.write_bytes(content)
    with pytest.raises(InputError, match=said):
        Corpus.open(path, 16, 0.05)


def test_corpus_letter_at_the_end_of_what_is_looked_at_is_no_mistake(tmp_path: Path) -> None:
    path = tmp_path / "long.txt"
    path.write_bytes(b"x" + "ü".encode() * (1 << 19) + b"y" * 100)
    assert Corpus.open(path, 16, 0.05).size_bytes == 1 + (1 << 20) + 100


def test_corpus_that_is_missing_or_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot read corpus .*nothing.txt: No such file"):
        Corpus.open(tmp_path / "nothing.txt", 16, 0.05)
    with pytest.raises(InputError, match="Is a directory"):
        Corpus.open(tmp_path, 16, 0.05)


def test_corpus_without_read_permission_is_refused(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.chmod(0)
    if os.access(file, os.R_OK):  # root reads everything

        def denied(*args: object, **kwargs: object) -> None:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(Path, "open", denied)
    with pytest.raises(InputError, match=r"cannot read corpus .*text.txt: Permission denied"):
        Corpus.open(file, 16, 0.05)


@pytest.mark.parametrize("seq_len", [1, 32, 4000])
def test_corpus_micro_batches_drawn_one_by_one_are_the_batch_of_the_update(file: Path, seq_len: int) -> None:
    corpus = Corpus.open(file, seq_len, 0.0)
    inputs, targets = corpus.batch(5, 2, 12)
    parts = list(corpus.micro_batches(5, 2, 3, 4))
    assert (np.concatenate([part for part, _ in parts]) == inputs).all()
    assert (np.concatenate([part for _, part in parts]) == targets).all()
