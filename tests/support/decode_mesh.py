"""Models that decode on a mesh and on one device, side by side, for the tests of it. Run in a process that sees eight devices.

Widths are such that a device's part is at least 32 wide: LLVM takes minutes over some smaller products.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tiny
from checkpoint_mesh import say
from jax.sharding import Mesh

from linnet.cli.sample import sample_command
from linnet.cli.serve import serve_command
from linnet.core import quant, rng
from linnet.core.dtypes import WeightDtype
from linnet.core.params import Spec, map_specs
from linnet.core.special_tokens import N_BYTE_IDS
from linnet.generate.samples import sample_text, write_sample
from linnet.models import registry
from linnet.models.moe.config import MoEConfig
from linnet.models.tensor_parallel import OnMesh, put_weights
from linnet.models.vq.config import VQConfig
from linnet.nn.sampling import sampling_settings
from linnet.parallel import sharding
from linnet.runs.load import write_run
from linnet.runs.vocabulary import Vocabulary
from linnet.tokenizers.base import BytesTokenizer

VQ: dict[str, Any] = {
    "n_vocab": 31,  # no mesh divides it
    "d_model": 32,
    "d_k": 32,
    "d_v": 128,
    "n_code": 16,
    "n_layer": 1,
    "block_len": 8,
    "mem_len": 8,
}
MODELS: dict[str, VQConfig | MoEConfig] = {
    "one head": VQConfig(**VQ),
    "heads": VQConfig(**{**VQ, "n_head": 4, "d_v": 32, "e_tie": True}),
    "experts": VQConfig(**VQ, n_expert=4, n_choice=2, widening=6.0),
    "moe": MoEConfig(
        n_vocab=32,
        d_model=32,
        d_k=32,
        n_q_head=8,
        n_kv_head=4,
        n_layer=2,
        n_expert=4,
        n_choice=2,
        widening=6.0,
        context=256,
        score_scale=32**-0.5,
        embed_scale=4.0,
    ),
}
PROMPTS = ([1, 5, 6, 7, 8, 9, 3, 2, 17, 4, 11], [1, 4, 4, 2], [1])
N_TICKS = 8


def make_weights(cfg: Any, weights: WeightDtype = "float32") -> tuple[Any, Any]:
    """Every one of them counts."""
    family, random = _family(cfg), np.random.default_rng(1)

    def draw(spec: Spec) -> jax.Array:
        spread = spec.layer_shape[-2] ** -0.5 if len(spec.layer_shape) > 1 else 0.1
        return jnp.asarray((spec.init == "ones") + random.normal(0, spread, spec.shape), jnp.float32)

    specs = family.param_specs(cfg)
    return quant.cast_params(map_specs(draw, specs), specs, weights), map_specs(draw, family.buffer_specs(cfg))


def _family(cfg: Any) -> Any:
    return registry.tokens("vq" if isinstance(cfg, VQConfig) else "moe")


class Model:
    """Three sequences in three slots: one greedy, two drawn."""

    def __init__(self, cfg: Any, mesh: Mesh | None, weights: WeightDtype = "float32") -> None:
        family = _family(cfg)
        params, buffers = make_weights(cfg, weights)
        if mesh is not None:
            params = put_weights(family.param_specs(cfg), params, mesh, family.rules)
            buffers = put_weights(family.buffer_specs(cfg), buffers, mesh, family.rules)
        self.cfg, self.mesh = cfg, mesh
        self.programs: dict[int, Any] = {}
        self.decoder: Any = family.decoder if mesh is None else OnMesh(family.decoder, mesh)
        self.params, self.buffers = self.decoder.cast_weights(params), buffers
        self.prepared = self.decoder.prepare(self.params, buffers, cfg)
        self.settings = jax.tree.map(np.array, sampling_settings(3, top_p=0.95))
        self.settings.temperature[0] = 0.0
        self.keys = jnp.stack([rng.sample_key(seed) for seed in range(3)])

    def read(self, prompt: Sequence[int]) -> Any:
        return self.decoder.prefill(self.params, self.buffers, prompt, self.cfg)

    def slots(self, states: dict[int, Any]) -> Any:
        slots = self.decoder.init_slots(self.cfg, 3)
        for i, state in states.items():
            slots = self.decoder.insert(slots, state, i)
        return slots

    def arguments(self, slots: Any, tokens: Any, rows: Sequence[int] = (0, 1, 2)) -> tuple[Any, ...]:
        """`rows`: whose settings and keys the slots have."""
        at = np.array(rows)
        settings = jax.tree.map(lambda x: x[at], self.settings)
        seen = np.zeros((len(rows), self.cfg.n_vocab), np.int32)
        return self.prepared, slots, np.asarray(tokens, np.int32), settings, self.keys[at], seen

    def write(self, slots: Any, tokens: Any, n: int, rows: Sequence[int] = (0, 1, 2)) -> tuple[Any, Any, Any]:
        """`n` dispatches: the slots after them, all tokens, and their log-probabilities."""
        told = []
        for _ in range(n):
            arguments = self.arguments(slots, tokens, rows)
            slots, _, drawn, logprobs, _ = self.program(arguments)(*arguments)
            told.append((np.asarray(drawn), np.asarray(logprobs)))
            tokens = told[-1][0][-1]
        drawn, logprobs = (np.concatenate(x) for x in zip(*told, strict=True))
        return slots, drawn, logprobs

    def take(self, slots: Any, i: int, n_read: int) -> Any:
        return self.decoder.extract(self.prepared, slots, i, self.cfg, n_read)

    def program(self, arguments: tuple[Any, ...]) -> Any:
        """Of a dispatch of so many slots. What it is compiled for must not change: a slot's arrays lie where they lay before."""
        n_slot = len(arguments[2])
        if n_slot not in self.programs:
            with contextlib.nullcontext() if self.mesh is None else jax.set_mesh(self.mesh):
                lowered = _family(self.cfg).decoder.decode.lower(*arguments, cfg=self.cfg, n_ticks=N_TICKS)
                self.programs[n_slot] = lowered.compile()
        return self.programs[n_slot]


def compare(one: Model, many: Model, n: int = 3) -> dict[str, Any]:
    """One model on one device, and on a mesh: by tokens, log-probabilities, and as states that travel."""
    first = [prompt[-1] for prompt in PROMPTS]
    states = {i: many.read(prompt[:-1]) for i, prompt in enumerate(PROMPTS) if len(prompt) > 1}
    alone = {i: one.read(prompt[:-1]) for i, prompt in enumerate(PROMPTS) if len(prompt) > 1}
    _, wanted, logprobs = one.write(one.slots(alone), first, n)
    _, drawn, logprobs_there = many.write(many.slots(states), first, n)

    # A slot by itself, and elsewhere after a stop.
    by_itself = many.write(many.decoder.single_slot(states[1], many.cfg), first[1:2], n, rows=[1])
    parked = many.write(many.slots(states), first, 1)
    state = many.take(parked[0], 1, len(PROMPTS[1]) - 1 + N_TICKS)
    slots = many.slots({2: state, 0: states[0]})
    moved = many.write(slots, [first[0], 1, parked[1][-1, 1]], n - 1, rows=[0, 0, 1])

    # Out of the mesh, on with one device, and back.
    abroad = one.write(one.slots({1: sharding.to_host(state)}), [1, parked[1][-1, 1], 1], 1)
    back = sharding.to_host(one.take(abroad[0], 1, len(PROMPTS[1]) - 1 + 2 * N_TICKS))
    home = many.write(many.slots({1: many.decoder.to_device(back)}), [1, abroad[1][-1, 1], 1], n - 2)
    journey = np.concatenate([parked[1][:, 1], abroad[1][:, 1], home[1][:, 1]])
    return {
        "tokens": bool((drawn == wanted).all()),
        "difference": float(np.max(np.abs(logprobs_there - logprobs) / np.maximum(np.abs(logprobs), 1.0))),
        "alone": _same(by_itself, 0, (drawn, logprobs_there), 0),
        "parked": _same(moved, 2, (drawn, logprobs_there), N_TICKS),
        "journey": bool((journey == wanted[:, 1]).all()),
    }


def _same(told: Any, slot: int, wanted: Any, start: int) -> bool:
    """Bit for bit the second sequence, from `start` on."""
    return all(x[:, slot].tobytes() == y[start:, 1].tobytes() for x, y in zip(told[1:], wanted, strict=True))


SHAPE = re.compile(r"(\w+)\[([\d,]*)\]")
WIDTHS = {"f32": 4, "s32": 4, "u32": 4, "pred": 1, "bf16": 2, "u16": 2, "s8": 1}


def collectives(program: str) -> dict[str, list[int]]:
    """The bytes that each one of a compiled program makes."""
    found: dict[str, list[int]] = {}
    for line in program.splitlines():
        hit = re.search(r"= (.*?) (all-\w[\w-]*|collective-\w[\w-]*|reduce-scatter)\(", line)
        if hit:
            sizes = [
                WIDTHS[kind] * int(np.prod([int(n) for n in shape.split(",") if n]))
                for kind, shape in SHAPE.findall(hit[1])
            ]
            found.setdefault(hit[2], []).append(sum(sizes))
    return found


def report(name: str, meshes: Sequence[str], weights: WeightDtype = "float32") -> None:
    cfg = MODELS[name]
    one = Model(cfg, None, weights)
    for text in meshes:
        many = Model(cfg, sharding.open_mesh(text), weights)
        slots = many.slots({})
        say(
            name=name,
            mesh=text,
            **compare(one, many),
            collectives=collectives(many.programs[3].as_text()),
            weight_bytes=sharding.bytes_per_device(many.prepared),
            slot_bytes=sharding.bytes_per_device(slots),
            whole_weight_bytes=sharding.bytes_per_device(one.prepared),
            whole_slot_bytes=sharding.bytes_per_device(one.slots({})),
        )


def main(requested: str) -> None:
    for name, meshes, weights in json.loads(requested):
        report(name, meshes, weights)


def sample_in_run(folder: Path, name: str, *meshes: str) -> list[str]:
    """What a trainer's sample says, drawn on each mesh by all processes of a cluster."""
    cfg = dataclasses.replace(MODELS[name], n_vocab=N_BYTE_IDS)
    family, run = _family(cfg), tiny.config(folder, "vq" if isinstance(cfg, VQConfig) else "moe", model=cfg)
    params, buffers = make_weights(cfg)
    words = []
    for step, text in enumerate(meshes):
        mesh = sharding.open_mesh(text)
        host = jax.tree.map(np.asarray, (params, buffers))
        specs = (family.param_specs(cfg), family.buffer_specs(cfg))
        params_there, buffers_there = jax.tree.map(
            lambda x, to: jax.make_array_from_callback(x.shape, to, lambda index: x[index]),
            host,
            sharding.shardings(specs, mesh, family.rules),
        )
        with jax.set_mesh(mesh):
            told = Vocabulary(tokenizer=BytesTokenizer(), shape=None)
            words.append(
                sample_text(family, run, params_there, buffers_there, told, prompt="", n_tokens=40, seed=run.seed)
            )
            write_sample(family, run, params_there, buffers_there, told, folder, step, 40)
    return words


def outputs_of_commands(folder: Path, name: str, mesh: str) -> dict[str, list[Any]]:
    """What `linnet sample` and `linnet serve --batch` say of one run, on one device and on a mesh."""
    cfg = dataclasses.replace(MODELS[name], n_vocab=N_BYTE_IDS)
    run = tiny.config(folder, "vq" if isinstance(cfg, VQConfig) else "moe", model=cfg)
    write_run(folder / "run", run, *make_weights(cfg))
    bodies = [
        {"model": "run", "prompt": "linear" * i, "max_tokens": 40, "seed": i, "temperature": i % 2} for i in range(5)
    ]
    requested = [{"custom_id": str(i), "url": "/v1/completions", "body": body} for i, body in enumerate(bodies)]
    (folder / "asked.jsonl").write_text("".join(json.dumps(line) + "\n" for line in requested))
    output: dict[str, list[Any]] = {"sample": [], "serve": []}
    for number, text in enumerate(("", mesh)):
        words, answered = io.StringIO(), folder / f"answered {number}.jsonl"
        options = ["--prompt", "linear", "--n", "2", "--max-tokens", "40", "--json", "--mesh", text]
        with contextlib.redirect_stdout(words):
            sample_command([str(folder / "run"), *options])
            batch = ["--batch", str(folder / "asked.jsonl"), str(answered)]
            serve_command([str(folder / "run"), "--slots", "3", "--mesh", text, *batch])
        output["sample"].append([one["text"] for one in json.loads(words.getvalue().splitlines()[0])["samples"]])
        lines = sorted((json.loads(line) for line in answered.read_text().splitlines()), key=lambda x: x["custom_id"])
        output["serve"].append([line["response"]["body"]["choices"][0]["text"] for line in lines])
    return output
