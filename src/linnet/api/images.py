"""Generated images, which a notebook shows inline, and the embeddings that a prior samples."""

from __future__ import annotations

import dataclasses
import html
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from linnet.api.text import check_seeds
from linnet.core.errors import invalid

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import Float32, UInt8
    from PIL.Image import Image

    from linnet.models.prior.solver import Solver
    from linnet.runs.load import LoadedRun


class Neighbor(NamedTuple):
    """A row of a dataset near to an embedding."""

    cosine: float
    caption: str | None
    row: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Images:
    """Generated images. A notebook shows them on one sheet."""

    pixels: UInt8[np.ndarray, "n h w 3"]
    seeds: tuple[int, ...]
    """The seed of each image: it alone gives the same image."""
    originals: UInt8[np.ndarray, "m h w 3"] | None = None
    """The images that were completed, each with the same number of images."""
    nearest: tuple[tuple[Neighbor, ...], ...] = ()
    """For `imagine`: the images of the prior's data nearest to each image's embedding; empty if its data is not available."""

    def __len__(self) -> int:
        return len(self.pixels)

    def __iter__(self) -> Iterator[Image]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, i: int) -> Image:
        """Return one image as a PIL image."""
        from PIL import Image

        return Image.fromarray(self.pixels[i])

    def sheet(self) -> bytes:
        """Return all images on one PNG. Completed images form rows, each after the image it was completed from."""
        import numpy as np

        from linnet.data.images import contact_sheet
        from linnet.generate.samples import SHEET_COLUMNS, sheet_scale

        pixels, columns = self.pixels, SHEET_COLUMNS
        if self.originals is not None:
            n = len(pixels) // len(self.originals)
            rows = [[one, *pixels[i * n : (i + 1) * n]] for i, one in enumerate(self.originals)]
            pixels, columns = np.stack([picture for row in rows for picture in row]), n + 1
        height, width, channels = pixels.shape[1:]
        return contact_sheet(pixels, columns, sheet_scale((height, width, channels)))

    def _repr_png_(self) -> bytes:
        return self.sheet()

    def __repr__(self) -> str:
        n, height, width, _ = self.pixels.shape
        return f"Images({n} of {width}x{height}, seeds {list(self.seeds)})"

    def save(self, folder: str | os.PathLike[str], name: str = "picture") -> tuple[list[Path], Path]:
        """Write each image as NAME_0000.png and so on, and the sheet as sheet.png. Return their paths."""
        folder = Path(folder)
        return self.save_as([folder / f"{name}_{i:04d}.png" for i in range(len(self))], folder / "sheet.png")

    def save_as(self, files: Sequence[Path], sheet: Path) -> tuple[list[Path], Path]:
        """Write each image to its file, and all of them to `sheet`."""
        from linnet.core.files import atomic_write
        from linnet.data.images import to_png

        try:
            sheet.parent.mkdir(parents=True, exist_ok=True)
            for file, picture in zip(files, self.pixels, strict=True):
                atomic_write(file, to_png(picture))
            atomic_write(sheet, self.sheet())
        except OSError as error:
            needs = f"a folder that can be written ({error.strerror})"
            raise invalid("out", str(sheet.parent), needs, "choose another") from None
        return list(files), sheet


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmbeddingSamples:
    """Image embeddings that a prior sampled, one per text."""

    texts: tuple[str, ...]
    embeddings: Float32[np.ndarray, "B D"]
    """For each text, the candidate most similar to it."""
    seeds: tuple[int, ...]
    """The seed of each chosen candidate."""
    cosines: Float32[np.ndarray, "B n"] | None
    """Cosine of each candidate with its text; None if texts and images have different widths."""
    nearest: tuple[tuple[Neighbor, ...], ...]
    """The nearest images of the prior's data; empty if it is not available."""
    pictures: UInt8[np.ndarray, "B k h w 3"] | None
    """The nearest images themselves, if the data has them."""
    steps: int
    note: str | None = None
    """Why there are no nearest images, if there are none."""

    def __len__(self) -> int:
        return len(self.texts)

    def sheet(self) -> bytes | None:
        """Return a PNG with the nearest images, one row per text, the nearest first; None if the data has no images."""
        from linnet.data.images import contact_sheet
        from linnet.generate.samples import sheet_scale

        if self.pictures is None:
            return None
        n_row, k, height, width, channels = self.pictures.shape
        flat = self.pictures.reshape(n_row * k, height, width, channels)
        return contact_sheet(flat, k, sheet_scale((height, width, channels)))

    def _repr_png_(self) -> bytes | None:
        return self.sheet()

    def _repr_html_(self) -> str | None:
        if self.pictures is not None:
            return None  # the picture says more
        rows = [
            f"<tr><td>{html.escape(text)}</td><td>{seed}</td><td>{_captions(found)}</td></tr>"
            for text, seed, found in zip(self.texts, self.seeds, self.nearest or [()] * len(self), strict=True)
        ]
        return f"<table><tr><th>text</th><th>seed</th><th>nearest</th></tr>{''.join(rows)}</table>"

    def __repr__(self) -> str:
        return f"EmbeddingSamples({list(self.texts)}, width {self.embeddings.shape[1]})"


def generate_images(
    run: LoadedRun, n: int, complete: Sequence[Path], keep: float, seed: int, **settings: Any
) -> Images:
    """Generate images, as `Run.generate_images` describes. `settings` are those of `sampling_settings`."""
    if n < 1:
        raise invalid("n", n, "at least 1", "use 1")
    check_seeds(seed, 1)
    if not 0 <= keep <= 1:
        raise invalid("keep", keep, "between 0 and 1", "use 0.5")
    import numpy as np

    from linnet.generate import images
    from linnet.nn.sampling import sampling_settings

    row, shape = sampling_settings(1, **settings), run.vocabulary.shape
    assert shape is not None
    originals = [_read_image(path, shape[0]) for path in complete]
    n_rows = int(shape[0] * keep) if originals else 0
    seen = [picture[:n_rows].tobytes() for picture in originals for _ in range(n)] or [b""] * n
    seeds = [(seed + i % n) % 2**32 for i in range(len(seen))]
    pixels = images.generate_images(run, seen, row, seeds)
    return Images(pixels=pixels, seeds=tuple(seeds), originals=np.stack(originals) if originals else None)


def _read_image(path: Path, size: int) -> UInt8[np.ndarray, "h w 3"]:
    from linnet.data.images import BrokenImage, decode_pixels

    try:
        return decode_pixels(path.read_bytes(), size)
    except OSError as error:
        needs = f"a file that can be read ({error.strerror})"
        raise invalid("complete", str(path), needs, "check the path") from None
    except BrokenImage as error:
        needs = f"a picture that can be read ({error.reason})"
        raise invalid("complete", str(path), needs, "choose another") from None


def sample_embeddings(
    run: LoadedRun,
    texts: str | Sequence[str],
    embeddings: Float32[np.ndarray, "*B X"] | None,
    text_encodings: Float32[np.ndarray, "*B L X"] | None,
    *,
    n: int,
    steps: int | None,
    solver: Solver,
    guidance: float,
    seed: int,
    nearest: int,
) -> EmbeddingSamples:
    """Sample embeddings, as `Run.sample` describes."""
    names = (texts,) if isinstance(texts, str) else tuple(texts)
    check_seeds(seed, 1)
    if nearest < 1:
        raise invalid("nearest", nearest, "at least 1", "use 8")
    from linnet.generate import prior

    cfg = run.cfg.prior
    table = prior.solver_table(cfg, n=n, steps=steps, solver=solver, guidance=guidance)
    if embeddings is not None:
        if names:
            raise invalid("embeddings", "given with texts", "given without texts", "leave one of them out")
        encoded = prior.given_texts(embeddings, text_encodings, cfg)
        names = tuple(f"embedding {i}" for i in range(len(encoded.embeds)))
    elif text_encodings is not None:
        needs = "left out without embeddings: those of a text are computed"
        raise invalid("text_encodings", "given", needs, "leave it out, or add embeddings")
    elif not all(isinstance(text, str) and text.strip() for text in names) or not names:
        raise invalid("texts", texts, "at least one text, none of them empty", "give a text, or embeddings")
    else:
        encoded = prior.encode_texts(run, names)
    seeds = [(seed + i) % 2**32 for i in range(n)]
    found = prior.sample_best(run, encoded, table, seeds, guidance)
    index, note = prior.open_neighbors(run)
    near = None if index is None else index.nearest(found.embeds, nearest)
    rows: list[tuple[Neighbor, ...]] = []
    if index is not None and near is not None:
        captions = near.captions or [[None] * near.rows.shape[1]] * len(names)
        source = index.source_rows[near.rows].tolist()
        rows = [tuple(map(Neighbor, *row)) for row in zip(near.cosines.tolist(), captions, source, strict=True)]
    return EmbeddingSamples(
        texts=names,
        embeddings=found.embeds,
        seeds=tuple(seeds[i] for i in found.chosen.tolist()),
        cosines=found.cosines,
        nearest=tuple(rows),
        pictures=None if near is None else near.images,
        steps=len(table),
        note=note,
    )


def _captions(found: Sequence[Neighbor]) -> str:
    return "<br>".join(f"{near.cosine:.3f} {html.escape(near.caption or f'row {near.row}')}" for near in found)
