"""What a run reads its pairs from."""

from __future__ import annotations

import dataclasses

from linnet.errors import refuse

EMOJI_PAIRS = "emoji-pairs"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairsConfig:
    source: str = EMOJI_PAIRS
    """A folder with img_emb/ and text_emb/ (clip-retrieval's layout; metadata/ holds captions); parquet with columns of
    embeddings; webdataset tars with .npy members; an .npz; or `emoji-pairs`."""
    images: str | None = None
    """With `texts`, instead of `source`: the .npy files of the images (a file, folder or glob)."""
    texts: str | None = None
    """The .npy files of the texts, one for each of the images'."""
    metadata: str | None = None
    """The parquet files with the captions, one for each of the images'."""
    image_key: str | None = None
    """Of parquet, .npz and webdataset: the column, array or ending of the image embeddings; none: a usual one."""
    text_key: str | None = None
    caption_key: str = "caption"
    """Of parquet and .npz."""
    split_key: str | None = None
    """A column or array that says which rows are held out: true for test, or train, validation and test in words."""
    validation_fraction: float = 0.05
    """Rows are trained on from the front; validation comes after them, and then test."""
    test_fraction: float = 0.05
    batch_size: int = 64
    """Pairs in one update, over all devices."""

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise refuse("data.batch_size", self.batch_size, "at least 1", "use 64")
        fractions = (self.validation_fraction, self.test_fraction)
        if not all(0 <= fraction < 1 for fraction in fractions) or sum(fractions) >= 1:
            raise refuse(
                "data.validation_fraction / data.test_fraction",
                fractions,
                "at least 0 and together below 1, so that something is left to train on",
                "use 0.05 and 0.05",
            )
        if (self.texts or self.metadata) and not self.images:
            given = "texts" if self.texts else "metadata"
            raise refuse("data.images", self.images, f"given where data.{given} is", "name the image embeddings too")
