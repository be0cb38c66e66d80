"""Every way in which pairs can be wrong is said with the file and the row, and nothing wrong is ever trained on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import embedding_files as files
import numpy as np
import pytest

from linnet.core.errors import UserError
from linnet.data.embeddings import EmbeddingPairs, PairsConfig, open_pairs


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def opened(source: Path | str, **settings: Any) -> EmbeddingPairs:
    return open_pairs(PairsConfig(**({"source": str(source), "batch_size": 4} | settings)), seed=3)


def rows_of(pairs: EmbeddingPairs) -> list[int]:
    return sorted(int(row) for name in ("train", "validation", "test") for row in pairs.split(name))


# Rows


def test_unusable_rows_are_skipped_counted_and_named(tmp_path: Path) -> None:
    image, text = files.vectors(), files.texts()
    image[12, 3] = np.nan
    image[20] = 0
    text[2, 0] = np.inf
    text[12] = 0
    pairs = opened(files.folder(tmp_path / "in", image, text))
    assert rows_of(pairs) == [i for i in range(files.N) if i not in (2, 12, 20)]
    assert pairs.origin["left_out"]["source"] == {
        "image_not_finite": 1,
        "image_zero": 1,
        "text_not_finite": 1,
        "text_zero": 1,
    }
    words = "\n".join(pairs.warnings())
    assert "img_emb_9.npy, row 2" in words
    assert "img_emb_10.npy, row 1" in words
    assert "text_emb_8.npy, row 2" in words
    for step in range(12):
        batch = pairs.batch(step)
        assert np.isfinite(batch.image_embed).all()
        assert np.isfinite(batch.text_embed).all()
        assert np.linalg.norm(batch.image_embed, axis=1).min() > 0.9


def test_half_precision_rows_whose_squares_vanish_are_not_zero(tmp_path: Path) -> None:
    tiny = np.full((files.N, files.IMAGE), 1e-7)
    pairs = opened(files.folder(tmp_path / "in", tiny, dtype=np.float16))
    assert len(rows_of(pairs)) == files.N
    assert any("mean norm" in warning for warning in pairs.warnings())


def test_many_bad_rows_are_counted_and_a_few_are_named(tmp_path: Path) -> None:
    image = files.vectors()
    image[:10] = np.nan
    (warning,) = opened(files.folder(tmp_path / "in", image)).warnings()
    assert "10 of 23" in warning
    assert warning.count(".npy, row ") == 3
    assert "7 more" in warning


def test_dataset_without_valid_rows_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no pair .* left to train on .*23 of 23"):
        opened(files.folder(tmp_path / "in", np.full((files.N, 4), np.nan)))


def test_vectors_that_are_not_normalized_are_remarked_on(tmp_path: Path) -> None:
    warnings = opened(files.folder(tmp_path / "in", 10 * files.vectors())).warnings()
    assert [w for w in warnings if "image embeddings have a mean norm of 10" in w]
    assert not [w for w in warnings if "text embeddings have a mean norm" in w]


def test_null_in_parquet_is_a_bad_row(tmp_path: Path) -> None:
    image: list[Any] = files.vectors().tolist()
    image[7] = None
    path = files.parquet(tmp_path / "a.parquet", image_embed=image, text_embed=files.texts())
    pairs = opened(path)
    assert 7 not in rows_of(pairs)
    assert "a.parquet, column image_embed, row 7" in pairs.warnings()[0]


# Shards


def test_misaligned_embedding_pairs_are_rejected_with_both_files(tmp_path: Path) -> None:
    root = files.folder(tmp_path / "in")
    np.save(root / "text_emb" / "text_emb_9.npy", files.texts()[:8])
    with pytest.raises(UserError, match=r"img_emb_9.npy has 9 rows, but .*text_emb_9.npy has 8: from row 8 on"):
        opened(root)


def test_misaligned_captions_are_rejected(tmp_path: Path) -> None:
    root = files.folder(tmp_path / "in")
    files.parquet(root / "metadata" / "metadata_10.parquet", caption=["a", "b"])
    with pytest.raises(UserError, match=r"img_emb_10.npy has 4 rows, but .*metadata_10.parquet has 2"):
        opened(root)


def test_metadata_without_captions_is_a_warning(tmp_path: Path) -> None:
    root = files.folder(tmp_path / "in")
    files.parquet(root / "metadata" / "metadata_9.parquet", url=["x"] * 9)
    pairs = opened(root)
    assert pairs.captions("train", [0]) is None
    assert "metadata_9.parquet has no column 'caption'" in pairs.warnings()[0]


@pytest.mark.parametrize(
    ("gone", "words"), [("text_emb/text_emb_9.npy", "a text shard"), ("img_emb/img_emb_9.npy", "an image shard")]
)
def test_shard_without_its_partner_is_rejected(tmp_path: Path, gone: str, words: str) -> None:
    root = files.folder(tmp_path / "in", metadata=False)
    (root / gone).unlink()
    with pytest.raises(UserError, match=rf"_9.npy has no partner: {words} with the number 9 is missing"):
        opened(root)


def test_gap_in_the_numbers_is_a_warning(tmp_path: Path) -> None:
    root = files.folder(tmp_path / "in")
    for gone in ("text_emb/text_emb_9.npy", "img_emb/img_emb_9.npy", "metadata/metadata_9.parquet"):
        (root / gone).unlink()
    pairs = opened(root)
    assert len(rows_of(pairs)) == 14
    assert "Of the shards 8 to 10" in pairs.warnings()[0]
    assert "1 is missing: number 9" in pairs.warnings()[0]


def test_shards_without_numbers_need_equal_counts(tmp_path: Path) -> None:
    for folder, names in (("i", ("a", "b")), ("t", ("a",))):
        (tmp_path / folder).mkdir()
        for name in names:
            np.save(tmp_path / folder / f"{name}.npy", files.vectors())
    with pytest.raises(UserError, match="2 image shards .* and 1 text shards"):
        opened("unused", images=str(tmp_path / "i"), texts=str(tmp_path / "t"))
    np.save(tmp_path / "t" / "b.npy", files.texts()[:, :0].reshape(files.N, 0))
    with pytest.raises(UserError, match="shape of"):
        opened("unused", images=str(tmp_path / "i"), texts=str(tmp_path / "t"))


@pytest.mark.parametrize("kind", ["image", "text"])
def test_another_width_is_rejected_with_both_files(tmp_path: Path, kind: str) -> None:
    root = files.folder(tmp_path / "in")
    stem = {"image": "img_emb", "text": "text_emb"}[kind]
    np.save(root / stem / f"{stem}_10.npy", files.vectors(4, 11))
    with pytest.raises(UserError, match=rf"{stem}_10.npy have the width 11, but those in .*{stem}_8.npy have"):
        opened(root)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is not an .npy array"),
        (b"not an array", "is not an .npy array"),
        (files.npy(files.vectors(9))[:-40], "is truncated: 212 bytes"),
        (files.npy(np.arange(9 * 7).reshape(9, 7)), "type of .* is 'int64'.*float16"),
        (files.npy(files.vectors(9)[0]), "shape of .*rows of numbers"),
    ],
)
def test_file_that_is_no_array_of_rows_is_rejected(tmp_path: Path, content: bytes, words: str) -> None:
    root = files.folder(tmp_path / "in")
    (root / "img_emb" / "img_emb_9.npy").write_bytes(content)
    with pytest.raises(UserError, match=words) as error:
        opened(root)
    assert "img_emb_9.npy" in str(error.value)


def test_arrays_of_objects_are_never_unpickled(tmp_path: Path) -> None:
    root = files.folder(tmp_path / "in")
    np.save(root / "img_emb" / "img_emb_9.npy", np.array([{"a": 1}] * 9, object), allow_pickle=True)
    with pytest.raises(UserError, match="img_emb_9.npy is pickled"):
        opened(root)


# Parquet, tars, npz


def test_rows_of_another_width_inside_a_parquet_are_named(tmp_path: Path) -> None:
    image = files.vectors().tolist()
    image[15] = image[15][:4]
    path = files.parquet(tmp_path / "a.parquet", image_embed=image, text_embed=files.texts())
    with pytest.raises(UserError, match=r"a.parquet, row 15: image_embed has the width 4, but 7 before"):
        opened(path)
    assert not list((tmp_path / "cache").rglob("*.part")), "nothing half-made stays"


def test_columns_are_found_by_their_usual_names_or_must_be_named(tmp_path: Path) -> None:
    path = files.parquet(tmp_path / "a.parquet", seen=files.vectors(), read=files.texts(), caption=files.captions())
    with pytest.raises(UserError, match=r"data.image_key is None.*seen, read, caption.*linnet data embed"):
        opened(path)
    assert opened(path, image_key="seen", text_key="read").image_width == files.IMAGE
    with pytest.raises(UserError, match="list of floating-point numbers"):
        opened(path, image_key="caption", text_key="read")


def test_corrupt_parquet_or_npz_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1 nothing PAR1")
    with pytest.raises(UserError, match="a.parquet is not a complete parquet file"):
        opened(tmp_path / "a.parquet")
    (tmp_path / "a.npz").write_bytes(b"PK nothing")
    with pytest.raises(UserError, match="a.npz is corrupt"):
        opened(tmp_path / "a.npz")


def test_samples_without_one_of_their_embeddings_are_left_out_and_named(tmp_path: Path) -> None:
    members = files.samples()
    del members["00003.text_emb.npy"], members["00007.img_emb.npy"]
    pairs = opened(files.tar(tmp_path / "a.tar", members))
    assert len(rows_of(pairs)) == files.N - 2
    assert pairs.captions("train", [3, 5, 6]) == ["caption 4", "caption 6", "caption 8"]
    assert pairs.origin["left_out"]["source"] == {"no_text": 1, "no_image": 1}
    words = "\n".join(pairs.warnings())
    assert "first 00003" in words
    assert "first 00007" in words


@pytest.mark.parametrize(
    ("member", "words"),
    [
        (files.npy(files.vectors(1, 9)[0]), r"00004 \(image\) is an array \(9,\)"),
        (files.npy(files.vectors(1)[0]), r"00004 \(image\) is an array \(7,\) of float32"),
        (files.npy(files.vectors(2).astype(np.float16)), r"00004 \(image\) is an array \(2, 7\)"),
        (b"nothing", r"00004 \(image\) is not an .npy array"),
        (files.npy(files.vectors(1)[0].astype(np.float16))[:-3], r"00004 \(image\) is truncated"),
    ],
)
def test_member_of_another_shape_is_rejected_by_name(tmp_path: Path, member: bytes, words: str) -> None:
    path = files.tar(tmp_path / "a.tar", files.samples() | {"00004.img_emb.npy": member})
    with pytest.raises(UserError, match=words):
        opened(path)


def test_bad_row_in_a_tar_is_named_by_its_sample(tmp_path: Path) -> None:
    nothing = files.npy(np.zeros(files.IMAGE, np.float16))
    pairs = opened(files.tar(tmp_path / "a.tar", files.samples() | {"00004.img_emb.npy": nothing}))
    assert 4 not in rows_of(pairs)
    assert "a.tar, 00004 (image)" in pairs.warnings()[0]


def test_extensions_in_a_tar_can_be_named_and_are_distinguished(tmp_path: Path) -> None:
    members = files.samples()
    for i in range(files.N):
        members[f"{i:05}.clip.npy"] = files.npy(np.full(3, np.nan if i == 1 else 1, np.float32))
    path = files.tar(tmp_path / "a.tar", members)
    assert len(rows_of(opened(path))) == files.N
    assert rows_of(opened(path, image_key="clip.npy")) == [0, *range(2, files.N)]


def test_tar_of_images_points_to_embed(tmp_path: Path) -> None:
    path = files.tar(tmp_path / "a.tar", {"0.png": b"x", "0.txt": b"a cat"})
    with pytest.raises(UserError, match=r"no image embeddings .*it has .png, .txt.*linnet data embed"):
        opened(path)


def test_tar_that_was_cut_is_rejected(tmp_path: Path) -> None:
    path = files.tar(tmp_path / "a.tar", files.samples())
    path.write_bytes(path.read_bytes()[: 512 * 9])
    with pytest.raises(UserError, match="a.tar is corrupt or truncated"):
        opened(path)


# Sources


def test_captions_without_text_embeddings_are_never_embedded_silently(tmp_path: Path) -> None:
    root = files.folder(tmp_path / "in")
    for path in (root / "text_emb").iterdir():
        path.unlink()
    (root / "text_emb").rmdir()
    with pytest.raises(
        UserError,
        match="no text embeddings .*has captions.*linnet data embed .*img_emb --metadata .*metadata --out DIR",
    ):
        opened(root)


def test_invalid_sources_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="an existing file, folder or glob, or 'emoji-pairs'"):
        opened(tmp_path / "nowhere")
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(UserError, match="it has none of these"):
        opened(tmp_path / "a.txt")
    np.save(tmp_path / "a.npy", files.vectors())
    with pytest.raises(UserError, match="name both with --data.images and --data.texts"):
        opened(tmp_path / "a.npy")
    with pytest.raises(UserError, match="an uncompressed tar"):
        opened(tmp_path / "a.tar.gz")


@pytest.mark.parametrize(
    "settings",
    [{"batch_size": 0}, {"test_fraction": 1.0}, {"validation_fraction": 0.6, "test_fraction": 0.4}, {"texts": "x"}],
)
def test_invalid_settings_are_rejected(settings: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"data\."):
        PairsConfig(**settings)


def test_empty_split_is_rejected_when_it_is_evaluated(tmp_path: Path) -> None:
    pairs = opened(files.folder(tmp_path / "in"), validation_fraction=0.0)
    with pytest.raises(UserError, match="validation split has no pairs.*--data.validation-fraction"):
        pairs.evaluation("validation", 4)
    with pytest.raises(UserError, match="one of train, validation, test"):
        pairs.split("tset")


def test_float64_that_overflows_float32_is_reported_as_such(tmp_path: Path) -> None:
    image = files.vectors().astype(np.float64)
    image[12, 3] = 1e39
    image[15, 0] = np.inf
    root = files.folder(tmp_path / "in", image=image, dtype=np.float64)
    pairs = open_pairs(PairsConfig(source=str(root)), 0)
    reported = " ".join(pairs.warnings())
    assert "1 of 23 image embeddings contain numbers too large for float32 (beyond 3.4e38) and are left out" in reported
    assert "1 of 23 image embeddings contain NaN or infinity" in reported
    assert pairs.origin["left_out"]["source"] == {"image_overflow": 1, "image_not_finite": 1}


def test_parquet_of_doubles_that_overflow_float32_is_rejected_by_row(tmp_path: Path) -> None:
    image = files.vectors().astype(np.float64)
    image[7, 1] = -1e300
    path = files.parquet(tmp_path / "a.parquet", img_emb=image, text_emb=files.texts())
    with pytest.raises(UserError, match=r"a.parquet, row 7: img_emb contains a number too large for float32"):
        open_pairs(PairsConfig(source=str(path)), 0)
