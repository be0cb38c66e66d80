"""Pairs of embeddings: what the prior learns from."""

from linnet.config import PairsConfig as PairsConfig
from linnet.data.pairs.batch import PairBatch as PairBatch
from linnet.data.pairs.opening import open_pairs as open_pairs
from linnet.data.pairs.pairs import Pairs as Pairs
