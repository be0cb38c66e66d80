"""Images and embeddings over HTTP: request bodies of the clients, and responses as the results of `Run`."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from linnet.api.images import EmbeddingSamples, Neighbor
from linnet.core.errors import invalid

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import Float32, UInt8

MAX_ANSWERS = 32
"""Answers of one call to the server. Longer lists are sent as several concurrent calls."""


def sample_bodies(
    texts: str | Sequence[str],
    embeddings: Float32[np.ndarray, "*B X"] | None,
    text_encodings: Float32[np.ndarray, "*B L X"] | None,
    n: int,
    settings: Mapping[str, Any],
) -> tuple[tuple[str, ...], list[dict[str, Any]]]:
    """Return a name for each text, and the bodies of the calls that sample `n` embeddings of each."""
    import numpy as np

    names = (texts,) if isinstance(texts, str) else tuple(texts)
    if (embeddings is None) == (not names):
        raise invalid("texts and embeddings", "none or both", "one of the two", "give texts or embeddings")
    if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= MAX_ANSWERS:
        raise invalid("n", n, f"1 to {MAX_ANSWERS}", "use 1")
    fields: dict[str, list[Any]] = {}
    if embeddings is None:
        fields["input"] = list(names)
    else:
        fields["embeddings"] = np.atleast_2d(embeddings).tolist()
        names = tuple(f"embedding {i}" for i in range(len(fields["embeddings"])))
    if text_encodings is not None:
        given = np.asarray(text_encodings)
        fields["text_encodings"] = (given[None] if given.ndim == 2 else given).tolist()
    size = MAX_ANSWERS // n
    bodies = [
        {**settings, "n": n, **{name: value[start : start + size] for name, value in fields.items()}}
        for start in range(0, len(names), size)
    ]
    return names, bodies


def parse_pixels(data: str) -> UInt8[np.ndarray, "h w 3"]:
    import numpy as np
    from PIL import Image

    with Image.open(io.BytesIO(base64.b64decode(data))) as image:
        return np.asarray(image.convert("RGB"))


def parse_samples(names: tuple[str, ...], answers: Sequence[Mapping[str, Any]]) -> EmbeddingSamples:
    import numpy as np

    rows = [row for answer in answers for row in answer["data"]]
    cosines = [[one["cosine"] for one in row["candidates"]] for row in rows]
    near = [row["nearest"] or [] for row in rows]
    has_images = all(near) and all(one["b64_json"] is not None for row in near for one in row)
    has_neighbors = all(near)
    return EmbeddingSamples(
        texts=names,
        embeddings=np.array([row["embedding"] for row in rows], np.float32),
        seeds=tuple(row["seed"] for row in rows),
        cosines=None if cosines[0][0] is None else np.array(cosines, np.float32),
        nearest=tuple(tuple(Neighbor(one["cosine"], one["caption"], one["row"]) for one in row) for row in near)
        if has_neighbors
        else (),
        pictures=np.stack([np.stack([parse_pixels(one["b64_json"]) for one in row]) for row in near])
        if has_images
        else None,
        steps=answers[0]["steps"],
        note=None if has_neighbors else "the server returned no nearest images",
    )
