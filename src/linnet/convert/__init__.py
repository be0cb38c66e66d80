"""Conversion from and to other formats: the official checkpoint of Transformer-VQ, and safetensors."""

from linnet.convert.transformer_vq import import_config, read_transformer_vq, to_model
from linnet.runs.weights_file import export_safetensors, import_safetensors

__all__ = ["export_safetensors", "import_config", "import_safetensors", "read_transformer_vq", "to_model"]
