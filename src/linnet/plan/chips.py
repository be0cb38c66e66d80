"""Published chip specifications for the roofline model. Peaks are for dense matmuls and are not reached in practice."""

from __future__ import annotations

import dataclasses

from linnet.core.errors import invalid


@dataclasses.dataclass(frozen=True)
class Chip:
    name: str
    bf16_flops: float
    float32_flops: float
    """Peak of float32 matmuls at JAX's default precision: bfloat16 on TPU, TF32 on GPU."""
    hbm: float
    """Memory in bytes."""
    hbm_bandwidth: float
    """Bytes per second, like all rates here."""
    link: float
    """Send bandwidth of a chip within its domain, over all its links together."""
    domain: int
    """Number of chips connected by those links: a pod, or the GPUs of a server."""
    network: float
    """Send bandwidth of a chip beyond its domain: its share of the host's network."""
    source: str

    def flops(self, dtype: str) -> float:
        return self.bf16_flops if dtype == "bfloat16" else self.float32_flops


_TPU = "Google Cloud TPU documentation"
_A100 = "NVIDIA A100 80GB SXM datasheet; DGX A100 user guide (one 200 Gb/s adapter per GPU)"
_H100 = "NVIDIA H100 SXM datasheet; MLPerf system descriptions (one 400 Gb/s adapter per GPU)"

# Links: those of tpu-v4 are published for a complete pod, as the bandwidth of an all-reduce; those of tpu-v5p and NVLink for both
# directions together. Network: not published for tpu-v4, and assumed to equal that of tpu-v5e.
_ROWS = (
    #    name       bf16      float32   HBM         its rate  link           domain  network            source
    Chip("tpu-v4",  275e12,   275e12,   32 * 2**30, 1200e9,   1.1e15 / 4096, 4096,   25e9 / 8,          f"{_TPU}, v4"),
    Chip("tpu-v5e", 197e12,   197e12,   16e9,       819e9,    1600e9 / 8,    256,    6.4e12 / 8 / 256,  f"{_TPU}, v5e"),
    Chip("tpu-v5p", 459e12,   459e12,   95e9,       2765e9,   1200e9 / 2,    8960,   50e9 / 8,          f"{_TPU}, v5p"),
    Chip("tpu-v6e", 918e12,   918e12,   32e9,       1640e9,   3584e9 / 8,    256,    25.6e12 / 8 / 256, f"{_TPU}, v6e"),
    Chip("a100",    312e12,   156e12,   80e9,       2039e9,   600e9 / 2,     8,      200e9 / 8,         _A100),
    Chip("h100",    989.4e12, 494.7e12, 80e9,       3350e9,   900e9 / 2,     8,      400e9 / 8,         _H100),
)  # fmt: skip
CHIPS = {chip.name: chip for chip in _ROWS}


def get(name: str) -> Chip:
    if name not in CHIPS:
        raise invalid("--chip", name, f"one of {', '.join(CHIPS)}", "choose the nearest of them")
    return CHIPS[name]
