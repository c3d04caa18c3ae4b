"""Who gets which sample, and batches that come in time."""

import threading
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minipar.context import RankContext, activate
from minipar.data import ByteCorpus, DistributedSampler, Loader
from minipar.errors import ShapeError
from minipar.trace import Recorder


def epoch(samples, ranks, **options):
    """[[Share of each rank] of each batch] of one epoch."""
    shares = [list(DistributedSampler(samples, rank, ranks, **options)) for rank in range(ranks)]
    return list(zip(*shares, strict=True))


def indices(batches):
    return [int(i) for batch in batches for share in batch for i in share.indices]


def joined(lists):
    return [item for each in lists for item in each]


@given(st.integers(1, 40), st.integers(1, 8), st.integers(1, 12), st.booleans(), st.integers(0, 3))
def test_an_epoch_is_every_sample_once_in_an_order_that_ranks_do_not_change(samples, ranks, batch, shuffle, seed):
    batches = epoch(samples, ranks, batch=batch, shuffle=shuffle, seed=seed)
    assert sorted(indices(batches)) == list(range(samples))
    assert all(share.counted == len(share.indices) for b in batches for share in b)
    assert len(batches) == len(DistributedSampler(samples, 0, ranks, batch)) == -(-samples // batch)
    assert indices(batches) == indices(epoch(samples, 1, batch=batch, shuffle=shuffle, seed=seed))
    for b in batches:
        sizes = [len(share.indices) for share in b]
        assert max(sizes) - min(sizes) <= 1


def test_dp5_epochs_differ_and_runs_do_not():
    def run():
        samplers = [DistributedSampler(10, rank, 3, batch=3) for rank in range(3)]
        return [[[int(i) for share in sampler for i in share.indices] for sampler in samplers] for _ in range(3)]

    epochs = run()
    assert epochs == run()
    for ranks in epochs:
        assert sorted(joined(ranks)) == list(range(10))
    assert len({str(ranks) for ranks in epochs}) == 3
    assert indices(epoch(10, 3, seed=1)) != indices(epoch(10, 3, seed=0))


def test_dp5_fewer_samples_than_ranks():
    (batch,) = epoch(3, 7, batch=7)
    assert [len(share.indices) for share in batch] == [1, 1, 1, 0, 0, 0, 0]


def test_dp5_evaluation_counts_what_there_is():
    for pad in (False, True):
        batches = epoch(21, 2, batch=8, shuffle=False, pad=pad)
        assert sum(share.counted for batch in batches for share in batch) == 21
        counted = [int(i) for batch in batches for share in batch for i in share.indices[: share.counted]]
        assert counted == list(range(21))
        assert len(indices(batches)) == (24 if pad else 21)
    for samples, ranks in ((1, 4), (3, 7)):  # more padding than there are samples
        (batch,) = epoch(samples, ranks, batch=2 * ranks, pad=True)
        assert [len(share.indices) for share in batch] == [2] * ranks
        assert sum(share.counted for share in batch) == samples


def test_drop_last_leaves_the_rest_out_but_other_samples_each_epoch():
    sampler = DistributedSampler(11, 0, 1, batch=4, drop_last=True)
    epochs = [[int(i) for share in sampler for i in share.indices] for _ in range(6)]
    assert [len(set(each)) for each in epochs] == [8] * 6 and len(sampler) == 2
    assert set(joined(epochs)) == set(range(11))


@given(st.integers(1, 30), st.integers(1, 6), st.integers(1, 5), st.integers(1, 5), st.integers(0, 9))
def test_a_position_means_the_same_on_another_number_of_ranks(samples, batch, before, after, batches):
    def steps(sampler, count):
        found = []
        while len(found) < count:
            for share in sampler:
                found.append(share.indices.tolist())
                if len(found) == count:
                    break
        return found

    whole = steps(DistributedSampler(samples, batch=batch), batches + 5)
    first = [DistributedSampler(samples, r, before, batch) for r in range(before)]
    second = [DistributedSampler(samples, r, after, batch) for r in range(after)]
    taken = [steps(sampler, batches) for sampler in first]
    assert len({sampler.position for sampler in first}) == 1
    for sampler in second:
        sampler.position = first[0].position
    later = [steps(sampler, 5) for sampler in second]
    assert [*map(joined, zip(*taken, strict=True)), *map(joined, zip(*later, strict=True))] == whole


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"samples": 0}, "0 samples in batches of 1"),
        ({"samples": 3, "batch": 0}, "batches of 0"),
        ({"samples": 3, "rank": 2, "ranks": 2}, "rank 2 of 2"),
        ({"samples": 3, "batch": 4, "drop_last": True}, "leaves nothing of 3 samples in batches of 4"),
        ({"samples": 3, "drop_last": True, "pad": True}, "drop_last or pad, not both"),
    ],
)
def test_what_gives_no_batch(options, said):
    with pytest.raises(ShapeError, match=said):
        DistributedSampler(**options)


# --- Loader ---


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("ahead", [1, 2, 5])
def test_batches_come_in_order_whatever_takes_how_long(workers, ahead):
    def fetch(share):
        time.sleep(0.002 * (share.indices[0] % 3))
        return share.indices.tolist()

    loader = Loader(DistributedSampler(11, batch=2), fetch, workers, ahead)
    for _ in range(2):
        expected = DistributedSampler(11, batch=2)
        expected.position = loader.sampler.position
        assert list(loader) == [share.indices.tolist() for share in expected]
    assert len(loader) == 6


def test_it_fetches_ahead_but_counts_what_was_handed_out():
    fetched = []
    sampler = DistributedSampler(100, batch=10)
    loader = Loader(sampler, fetched.append, ahead=3)
    for step, _ in enumerate(loader, 1):
        assert sampler.position == 10 * step
        if step == 4:
            time.sleep(0.05)
            assert len(fetched) == 7
            break
    assert next(iter(sampler)).indices.tolist() == fetched[4].indices.tolist()  # goes on behind the fourth


def test_an_error_comes_where_the_batch_would_have_come():
    def fetch(share):
        if 7 in share.indices:
            raise OSError("disk gone")
        return share

    loader, got = Loader(DistributedSampler(10, batch=2, shuffle=False), fetch), []
    with pytest.raises(OSError, match="disk gone"):
        got.extend(loader)
    assert loader.sampler.position == 6
    threads = [t for t in threading.enumerate() if t.name.startswith("loader")]
    for thread in threads:
        thread.join(1)
        assert not thread.is_alive()


def test_a_starved_rank_shows_in_the_record():
    with activate(RankContext()) as context:
        context.recorder = Recorder(0)
        for _ in Loader(DistributedSampler(6, batch=2), lambda share: time.sleep(0.02)):
            pass
        waits = [span for span in context.recorder.spans if span.name == "next batch"]
        assert len(waits) == 3 and all(span.kind == "wait" and span.end - span.start > 0.01 for span in waits[:1])


def test_a_loader_needs_a_worker():
    with pytest.raises(ShapeError, match="0 workers"):
        Loader(DistributedSampler(1), None, workers=0)


def test_windows_of_the_corpus_cover_it_once():
    corpus = ByteCorpus()
    count = corpus.windows(100)
    tokens, targets = corpus.take(np.arange(3), 100)
    np.testing.assert_array_equal(tokens.reshape(-1), corpus.training[:300])
    np.testing.assert_array_equal(targets.reshape(-1), corpus.training[1:301])
    assert corpus.take([count - 1], 100)[1].shape == (1, 100) and corpus.take([], 100)[0].shape == (0, 100)
