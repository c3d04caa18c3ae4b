"""Where the samples come from: text, the order in which ranks take them, and fetching them ahead of use."""

from minipar.data.corpus import ByteCorpus
from minipar.data.loader import Loader
from minipar.data.sampler import DistributedSampler, Share

__all__ = ["ByteCorpus", "DistributedSampler", "Loader", "Share"]
