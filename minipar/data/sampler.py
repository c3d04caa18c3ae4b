"""Which samples a rank takes: every sample once an epoch, in an order that the number of ranks does not change.

Each epoch shuffles all samples. Global batches are cut from that order, and each is dealt to the ranks in pieces:

    order of epoch 0     7 2 9 4 | 0 5 1 8 | 3 6         10 samples in batches of 4 on 3 ranks
    rank 0               7 2       0 5       3
    rank 1               9         1         6
    rank 2               4         8         none        nothing is lost, nothing comes twice

So the same batches meet the same weights on any number of ranks, and a place in the order is one number. It means the
same after a restart on more or fewer ranks.
"""

from typing import Any, NamedTuple

import numpy as np

from minipar import rng
from minipar.arrays import split_bounds
from minipar.errors import ShapeError


class Share(NamedTuple):
    """A rank's part of a global batch. Only the first `counted` of its indices count; the rest are padding."""

    indices: Any  # int64 (n,)
    counted: int


class DistributedSampler:
    """Iterate over it for the Shares of one epoch; iterate again for the next epoch, which has another order.

    samples: how many there are; rank, ranks: whose shares. batch: samples of a global batch, all ranks together.
    shuffle False keeps them in order, as evaluation does. The last batch of an epoch is smaller where `batch` does not
    divide the samples, and some ranks may get nothing of it: minipar's DataParallel takes that as it is. For what
    cannot, drop_last leaves that batch out, and pad fills it with samples that come a second time and do not count.

    position: samples taken since the start, by all ranks. Save it, and set it to go on, on any number of ranks; an
    epoch that was left in the middle goes on there. Raises ShapeError for sizes that give no batch.
    """

    def __init__(self, samples, rank=0, ranks=1, batch=1, shuffle=True, seed=0, drop_last=False, pad=False):
        if min(samples, batch, ranks) < 1 or not 0 <= rank < ranks:
            raise ShapeError(f"{samples} samples in batches of {batch} for rank {rank} of {ranks}: all at least 1.")
        if drop_last and (pad or samples < batch):
            what = "or pad, not both" if pad else f"leaves nothing of {samples} samples in batches of {batch}"
            raise ShapeError(f"drop_last {what}.")
        self.samples, self.rank, self.ranks, self.batch = samples, rank, ranks, batch
        self.shuffle, self.seed, self.pad = shuffle, seed, pad
        self.epoch_samples = samples // batch * batch if drop_last else samples
        self.position, self.drawn = 0, (None, None)  # drawn: (epoch, its order), the latest

    @property
    def epoch(self):
        """The epoch that the next sample belongs to."""
        return self.position // self.epoch_samples

    def __len__(self):
        """Batches of an epoch."""
        return -(-self.epoch_samples // self.batch)

    def __iter__(self):
        for share, position in self.ahead():
            self.position = position
            yield share

    def ahead(self):
        """(Share, position after it) for the rest of this epoch. Moves nothing, so that a Loader can look ahead."""
        epoch, begin = divmod(self.position, self.epoch_samples)
        while begin < self.epoch_samples:
            end = min(begin + self.batch, self.epoch_samples)
            yield self._share(epoch, begin, end), epoch * self.epoch_samples + end
            begin = end

    def _share(self, epoch, begin, end):
        order = self._order(epoch)
        first, last = split_bounds(end - begin, self.ranks, self.rank)
        indices = order[begin + first : begin + last]
        padding = np.empty(0, np.int64)
        if self.pad:
            first, last = split_bounds(self.batch, self.ranks, self.rank)
            padding = order[np.arange(last - first - len(indices)) % len(order)]
        return Share(np.concatenate([indices, padding]), len(indices))

    def _order(self, epoch):
        if not self.shuffle:
            return np.arange(self.samples)
        if self.drawn[0] != epoch:
            self.drawn = epoch, rng.permutation(self.samples, self.seed, "order of samples", epoch)
        return self.drawn[1]
