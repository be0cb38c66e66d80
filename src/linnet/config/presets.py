"""Presets: named configs. `linnet train NAME` starts one; flags override its settings."""

from __future__ import annotations

import dataclasses

from linnet.config.schema import DataConfig, OptimConfig, PairsConfig, RunConfig, TrainConfig
from linnet.core.errors import UserError, did_you_mean
from linnet.models.moe.config import MoEConfig
from linnet.models.prior.config import PriorConfig
from linnet.models.vq.config import VQConfig

# The paper's models differ in size, data and regularization; codebook size, window and carried state are the same.
_PAPER_STEPS = TrainConfig(log_every=100, eval_every=5000, checkpoint_every=1000, checkpoint_minutes=20, keep=5)


def _quickstart() -> RunConfig:
    return RunConfig(
        preset="quickstart",
        model=VQConfig(d_model=128, d_k=32, d_v=256, n_code=64, n_layer=2, block_len=64, mem_len=64),
        data=DataConfig(sequence_len=2048, update_len=512, batch_size=4),
        optim=OptimConfig(name="muon", lr=0.01, warmup_steps=30, steps=1000, clip=1.0),
        train=TrainConfig(log_every=10, eval_every=250, eval_sequences=32, checkpoint_every=250),
    )


def _bench_s() -> RunConfig:
    return RunConfig(
        preset="bench-s",
        model=VQConfig(),
        data=DataConfig(sequence_len=2048, update_len=2048, batch_size=2),
        optim=OptimConfig(name="adamw", lr=4e-4, warmup_steps=100, steps=1000),
    )


def _emoji() -> RunConfig:
    # An image row has 48 values: a block is two rows, the window three.
    return RunConfig(
        preset="emoji",
        model=VQConfig(d_model=128, d_k=32, d_v=256, n_code=64, n_layer=3, block_len=96, mem_len=144, pe_abs=True),
        data=DataConfig(source="emoji-16", sequence_len=768, update_len=768, batch_size=8),
        optim=OptimConfig(name="muon", lr=0.01, warmup_steps=50, steps=1500, clip=1.0),
        train=TrainConfig(log_every=10, eval_every=250, eval_sequences=64, checkpoint_every=250),
    )


def _emoji_imagine() -> RunConfig:
    # Embeddings predicted by a prior are inexact, so the model trains on noisy ones (cosine similarity about 0.9).
    cfg = _emoji()
    return dataclasses.replace(
        cfg,
        preset="emoji-imagine",
        model=dataclasses.replace(cfg.vq, d_condition=256, n_place=768, condition_noise=0.5),
        data=dataclasses.replace(cfg.tokens, condition="builtin"),
        optim=dataclasses.replace(cfg.optim, steps=800),
    )


def _enwik8_cpu() -> RunConfig:
    return RunConfig(
        preset="enwik8-cpu",
        model=VQConfig(d_model=192, d_k=48, d_v=384, n_code=128, n_layer=3, block_len=128, mem_len=128),
        data=DataConfig(source="enwik8", sequence_len=4096, update_len=1024, batch_size=4),
        optim=OptimConfig(name="muon", lr=0.01, warmup_steps=100, steps=4000, clip=1.0),
        train=TrainConfig(log_every=20, eval_every=500, eval_sequences=32, checkpoint_every=500),
    )


def _enwik8() -> RunConfig:
    return RunConfig(
        preset="enwik8",
        model=VQConfig(
            d_model=768,
            d_k=128,
            d_v=1536,
            n_code=512,
            n_layer=24,
            block_len=512,
            mem_len=512,
            p_dropsin=0.2,
            p_dropres=0.5,
            p_droplyr=0.3,
            remat="full",
        ),
        data=DataConfig(source="enwik8", sequence_len=8192, update_len=2048, batch_size=128),
        optim=OptimConfig(name="adamw", lr=4e-4, warmup_steps=10_000, steps=125_000, clip=0.1, decay=2e-4),
        train=_PAPER_STEPS,
    )


def _large(preset: str, n_vocab: int, pe_abs: bool, data: DataConfig, dropres: float, droplyr: float) -> RunConfig:
    return RunConfig(
        preset=preset,
        model=VQConfig(
            n_vocab=n_vocab,
            d_model=2048,
            d_k=128,
            d_v=4096,
            n_code=512,
            n_layer=24,
            block_len=512,
            mem_len=512,
            pe_abs=pe_abs,
            p_dropsin=0.1,
            p_dropres=dropres,
            p_droplyr=droplyr,
            e_tie=True,
            e_preln=True,
            e_scale=0.005,
            dtype="bfloat16",
            remat="full",
        ),
        data=data,
        optim=OptimConfig(name="adafactor", lr=0.01, warmup_steps=10_000, steps=500_000, clip=None),
        train=_PAPER_STEPS,
    )


def _pg19() -> RunConfig:
    data = DataConfig(source="pg19", sequence_len=8192, update_len=2048, batch_size=128)
    return _large("pg19", 32_000, False, data, dropres=0.1, droplyr=0.1)


def _imagenet64() -> RunConfig:
    data = DataConfig(source="imagenet64", sequence_len=12_288, update_len=1536, batch_size=128)
    return _large("imagenet64", 259, True, data, dropres=0.0, droplyr=0.0)


def _moe_cpu() -> RunConfig:
    return RunConfig(
        preset="moe-cpu",
        family="moe",
        model=MoEConfig(
            d_model=128,
            d_k=32,
            n_q_head=4,
            n_kv_head=2,
            n_layer=3,
            n_expert=8,
            n_choice=2,
            widening=3.0,
            context=512,
            embed_scale=128**0.5,
            score_scale=32**-0.5,
        ),
        data=DataConfig(sequence_len=512, update_len=512, batch_size=4),
        optim=OptimConfig(name="muon", lr=0.01, warmup_steps=30, steps=1000, clip=1.0),
        train=TrainConfig(log_every=10, eval_every=250, eval_sequences=64, checkpoint_every=250),
    )


def _vq_moe() -> RunConfig:
    quickstart = _quickstart()
    model = dataclasses.replace(quickstart.vq, n_expert=8, n_choice=2, widening=2.0)
    return dataclasses.replace(quickstart, preset="vq-moe", model=model)


def _dense_cpu() -> RunConfig:
    # A single expert as wide as the two that moe-cpu selects per token, so there is no load to balance.
    cfg = _moe_cpu()
    model = dataclasses.replace(cfg.model, n_expert=1, n_choice=1, widening=6.0, balance_weight=0.0, z_weight=0.0)
    return dataclasses.replace(cfg, preset="dense-cpu", model=model)


def _bench_moe() -> RunConfig:
    return RunConfig(
        preset="bench-moe",
        family="moe",
        model=MoEConfig(
            n_vocab=8192,
            d_model=512,
            d_k=64,
            n_q_head=8,
            n_kv_head=4,
            n_layer=4,
            n_expert=8,
            n_choice=2,
            widening=8.0,
            context=1024,
            embed_scale=512**0.5,
        ),
        data=DataConfig(sequence_len=512, update_len=512, batch_size=1),
        optim=OptimConfig(name="adamw", lr=4e-4, warmup_steps=100, steps=1000),
    )


def _grok_1() -> RunConfig:
    return RunConfig(
        preset="grok-1",
        family="moe",
        model=MoEConfig(
            n_vocab=131_072,
            end_id=2,
            d_model=6144,
            d_k=128,
            n_q_head=48,
            n_kv_head=8,
            n_layer=64,
            n_expert=8,
            n_choice=2,
            widening=8.0,
            context=8192,
            embed_scale=78.38367176906169,
            logit_scale=0.5773502691896257,
            score_scale=0.08838834764831845,
            dtype="bfloat16",
            remat="full",
        ),
        data=DataConfig(sequence_len=8192, update_len=8192, batch_size=8),
        optim=OptimConfig(name="adafactor", lr=1e-4, warmup_steps=1000, steps=100_000),
        train=_PAPER_STEPS,
    )


def _bench_prior() -> RunConfig:
    # The optimizer and EMA settings are those of the reference.
    return RunConfig(
        preset="bench-prior",
        family="prior",
        model=PriorConfig(dim=512, depth=6, n_head=8, d_head=64),
        data=PairsConfig(batch_size=64),
        optim=OptimConfig(
            lr=1.1e-4, schedule="constant", warmup_steps=0, clip=0.5, decay=6.02e-2, decay_by_lr=True, b2=0.99, eps=1e-6
        ),
        train=TrainConfig(ema_decay=0.9999, ema_power=2 / 3, ema_after=100, ema_every=10),
    )


def _prior_emoji() -> RunConfig:
    # All heads share one key and value (multi-query attention), so a token passes on only one head's width per layer: wide heads
    # matter more than many. A few thousand pairs overfit quickly; text noise and mixup keep the validation loss falling.
    return RunConfig(
        preset="prior-emoji",
        family="prior",
        model=PriorConfig(
            dim=256, depth=3, n_head=4, d_head=128, ff_mult=2, p_drop_attention=0.1, p_drop_ff=0.1, text_noise=1.5
        ),
        data=PairsConfig(batch_size=64, mix=0.5),
        optim=OptimConfig(
            lr=1e-3, schedule="cosine", warmup_steps=50, steps=2000, clip=0.5, decay=6.02e-2, decay_by_lr=True, b2=0.99
        ),
        train=TrainConfig(
            ema_decay=0.995, ema_power=2 / 3, ema_after=50, log_every=20, eval_every=250, checkpoint_every=250
        ),
    )


PRESETS = {
    "quickstart": ("Small vq model of the built-in corpus; minutes on two cores", _quickstart),
    "bench-s": ("vq model of the benchmarks", _bench_s),
    "emoji": ("Image model of 3,786 built-in emoji at 16 x 16; 25 minutes on two cores", _emoji),
    "emoji-imagine": ("Like emoji, conditioned on image embeddings, for `linnet imagine`", _emoji_imagine),
    "prior-emoji": (
        "Diffusion prior, trained on 3,786 built-in emoji and their captions; minutes on two cores",
        _prior_emoji,
    ),
    "enwik8-cpu": ("Small vq model of enwik8; more than an hour on two cores", _enwik8_cpu),
    "enwik8": ("Transformer-VQ paper, enwik8 (0.99 bits per byte in the paper)", _enwik8),
    "pg19": ("Transformer-VQ paper, PG-19 (26.6 word-level perplexity in the paper)", _pg19),
    "moe-cpu": ("Small mixture of experts, built-in corpus; minutes on two cores", _moe_cpu),
    "vq-moe": ("Linear-time attention with experts, built-in corpus; minutes on two cores", _vq_moe),
    "dense-cpu": ("Dense model with the active parameters of moe-cpu, for comparison", _dense_cpu),
    "bench-prior": ("Diffusion prior of the benchmarks", _bench_prior),
    "bench-moe": ("Mixture of experts of the benchmarks", _bench_moe),
    "grok-1": ("Grok-1 with the published sizes; `linnet import grok-1` imports the weights", _grok_1),
    "imagenet64": ("Transformer-VQ paper, ImageNet64 (3.16 bits per byte in the paper)", _imagenet64),
}


def get(name: str) -> RunConfig:
    if name not in PRESETS:
        raise UserError(
            f"there is no preset {name!r}.{did_you_mean(name, PRESETS)} Fix: use one of {', '.join(PRESETS)}, or the path of a "
            "config.json."
        )
    return PRESETS[name][1]()
