"""Published chip specifications for the roofline model. Peaks are for dense matmuls and are not reached in practice."""

from __future__ import annotations

import dataclasses

from linnet.core.errors import invalid


@dataclasses.dataclass(frozen=True, kw_only=True)
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


_GOOGLE = "Google Cloud TPU documentation"

CHIPS = {
    chip.name: chip
    for chip in (
        Chip(
            name="tpu-v4",
            bf16_flops=275e12,
            float32_flops=275e12,
            hbm=32 * 2**30,
            hbm_bandwidth=1200e9,
            link=1.1e15 / 4096,  # published for the whole pod, as the bandwidth of an all-reduce
            domain=4096,
            network=25e9 / 8,  # not published for v4: assumed to equal v5e's
            source=f"{_GOOGLE}, v4",
        ),
        Chip(
            name="tpu-v5e",
            bf16_flops=197e12,
            float32_flops=197e12,
            hbm=16e9,
            hbm_bandwidth=819e9,
            link=1600e9 / 8,
            domain=256,
            network=6.4e12 / 8 / 256,
            source=f"{_GOOGLE}, v5e",
        ),
        Chip(
            name="tpu-v5p",
            bf16_flops=459e12,
            float32_flops=459e12,
            hbm=95e9,
            hbm_bandwidth=2765e9,
            link=1200e9 / 2,  # published for both directions together
            domain=8960,
            network=50e9 / 8,
            source=f"{_GOOGLE}, v5p",
        ),
        Chip(
            name="tpu-v6e",
            bf16_flops=918e12,
            float32_flops=918e12,
            hbm=32e9,
            hbm_bandwidth=1640e9,
            link=3584e9 / 8,
            domain=256,
            network=25.6e12 / 8 / 256,
            source=f"{_GOOGLE}, v6e",
        ),
        Chip(
            name="a100",
            bf16_flops=312e12,
            float32_flops=156e12,
            hbm=80e9,
            hbm_bandwidth=2039e9,
            link=600e9 / 2,  # NVLink is published for both directions together
            domain=8,
            network=200e9 / 8,
            source="NVIDIA A100 80GB SXM datasheet; DGX A100 user guide (one 200 Gb/s adapter per GPU)",
        ),
        Chip(
            name="h100",
            bf16_flops=989.4e12,
            float32_flops=494.7e12,
            hbm=80e9,
            hbm_bandwidth=3350e9,
            link=900e9 / 2,
            domain=8,
            network=400e9 / 8,
            source="NVIDIA H100 SXM datasheet; MLPerf system descriptions (one 400 Gb/s adapter per GPU)",
        ),
    )
}


def get(name: str) -> Chip:
    if name not in CHIPS:
        raise invalid("--chip", name, f"one of {', '.join(CHIPS)}", "choose the nearest of them")
    return CHIPS[name]
