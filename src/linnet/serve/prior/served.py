"""A served prior: its engine, its text encoder, and an index of images for nearest-neighbor lookup."""

from __future__ import annotations

import base64
import dataclasses
import functools
import time

import numpy as np
from jaxtyping import Float32

from linnet.core.errors import invalid
from linnet.data.embeddings.neighbors import NeighborIndex
from linnet.data.encoders import Encoder
from linnet.data.encoders.encoder import encode_prompt
from linnet.data.images import to_png
from linnet.models.prior.conditions import truncate_encodings
from linnet.models.prior.config import PriorConfig
from linnet.models.prior.params import PriorParams
from linnet.serve.prior.engine import PriorEngine
from linnet.serve.prior.request import OnSampleEvent, SampleRequest

MAX_GALLERY = 100_000
"""Maximum rows of the index. Each lookup compares with all of them, many times per second while a client streams progress."""
MAX_CACHED_IMAGES = 4096


@dataclasses.dataclass(frozen=True, kw_only=True)
class Neighbor:
    """An image near an embedding."""

    row: int
    cosine: float
    caption: str | None
    image: str | None
    """PNG in base64, if the dataset has images."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServedPrior:
    name: str
    engine: PriorEngine
    encoder: Encoder | None
    """The encoder of the embeddings it was trained on; None: unknown, and requests must give embeddings."""
    gallery: NeighborIndex | None
    has_images: bool
    """Whether the gallery has images, not only captions."""
    created: int

    @property
    def family(self) -> str:
        return "prior"

    @property
    def width(self) -> int:
        return self.engine.cfg.dim

    @property
    def text_width(self) -> int:
        return self.engine.cfg.d_text

    @property
    def timesteps(self) -> int:
        return self.engine.cfg.timesteps

    @property
    def can_guide(self) -> bool:
        return self.engine.cfg.can_guide

    @property
    def max_encodings(self) -> int:
        return self.engine.cfg.max_text_len if self.engine.cfg.text_encodings else 0

    @property
    def takes_text(self) -> bool:
        """Whether its text encoder is available, and gives token encodings if the model needs them."""
        return self.encoder is not None and (not self.max_encodings or self.encoder.text_len > 0)

    @property
    def gallery_rows(self) -> int:
        return 0 if self.gallery is None else self.gallery.n_rows

    @property
    def state_bytes(self) -> int:
        return self.engine.backend.state_bytes

    @property
    def fingerprint(self) -> str:
        return self.engine.fingerprint

    def encode(self, text: str) -> tuple[Float32[np.ndarray, " X"], Float32[np.ndarray, "L X"] | None]:
        assert self.encoder is not None
        embed, encodings = encode_prompt(self.encoder, text, with_encodings=self.engine.cfg.text_encodings)
        return embed, truncate_encodings(encodings, self.engine.cfg)

    def nearest(self, embedding: Float32[np.ndarray, " D"], k: int) -> list[Neighbor]:
        """Return the `k` nearest images by cosine similarity, nearest first."""
        assert self.gallery is not None
        found = self.gallery.nearest(embedding[None], k)
        captions = found.captions[0] if found.captions else [None] * found.rows.shape[1]
        images = (
            [None] * len(captions)
            if found.images is None
            else [_png(one.tobytes(), one.shape) for one in found.images[0]]
        )
        return [
            Neighbor(row=int(row), cosine=float(cosine), caption=caption, image=image)
            for row, cosine, caption, image in zip(found.rows[0], found.cosines[0], captions, images, strict=True)
        ]

    def submit(self, request: SampleRequest, on_event: OnSampleEvent) -> None:
        self.engine.submit(request, on_event)

    def cancel(self, id: str) -> None:
        self.engine.cancel(id)

    def stats(self) -> dict[str, float]:
        return self.engine.stats()


def serve_prior(
    name: str,
    cfg: PriorConfig,
    params: PriorParams,
    *,
    encoder: Encoder | None,
    gallery: NeighborIndex | None,
    n_slots: int,
    max_waiting: int,
) -> ServedPrior:
    """Check the encoder, compile a prior's programs and start its engine."""
    if encoder is not None:
        width = encoder.embed_texts(["a linnet"]).shape[1]
        if cfg.text_encodings and encoder.text_len:
            encoder.encode_texts(["a linnet"])  # compile now, so that the first request does not wait
        if width != cfg.d_text:
            raise invalid(
                f"the text width of {encoder.name}",
                width,
                f"{cfg.d_text}, the model's",
                "use the encoder of the run's data",
            )
    engine = PriorEngine(cfg, params, n_slots=n_slots, max_waiting=max_waiting)
    engine.backend.warm_up()
    anywhere = np.ones((1, cfg.dim), np.float32)
    return ServedPrior(
        name=name,
        engine=engine.start(),
        encoder=encoder,
        gallery=gallery,
        has_images=gallery is not None and gallery.nearest(anywhere, 1).images is not None,
        created=int(time.time()),
    )


@functools.lru_cache(maxsize=MAX_CACHED_IMAGES)
def _png(pixels: bytes, shape: tuple[int, ...]) -> str:
    """Encode an image as base64 PNG. Cached, because progress events repeat the same few images."""
    return base64.b64encode(to_png(np.frombuffer(pixels, np.uint8).reshape(shape))).decode()
