"""The corpus: real text, an order that no rank count changes, clear errors."""

import numpy as np
import pytest

from minipar.data import ByteCorpus
from minipar.errors import ShapeError


def test_default_corpus_is_pythons_own_source():
    corpus = ByteCorpus()
    assert len(corpus.training) > 1_000_000
    assert b"import" in corpus.training.tobytes()


def test_targets_are_one_byte_on_and_batches_repeat_by_step():
    corpus = ByteCorpus(seed=3)
    tokens, targets = corpus.batch(7, 4, 16)
    assert tokens.shape == targets.shape == (4, 16) and tokens.dtype == np.int64
    np.testing.assert_array_equal(tokens[:, 1:], targets[:, :-1])
    np.testing.assert_array_equal(tokens, ByteCorpus(seed=3).batch(7, 4, 16)[0])
    assert (tokens != corpus.batch(8, 4, 16)[0]).any() and (tokens != ByteCorpus(seed=4).batch(7, 4, 16)[0]).any()


@pytest.mark.parametrize("share", [-0.1, 1, 1.5])
def test_held_out_must_be_a_share(share):
    with pytest.raises(ShapeError, match="at least 0 and below 1"):
        ByteCorpus(held_out=share)


def test_held_out_part_is_never_trained_on(tmp_path):
    (tmp_path / "text").write_bytes(bytes(range(200)))
    corpus = ByteCorpus(tmp_path / "text", held_out=0.25)
    assert max(corpus.batch(step, 8, 10)[1].max() for step in range(50)) < 150
    tokens, targets = corpus.held_out_batch(3, 10)
    assert tokens.min() == 150 and targets.max() == 199


@pytest.mark.parametrize(
    ("content", "message"), [(None, "cannot be read"), (b"", "is empty"), (b"short", "too short for a context of 10")]
)
def test_bad_texts_are_explained(tmp_path, content, message):
    path = tmp_path / "text"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ShapeError, match=message):
        ByteCorpus(path).batch(0, 1, 10)
