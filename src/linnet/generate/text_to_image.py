"""Text-to-image generation: an encoder embeds the text, a prior samples an image embedding, and a painter generates the image.

Letters: n images, E width of an embedding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float32, UInt8

from linnet.config.schema import RunConfig
from linnet.core.errors import UserError, invalid
from linnet.data.conditioning import BUILTIN
from linnet.data.embeddings import open_pairs
from linnet.data.embeddings.neighbors import NeighborIndex, l2_normalize
from linnet.data.embeddings.provenance import find_encoder
from linnet.data.encoders import Encoder, open_encoder
from linnet.generate.images import generate_images
from linnet.generate.prior import encode_with, sample_candidates
from linnet.models.prior.solver import default_steps, make_solver
from linnet.nn.sampling import SamplingSettings
from linnet.runs.folder import RunFolder
from linnet.runs.load import LoadedRun, open_run


@dataclasses.dataclass(frozen=True, kw_only=True)
class Imagination:
    prior: LoadedRun
    painter: LoadedRun
    encoder: Encoder
    shape: tuple[int, int, int]

    def embeds(
        self, text: str, seeds: Sequence[int], *, steps: int | None = None, guidance: float = 1.0
    ) -> Float32[np.ndarray, "n E"]:
        """Sample one unit-norm image embedding per seed. The server returns the same embeddings for the same seeds."""
        cfg = self.prior.cfg.prior
        table = make_solver(cfg, default_steps(cfg, "ddim") if steps is None else steps)
        texts = encode_with(self.encoder, [text], cfg)
        return l2_normalize(sample_candidates(self.prior, texts, table, seeds, guidance)[0])

    def paint(
        self,
        embeds: Float32[np.ndarray, "n E"],
        settings: SamplingSettings,
        seeds: Sequence[int],
        *,
        guidance: float = 1.0,
    ) -> UInt8[np.ndarray, "n h w 3"]:
        """Generate one image per embedding. `settings` has one row, which is used for all images."""
        if guidance != 1.0 and not self.painter.cfg.lm.can_guide:
            needs = "1: this painter never trained without its embedding (model.p_drop_condition is 0)"
            raise invalid("guidance", guidance, needs, "use 1, or train it with 0.1")
        return generate_images(self.painter, [b""] * len(embeds), settings, seeds, embeds, guidance)

    def nearest(self, embeds: Float32[np.ndarray, "n E"], k: int) -> list[list[tuple[float, str, int]]] | None:
        """Return cosines, captions and rows of the nearest images in the prior's training data.

        None if the data is not available or has no captions.
        """
        try:
            index = NeighborIndex(open_pairs(self.prior.cfg.pairs, self.prior.cfg.seed))
            found = index.nearest(embeds, k)
        except UserError:
            return None
        if found.captions is None:
            return None
        rows = index.source_rows[found.rows].tolist()
        return [list(zip(*row, strict=True)) for row in zip(found.cosines.tolist(), found.captions, rows, strict=True)]


def check_exist(**runs: Path) -> None:
    """Raise unless each path is a run; the names are those of the fields in the error."""
    for field, path in runs.items():
        if not RunFolder(path).config.exists():
            fix = "make both with `linnet train prior-emoji` and `linnet train emoji-imagine`, or name yours"
            raise invalid(field, f"{path}, where no run is", "a run", fix)


def open_imagination(prior: Path, painter: Path, checkpoint: str = "best") -> Imagination:
    """Load the prior and the painter. Raises if they cannot be used together."""
    check_exist(prior=prior, painter=painter)
    return join_runs(open_run(prior, checkpoint), open_run(painter, checkpoint))


def join_runs(prior: LoadedRun, painter: LoadedRun) -> Imagination:
    """Return the two together. Raises if they do not fit each other."""
    if prior.cfg.reads_tokens:
        got = f"{prior.folder}, a run of the family {prior.cfg.family}"
        raise invalid("prior", got, "a run of the family prior", _MAKE)
    encoder = _encoder_of_both(prior.cfg, painter.cfg, prior.folder, painter.folder)
    shape = painter.vocabulary.shape
    if shape is None:
        raise invalid("painter", f"{painter.folder}, which writes text", "a run that paints pictures", _MAKE_PAINTER)
    return Imagination(prior=prior, painter=painter, encoder=open_encoder(encoder), shape=shape)


_MAKE = "`linnet train prior-emoji` makes one"
_MAKE_PAINTER = "`linnet train emoji-imagine` makes one"


def _encoder_of_both(first: RunConfig, second: RunConfig, prior: Path, painter: Path) -> str:
    if not second.reads_tokens or not second.d_condition:
        needs = "a vq run with model.d_condition, whose images follow an embedding"
        raise invalid("painter", f"{painter}, which nothing conditions", needs, _MAKE_PAINTER)
    if first.prior.dim != second.d_condition:
        needs = f"{first.prior.dim}, the width of the embeddings of {prior}"
        raise invalid(f"model.d_condition of {painter}", second.d_condition, needs, "train it on those embeddings")
    name = find_encoder(first.pairs, prior)
    if name is None:
        needs = "pairs whose encoder is known, so that it can read your text"
        raise invalid("prior", f"{prior}, of {first.pairs.source}", needs, "make pairs with `linnet data embed`")
    if second.tokens.condition == BUILTIN and name != BUILTIN:
        needs = f"embeddings by {name}, as those of {prior}"
        raise invalid(f"data.condition of {painter}", BUILTIN, needs, "train it on an .npy of such embeddings")
    return name
