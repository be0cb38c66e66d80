"""A caption as numbers: its words, each as the hashes of itself and of its pieces, so that no vocabulary is needed and a word
that was never seen still shares pieces with those that were."""

from __future__ import annotations

import functools
import re
import unicodedata
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32

N_BUCKETS = 8192
"""Bucket 0 stands for nothing: the padding of a short word, and a caption without words."""
MAX_FEATURES = 24
"""Of one word: itself, then its pieces from the shortest on."""
MAX_WORDS = 48
"""Of one caption; the emoji's longest has 27."""
PIECES = (3, 4)
NAME, KEYWORD = 0, 1
"""A word before the first colon names the thing, one after it describes it."""


class Bags(NamedTuple):
    """Captions over the words that occur in them. Word 0 is nothing."""

    features: Int32[np.ndarray, "V F"]
    words: Int32[np.ndarray, "B W"]
    parts: Int32[np.ndarray, "B W"]


def featurize(captions: Sequence[str]) -> Bags:
    """As wide as any caption may be, and with room for words in powers of two: few programs serve all calls, and a caption's vector
    does not depend on what stands beside it."""
    split = [split_words(caption)[:MAX_WORDS] for caption in captions]
    number: dict[str, int] = {"": 0}
    for found in split:
        for word, _ in found:
            number.setdefault(word, len(number))
    words, parts = (np.zeros((len(captions), MAX_WORDS), np.int32) for _ in range(2))
    for row, found in enumerate(split):
        for i, (word, part) in enumerate(found):
            words[row, i], parts[row, i] = number[word], part
    features = np.zeros((max(256, 1 << (len(number) - 1).bit_length()), MAX_FEATURES), np.int32)
    for word, i in number.items():
        found_features = word_features(word)
        features[i, : len(found_features)] = found_features
    return Bags(features, words, parts)


def split_words(caption: str) -> list[tuple[str, int]]:
    """Small letters without accents, with the part of the caption each stands in."""
    plain = "".join(c for c in unicodedata.normalize("NFKD", caption.lower()) if not unicodedata.combining(c))
    name, _, keywords = plain.partition(":")
    return [(word, part) for part, text in ((NAME, name), (KEYWORD, keywords)) for word in re.findall(r"\w+", text)]


@functools.lru_cache(maxsize=1 << 16)
def word_features(word: str) -> tuple[int, ...]:
    """CRC32, not hash(): Python's own hash changes from process to process."""
    if not word:
        return ()
    marked = f"<{word}>"
    pieces = [marked[i : i + n] for n in PIECES for i in range(len(marked) - n + 1)]
    named = [f"word {word}", *dict.fromkeys(pieces)][:MAX_FEATURES]
    return tuple(1 + zlib.crc32(feature.encode()) % (N_BUCKETS - 1) for feature in named)
