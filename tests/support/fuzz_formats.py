"""The readers under fuzz test, by name: valid seed files, and how each is read through its public functions."""

from __future__ import annotations

import bz2
import dataclasses
import functools
import gzip
import io
import json
import lzma
import tarfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import document_files
import embedding_files
import image_files
import numpy as np
import tiny
import tokenizer_files
import torch_files
from fuzz_readers import Reader, Seed

GOLDENS = Path(__file__).parents[1] / "goldens"


def tar_of(members: Mapping[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def zip_of(members: Mapping[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in members.items():
            archive.writestr(zipfile.ZipInfo(name), data)
    return buffer.getvalue()


def saved(write: Callable[[Path], Any], folder: Path, name: str) -> bytes:
    write(folder / name)
    return (folder / name).read_bytes()


def packed_member(
    members: dict[str, bytes], name: str, pack: Callable[[dict[str, bytes]], bytes]
) -> Callable[[bytes], bytes]:
    """Packs the members, with another content for one of them."""
    return lambda content: pack(members | {name: content})


# Embeddings in pairs.


def npy_seeds(folder: Path) -> list[Seed]:
    values = embedding_files.vectors(6)
    return [
        Seed(f"{dtype}.npy", embedding_files.npy(values.astype(dtype))) for dtype in ("float16", "float32", "float64")
    ]


def read_npy(path: Path) -> None:
    from linnet.data.embeddings.validation import validate_rows
    from linnet.data.embeddings.vectors import Vectors, open_npy

    vectors = Vectors.concatenate([open_npy(path, "image")], "image")
    validate_rows(vectors, "image")
    vectors.read(np.arange(min(vectors.n_rows, 64)))


def pairs_config(**settings: Any) -> Any:
    from linnet.config.schema import PairsConfig

    return PairsConfig(**settings)


def npz_pair_seeds(folder: Path) -> list[Seed]:
    members = {
        "img_emb.npy": embedding_files.npy(embedding_files.vectors()),
        "text_emb.npy": embedding_files.npy(embedding_files.texts()),
        "caption.npy": embedding_files.npy(np.array(embedding_files.captions())),
    }
    full = [Seed("pairs.npz", zip_of(members)), Seed("deflated.npz", document_files.zipped(members))]
    return full + [Seed(f"{name}.npz", data, packed_member(members, name, zip_of)) for name, data in members.items()]


def read_pairs(path: Path) -> None:
    from linnet.data.embeddings.load import open_pairs

    pairs = open_pairs(pairs_config(source=str(path)), 0)
    if pairs.text_captions is not None:
        pairs.text_captions.read(np.arange(4))


def webdataset_seeds(folder: Path) -> list[Seed]:
    members = embedding_files.samples(0, 6)
    one = members["00000.img_emb.npy"]
    described = members["00001.json"]
    return [
        Seed("shard.tar", tar_of(members)),
        Seed("member.tar", one, packed_member(members, "00000.img_emb.npy", tar_of)),
        Seed("json.tar", described, packed_member(members, "00001.json", tar_of)),
    ]


def parquet_pair_seeds(folder: Path) -> list[Seed]:
    def write(path: Path) -> None:
        embedding_files.parquet(
            path,
            img_emb=embedding_files.vectors(),
            text_emb=embedding_files.texts(),
            caption=embedding_files.captions(),
        )

    return [Seed("pairs.parquet", saved(write, folder, "pairs.parquet"))]


# Text.


def document_seeds(folder: Path) -> list[Seed]:
    text = b"the cat sat on the mat\n" * 40
    rows = document_files.jsonl([{"text": f"row {i}", "n": i} for i in range(20)])
    members = {"a.txt": text, "b/c.txt": b"another text\n", "d.jsonl": rows, "e.txt.gz": gzip.compress(text)}
    packers = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": document_files.zst}
    return [
        Seed("text.txt", text),
        Seed("rows.jsonl", rows),
        *(Seed(f"text.txt{ending}", text, pack) for ending, pack in packers.items()),
        Seed("texts.zip", document_files.zipped(members)),
        Seed("texts.tar", document_files.tarred(members)),
        *(Seed(f"texts.tar{ending}", document_files.tarred(members), pack) for ending, pack in packers.items()),
    ]


def text_parquet_seeds(folder: Path) -> list[Seed]:
    rows = [f"row {i}" for i in range(20)]
    return [Seed("rows.parquet", document_files.parquet({"text": rows, "n": list(range(20))}, row_group_size=8))]


def read_documents(path: Path) -> None:
    from linnet.data.sources.documents import open_documents

    for part in open_documents(str(path)).parts():
        assert part.data


# Images.


def picture_seeds(folder: Path) -> list[Seed]:
    from PIL import Image

    found = []
    for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM"):
        buffer = io.BytesIO()
        Image.fromarray(image_files.noise(1, 12, 9)).save(buffer, kind)
        found.append(Seed(f"picture.{kind.lower()}", buffer.getvalue()))
    return found


def picture_archive_seeds(folder: Path) -> list[Seed]:
    members = {name: image_files.png(i) for i, name in enumerate(("a.png", "b/c.png", "d.png"))}
    columns = {"image": list(members.values())}
    return [
        Seed("pictures.zip", zip_of(members)),
        Seed("pictures.tar", tar_of(members)),
        Seed("pictures.parquet", saved(lambda p: image_files.write_parquet(p, columns), folder, "p.parquet")),
    ]


def read_pictures(path: Path) -> None:
    from linnet.data.images import BrokenImage, decode_pixels
    from linnet.data.sources.images import contains_images, open_images

    contains_images(str(path))
    for image in open_images(str(path)).images():
        try:
            decode_pixels(image.encoded, 8)
        except BrokenImage:  # counted and left out by `data prepare`
            continue


def captioned_seeds(folder: Path) -> list[Seed]:
    image = image_files.png(1)
    members = {"0.png": image, "0.txt": b"a cat", "1.png": image, "1.json": b'{"caption": "a dog"}'}
    columns = {"image": [image] * 4, "caption": ["a", "b", None, "d"]}
    return [
        Seed("shard.tar", tar_of(members)),
        Seed("json.tar", members["1.json"], packed_member(members, "1.json", tar_of)),
        Seed("rows.parquet", saved(lambda p: image_files.write_parquet(p, columns), folder, "rows.parquet")),
    ]


def read_captioned(path: Path) -> None:
    from linnet.data.embeddings.captioned_images import open_captioned

    for sample in open_captioned(str(path)).samples():
        sample.read_image()


def caption_table_seeds(folder: Path) -> list[Seed]:
    rows = [{"file_name": f"{i}.png", "caption": f"caption {i}"} for i in range(4)]
    return [
        Seed("captions.json", json.dumps({row["file_name"]: row["caption"] for row in rows}).encode()),
        Seed("captions.jsonl", document_files.jsonl(rows)),
        Seed("captions.parquet", document_files.parquet({name: [r[name] for r in rows] for name in rows[0]})),
    ]


def read_caption_table(path: Path) -> None:
    for other in path.parent.iterdir():
        if other.name != path.name:
            other.unlink()
    for i in range(2):
        (path.parent / f"{i}.png").write_bytes(image_files.png(i))
    read_captioned(path.parent)


# Tokenizers.


def sentencepiece_seeds(folder: Path) -> list[Seed]:
    return [
        Seed("bpe.model", tokenizer_files.sentencepiece(model_type="bpe", byte_fallback=True)),
        Seed("unigram.model", tokenizer_files.sentencepiece(model_type="unigram", hard_vocab_limit=False)),
    ]


def tokenizer_json_seeds(folder: Path) -> list[Seed]:
    makers = (tokenizer_files.gpt2, tokenizer_files.llama, tokenizer_files.metaspace, tokenizer_files.wordpiece)
    return [Seed(f"{make.__name__}.json", make()) for make in makers]


def read_tokenizer(path: Path) -> None:
    from linnet.tokenizers.load import open_tokenizer

    tokenizer = open_tokenizer(str(path))
    tokenizer.decode(tokenizer.encode("the cat \u00e9 sat\n".encode() + b"\xff"))
    tokenizer.lengths()
    tokenizer.pieces(range(min(tokenizer.n_vocab, 8)))


# Weights.


@functools.cache
def tiny_run() -> tuple[Any, Any, Any]:
    import jax

    from linnet.core.params import init
    from linnet.models import registry

    cfg = tiny.config(Path("corpus.txt"))
    family = registry.get(cfg.family)
    make = lambda specs: init(specs, jax.random.key(0))  # noqa: E731
    return cfg, make(family.param_specs(cfg.model)), make(family.buffer_specs(cfg.model))


def safetensors_seeds(folder: Path) -> list[Seed]:
    from linnet.config import codec
    from linnet.core.pytree import named_leaves
    from linnet.runs.weights_file import FORMAT, export_safetensors, fingerprint

    cfg, params, buffers = tiny_run()
    write = lambda path: export_safetensors(params, buffers, codec.to_json(cfg), path)  # noqa: E731

    def signed(config: bytes) -> bytes:
        """With another config and the fingerprint that belongs to it, as a forged file would have it."""
        from safetensors.numpy import save

        text = config.decode("utf-8", "replace")
        arrays = {name: np.asarray(leaf) for name, leaf in named_leaves({"params": params, "buffers": buffers})}
        return save(arrays, {"format": FORMAT, "config": text, "fingerprint": fingerprint(arrays, text)})

    return [
        Seed("run.safetensors", saved(write, folder, "run.safetensors")),
        Seed("signed.safetensors", json.dumps(codec.to_json(cfg)).encode(), signed),
    ]


def read_exported(path: Path) -> None:
    from linnet.runs.weights_file import import_safetensors

    import_safetensors(path)


def read_stored(path: Path) -> None:
    from linnet.runs.stored_array import read_safetensors

    for array in read_safetensors(path)[0].values():
        array.read()


def stored_seeds(folder: Path) -> list[Seed]:
    from safetensors.numpy import save

    arrays = {"a": np.ones((3, 4), np.float32), "b": np.arange(5, dtype=np.int8), "c": np.ones((2, 2, 2), np.float16)}
    return [Seed("weights.safetensors", save(arrays, {"format": "pt"}))]


def vq_tree() -> dict[str, np.ndarray]:
    from linnet.models.vq.convert import to_reference

    cfg, params, buffers = tiny_run()
    return to_reference(params, buffers, cfg.vq)


def npz_seeds(folder: Path) -> list[Seed]:
    cfg, _, _ = tiny_run()
    meta = {"family": "vq", "kind": "params", "config": dataclasses.asdict(cfg.model)}
    arrays = {**vq_tree(), "meta": np.array(json.dumps(meta))}
    members = {f"{name}.npy": embedding_files.npy(value) for name, value in arrays.items()}
    chosen = [next(iter(members)), "meta.npy"]
    return [
        Seed("weights.npz", zip_of(members)),
        *(Seed(f"member{i}.npz", members[name], packed_member(members, name, zip_of)) for i, name in enumerate(chosen)),
    ]


def flax_seeds(folder: Path) -> list[Seed]:
    import msgpack

    def array(value: np.ndarray) -> msgpack.ExtType:
        return msgpack.ExtType(1, msgpack.packb([list(value.shape), value.dtype.name, value.tobytes()]))

    tree: dict[str, Any] = {}
    for name, value in vq_tree().items():
        *folders, last = name.split("/")
        node = tree
        for part in folders:
            node = node.setdefault(part, {})
        node[last] = array(np.asarray(value))
    chunks = {"0": array(np.ones(3, np.float32)), "1": array(np.ones(3, np.float32))}
    extra = {"__msgpack_chunked_array__": True, "shape": {"0": 2, "1": 3}, "chunks": chunks}
    return [Seed("checkpoint_1", cast(bytes, msgpack.packb({"params": tree, "extra": extra, "step": 3})))]


def read_transformer_vq(path: Path) -> None:
    from linnet.convert import transformer_vq

    tree, settings = transformer_vq.read_transformer_vq(path)
    model = transformer_vq.import_config(tree, settings, defaults={"block_len": 8, "mem_len": 8})
    transformer_vq.to_model(tree, model)


def torch_seeds(folder: Path) -> list[Seed]:
    def members(path: Path) -> dict[str, bytes]:
        with zipfile.ZipFile(path) as archive:
            return {name: archive.read(name) for name in archive.namelist()}

    seeds = []
    made = torch_files.Writer().save(folder / "made.pth", {"a": np.ones((2, 3), np.float32), "step": 7})
    for path in (made, GOLDENS / "prior" / "ckpt" / "nowarmup_model.pth"):
        inside = members(path)
        program = next(name for name in inside if name.endswith("data.pkl"))
        seeds += [
            Seed(path.name, path.read_bytes()),
            Seed(f"program_{path.name}", inside[program], packed_member(inside, program, zip_of)),
        ]
    return seeds


def read_torch(path: Path) -> None:
    from linnet.convert.torch_pickle import read_torch

    read_torch(path)


def read_prior_checkpoint(path: Path) -> None:
    from linnet.convert.dalle2.prior import read_prior_checkpoint

    read_prior_checkpoint(path)


def prior_checkpoint_seeds(folder: Path) -> list[Seed]:
    return torch_seeds(folder)[2:]


def grok_seeds(folder: Path) -> list[Seed]:
    names = ("tensor00001_000", "tensor00005_000", "tensor00009_000")
    return [Seed(name, (GOLDENS / "grok" / "tiny_A" / "ckpt-0" / name).read_bytes()) for name in names]


def read_grok(path: Path) -> None:
    from linnet.convert.grok.pickle_reader import StoredPair, read_pickle

    found = read_pickle(path)
    for array in (found.weight, found.scales) if isinstance(found, StoredPair) else (found,):
        array.read()


# Settings, sessions, prepared data, reference files.


def config_seeds(folder: Path) -> list[Seed]:
    from linnet.config import codec, presets

    return [
        Seed(f"{name}.json", json.dumps(codec.to_json(presets.get(name)), indent=2).encode())
        for name in ("quickstart", "prior-emoji")
    ]


def read_config(path: Path) -> None:
    from linnet.config import codec

    codec.load(path)


def dalle2_seeds(folder: Path) -> list[Seed]:
    return [Seed(path.name, path.read_bytes()) for path in sorted((GOLDENS / "dalle2_configs").glob("*.json"))]


def read_dalle2(path: Path) -> None:
    from linnet.convert.dalle2 import config as dalle2_config
    from linnet.convert.dalle2 import schema as dalle2_schema

    values = dalle2_schema.read_json(path)
    if dalle2_schema.is_dalle2_config(values):
        parts = dalle2_schema.parse_config(values, path)
        dalle2_config.run_config(parts)
        list(dalle2_config.remarks(parts))


def grok_settings_seeds(folder: Path) -> list[Seed]:
    return [Seed("config.json", (GOLDENS / "grok" / "tiny_A" / "config.json").read_bytes())]


def read_grok_settings(path: Path) -> None:
    from linnet.convert.grok.settings import grok_config

    grok_config(path)


def template_seeds(folder: Path) -> list[Seed]:
    roles = {role: {"prefix": f"<{role}>", "suffix": "\n"} for role in ("system", "user", "assistant")}
    return [Seed("chat_template.json", json.dumps({"roles": roles, "stop": ["\n"]}).encode())]


def read_template(path: Path) -> None:
    from linnet.serve.chat_template import read_template

    read_template(path.parent)


def abstract_state(n: int) -> Any:
    return {"memory": np.zeros((2, 3), np.float32), "at": np.zeros((1,), np.int32)}


def state_seeds(folder: Path) -> list[Seed]:
    from linnet.serve import state as states

    state = states.State(memory=abstract_state(3), last=4, n_tokens=3, model="m" * 64)

    def forged(meta: bytes) -> bytes:
        from safetensors.numpy import save

        return save(abstract_state(3), {states.META: meta.decode("utf-8", "replace")})

    content = states.to_bytes(state)
    size = int.from_bytes(content[:8], "little")
    meta = json.loads(content[8 : 8 + size])["__metadata__"][states.META].encode()
    return [Seed("state", content), Seed("forged", meta, forged)]


def read_state(path: Path) -> None:
    from linnet.serve import state as states

    states.from_bytes(path.read_bytes(), abstract_state, "m" * 64)


SESSION = "session-" + "a" * 22


def session_seeds(folder: Path) -> list[Seed]:
    head = json.dumps({"n_tokens": 2, "call": "x"}).encode() + b"\n"
    return [Seed(f"{'m' * 32}/{SESSION}", head + state_seeds(folder)[0].content)]


def read_session(path: Path) -> None:
    from linnet.serve.session_folder import FolderSessions

    (path.parent / f"{SESSION}.lock").touch()
    sessions = FolderSessions(path.parent.parent, abstract_state, "m" * 64)
    assert len(sessions) == 1
    sessions.n_tokens(SESSION)
    sessions.get(SESSION)


def batch_seeds(folder: Path) -> list[Seed]:
    rows = [{"custom_id": str(i), "url": "/v1/completions", "body": {"prompt": "a"}} for i in range(3)]
    return [Seed("batch.jsonl", document_files.jsonl(list(rows)))]


def read_batch(path: Path) -> None:
    from linnet.serve.http.batch import answered_ids, read_lines

    read_lines(path)
    answered_ids(path)


def prepared_seeds(folder: Path) -> list[Seed]:
    """Every file of a prepared folder, the others intact beside it."""
    made = prepared(folder)
    return [Seed(f"{name}", data) for name, data in made.items()]


@functools.cache
def prepared(folder: Path) -> dict[str, bytes]:
    from linnet.data.prepare.chunks import SplitFractions
    from linnet.data.prepare.pipeline import PrepareConfig, prepare
    from linnet.data.sources.documents import open_documents
    from linnet.tokenizers.base import BytesTokenizer

    for i in range(4):
        (folder / f"{i}.txt").write_text(f"text number {i}\n" * 30)
    source = open_documents(str(folder / "*.txt"))
    task = PrepareConfig(
        source=source,
        tokenizer=BytesTokenizer(),
        fractions=SplitFractions(validation=0.3, test=0.3),
        size=None,
        max_broken=0,
    )
    prepare(task, folder / "prepared", workers=1)
    files = [path for path in sorted((folder / "prepared").rglob("*")) if path.is_file()]
    return {path.relative_to(folder / "prepared").as_posix(): path.read_bytes() for path in files}


_intact: dict[str, bytes] = {}
_damaged: list[str] = []
"""The file that the last call mutated."""


def read_prepared(path: Path) -> None:
    from linnet.config.schema import DataConfig
    from linnet.data import index as indexes
    from linnet.data import load_dataset

    root = path.parent
    if not _intact:
        _intact.update(prepared(root.parent / "seeds"))
        _damaged.extend(_intact)
    for name in _damaged:
        if name != path.name:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes(_intact[name])
    _damaged[:] = [path.name]
    indexes.find_problems(root, indexes.load(root), checksums=True)
    data = load_dataset(DataConfig(source=str(root), sequence_len=16, update_len=16, batch_size=2), 0)
    next(iter(data.evaluation("train", 2, 2)))


def golden_seeds(folder: Path) -> list[Seed]:
    seeds = []
    for golden in ("vq/schedule", "vq/nucleus", "prior/ddim_times", "prior/ema_scalar"):
        path = GOLDENS / f"{golden}.npz"
        with zipfile.ZipFile(path) as archive:
            members = {name: archive.read(name) for name in archive.namelist()}
        seeds += [
            Seed(path.name, path.read_bytes()),
            *(
                Seed(f"{i}_{path.name}", members[name], packed_member(members, name, zip_of))
                for i, name in enumerate(members)
                if i < 3 or name == "meta.npy"
            ),
        ]
    return seeds


_verified: list[str] = []


def read_golden(path: Path) -> None:
    import jax

    from linnet.verify import verify_file

    _verified.append(path.name)
    if len(_verified) % 500 == 0:
        jax.clear_caches()  # a program is compiled for every new shape, and kept
    verify_file(path)


READERS: dict[str, Reader] = {
    "npy embeddings": Reader(npy_seeds, read_npy),
    "npz embeddings": Reader(npz_pair_seeds, read_pairs),
    "webdataset embeddings": Reader(webdataset_seeds, read_pairs),
    "parquet embeddings": Reader(parquet_pair_seeds, read_pairs),
    "documents and archives": Reader(document_seeds, read_documents),
    "text parquet": Reader(text_parquet_seeds, read_documents),
    "pictures": Reader(picture_seeds, read_pictures),
    "picture archives": Reader(picture_archive_seeds, read_pictures),
    "captioned pictures": Reader(captioned_seeds, read_captioned),
    "caption tables": Reader(caption_table_seeds, read_caption_table),
    "sentencepiece": Reader(sentencepiece_seeds, read_tokenizer),
    "tokenizer.json": Reader(tokenizer_json_seeds, read_tokenizer),
    "exported safetensors": Reader(safetensors_seeds, read_exported),
    "stored safetensors": Reader(stored_seeds, read_stored),
    "npz weights": Reader(npz_seeds, read_transformer_vq),
    "flax msgpack": Reader(flax_seeds, read_transformer_vq),
    "torch .pth": Reader(torch_seeds, read_torch),
    "prior .pth": Reader(prior_checkpoint_seeds, read_prior_checkpoint),
    "grok pickle": Reader(grok_seeds, read_grok),
    "config.json": Reader(config_seeds, read_config),
    "dalle2 settings": Reader(dalle2_seeds, read_dalle2),
    "grok settings": Reader(grok_settings_seeds, read_grok_settings),
    "chat template": Reader(template_seeds, read_template),
    "session state": Reader(state_seeds, read_state),
    "session file": Reader(session_seeds, read_session),
    "batch file": Reader(batch_seeds, read_batch),
    "prepared data": Reader(prepared_seeds, read_prepared),
    "golden files": Reader(golden_seeds, read_golden),
}
