"""Files that a run depends on are replaced atomically, and no module writes them any other way."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest

import linnet
from linnet.config import codec, presets
from linnet.core.errors import UserError
from linnet.core.files import atomic_write, remove_parts

ROOT = Path(linnet.__file__).parent
WITHIN_A_NEW_FOLDER = {
    "runs/checkpoint/writer.py",  # a checkpoint, committed by one rename
    "runs/weights.py",  # an imported run, likewise
    "convert/grok/hf.py",  # an export, likewise
}


def test_old_content_stays_until_the_new_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "folder" / "file"
    atomic_write(path, b"old", sync=True)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        atomic_write(path, b"new content")
    monkeypatch.undo()
    assert path.read_bytes() == b"old"
    assert list(path.parent.iterdir()) == [path]
    (path.parent / ".file.123.part").write_bytes(b"left by a process that was killed")
    remove_parts(path)
    assert list(path.parent.iterdir()) == [path]


def test_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").mkdir()
    (tmp_path / "file" / "inside").touch()
    with pytest.raises(UserError, match=f"{tmp_path / 'file'} cannot be written"):
        atomic_write(tmp_path / "file", b"x")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_config_is_replaced_atomically(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.json"
    cfg = presets.get("quickstart")
    codec.save(cfg, path)
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(UserError, match="No space left on device"):
        codec.save(presets.get("enwik8"), path)
    assert codec.load(path) == cfg


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_is_written_in_place(path: Path) -> None:
    if str(path.relative_to(ROOT)) in WITHIN_A_NEW_FOLDER:
        return
    calls = (node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
    called = {function.attr for function in calls if isinstance(function, ast.Attribute)}
    assert not {"write_text", "write_bytes"} & called, "use linnet.core.files.atomic_write"
