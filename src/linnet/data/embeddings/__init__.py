"""Pairs of text and image embeddings: the training data of the prior."""

from linnet.config.schema import PairsConfig as PairsConfig
from linnet.data.embeddings.load import open_pairs as open_pairs
from linnet.data.embeddings.pairs import EmbeddingPairs as EmbeddingPairs
from linnet.data.embeddings.pairs import PairBatch as PairBatch
