"""The encoders of the open_clip package, for those who installed it: `pip install linnet[clip]`."""

from __future__ import annotations

import hashlib
import importlib
import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float32

from linnet.data.pixels import FORMATS, BrokenPicture, decode_pixels
from linnet.errors import UserError, refuse

HUB = "hf-hub:"
BATCH = 64


class OpenClip:
    """An `Encoder`. MODEL/WEIGHTS as `open_clip.list_pretrained()` lists them (WEIGHTS may be a file), or hf-hub:OWNER/NAME."""

    def __init__(self, model: str) -> None:
        package = _package()
        self.name = f"open_clip:{model}"
        self.fingerprint = hashlib.sha256(self.name.encode()).hexdigest()
        architecture, _, weights = (model, "", "") if model.startswith(HUB) else model.partition("/")
        if not weights and not model.startswith(HUB):
            # Without weights the package would give a network of random numbers, and say nothing.
            known = ", ".join(package.list_pretrained_tags_by_model(architecture)) or "none: the model is not known"
            raise refuse("--encoder", self.name, f"a model with its weights ({known})", f"use {self.name}/WEIGHTS")
        try:
            self._model, _, self._prepare = package.create_model_and_transforms(
                architecture, pretrained=weights or None
            )
            self._tokenize = package.get_tokenizer(architecture)
        except (RuntimeError, OSError, ValueError) as error:
            raise UserError(
                f"open_clip cannot open {model} ({error}). Fix: correct the name, or fetch its weights where there is a network and "
                "give their path as WEIGHTS."
            ) from None
        self._model.eval()

    def decode(self, encoded: bytes) -> np.ndarray:
        from PIL import Image

        decode_pixels(encoded, 1)  # the same pictures count as broken for every encoder
        try:
            with Image.open(io.BytesIO(encoded), formats=FORMATS) as image:
                return self._prepare(image.convert("RGB")).numpy()
        except (OSError, SyntaxError, ValueError):
            raise BrokenPicture("broken") from None

    def embed_images(self, pictures: np.ndarray) -> Float32[np.ndarray, "n D"]:
        return self._embed(self._model.encode_image, importlib.import_module("torch").from_numpy(pictures))

    def embed_texts(self, texts: Sequence[str]) -> Float32[np.ndarray, "n D"]:
        return self._embed(self._model.encode_text, self._tokenize(list(texts)))

    def _embed(self, encode: Any, values: Any) -> Float32[np.ndarray, "n D"]:
        with importlib.import_module("torch").no_grad():
            blocks = [encode(values[i : i + BATCH]).float().numpy() for i in range(0, len(values), BATCH)]
        out = np.concatenate(blocks)
        return out / np.linalg.norm(out, axis=-1, keepdims=True)


def _package() -> Any:
    try:
        return importlib.import_module("open_clip")
    except ImportError:
        raise UserError(
            "--encoder open_clip needs the package open_clip, which is not installed. Fix: install linnet[clip], or use "
            "--encoder builtin, which needs nothing."
        ) from None
