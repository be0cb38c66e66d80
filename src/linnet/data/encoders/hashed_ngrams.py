"""Hashed features of captions: each word is represented by hashes of itself and of its character n-grams.

No vocabulary is needed, and an unseen word shares n-grams with seen ones.
"""

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
"""Bucket 0 means empty: padding of a short word, or a caption without words."""
MAX_FEATURES = 24
"""Maximum features of one word: the word itself, then its n-grams, shortest first."""
MAX_WORDS = 48
"""Maximum words of one caption; the longest of the emoji has 27."""
NGRAM_SIZES = (3, 4)
NAME, KEYWORD = 0, 1
"""Words before the first colon name the object, words after it describe it."""


class HashedCaptions(NamedTuple):
    """Captions as indices into the words that occur in them. Word 0 is empty."""

    features: Int32[np.ndarray, "V F"]
    words: Int32[np.ndarray, "B W"]
    parts: Int32[np.ndarray, "B W"]


def featurize(captions: Sequence[str]) -> HashedCaptions:
    """Compute the features of captions.

    Captions are padded to MAX_WORDS and the word table to a power of two, so that few programs are compiled and a caption's vector
    does not depend on the other captions of a call.
    """
    split = [split_words(caption)[:MAX_WORDS] for caption in captions]
    index: dict[str, int] = {"": 0}
    for caption_words in split:
        for word, _ in caption_words:
            index.setdefault(word, len(index))
    words, parts = (np.zeros((len(captions), MAX_WORDS), np.int32) for _ in range(2))
    for row, caption_words in enumerate(split):
        for i, (word, part) in enumerate(caption_words):
            words[row, i], parts[row, i] = index[word], part
    features = np.zeros((max(256, 1 << (len(index) - 1).bit_length()), MAX_FEATURES), np.int32)
    for word, i in index.items():
        hashes = word_features(word)
        features[i, : len(hashes)] = hashes
    return HashedCaptions(features, words, parts)


def split_words(caption: str) -> list[tuple[str, int]]:
    """Return lower-case words without accents, each with its part of the caption (NAME or KEYWORD)."""
    plain = "".join(c for c in unicodedata.normalize("NFKD", caption.lower()) if not unicodedata.combining(c))
    name, _, keywords = plain.partition(":")
    return [(word, part) for part, text in ((NAME, name), (KEYWORD, keywords)) for word in re.findall(r"\w+", text)]


@functools.lru_cache(maxsize=1 << 16)
def word_features(word: str) -> tuple[int, ...]:
    """Hash a word and its n-grams. CRC32 is used because Python's own hash differs between processes."""
    if not word:
        return ()
    marked = f"<{word}>"
    ngrams = [marked[i : i + n] for n in NGRAM_SIZES for i in range(len(marked) - n + 1)]
    features = [f"word {word}", *dict.fromkeys(ngrams)][:MAX_FEATURES]
    return tuple(1 + zlib.crc32(feature.encode()) % (N_BUCKETS - 1) for feature in features)
