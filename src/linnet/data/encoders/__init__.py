"""Encoders that map captions and images to vectors of one space: the built-in encoder, and others by name."""

from linnet.data.encoders.encoder import Encoder as Encoder
from linnet.data.encoders.load import open_encoder as open_encoder
