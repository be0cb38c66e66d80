"""Encoders that map captions and images to vectors of one space: the built-in encoder, and others by name."""

from linnet.core.errors import invalid
from linnet.data.encoders.encoder import Encoder as Encoder


def open_encoder(name: str) -> Encoder:
    """Open `builtin`, or `open_clip:MODEL/WEIGHTS`."""
    if name == "builtin":
        from linnet.data.encoders.builtin import open_builtin

        return open_builtin()
    kind, _, model = name.partition(":")
    if kind == "open_clip" and model:
        from linnet.data.encoders.open_clip import OpenClipEncoder

        return OpenClipEncoder(model)
    raise invalid(
        "--encoder", name, "builtin or open_clip:MODEL/WEIGHTS", "use builtin, or open_clip:ViT-B-32/laion2b_s34b_b79k"
    )
