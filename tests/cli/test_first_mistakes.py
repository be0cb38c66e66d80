"""What a new user gets wrong first: the message names what was meant and the command that does it."""

from __future__ import annotations

from pathlib import Path

import image_files
import pytest
import tiny

from linnet.cli import main
from linnet.config import codec
from linnet.config.resolve import base_config
from linnet.config.schema import DataConfig
from linnet.core.errors import UserError
from linnet.data import load_dataset
from linnet.runs.folder import RunFolder
from linnet.train.initial_state import open_task
from linnet.train.resume import check_resumable


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["trian"], "there is no command 'trian'. Did you mean 'train'?"),
        (["train", "quikstart"], "there is no preset 'quikstart'. Did you mean 'quickstart'?"),
        (["train", "quickstart", "--optm.lr", "1"], "--optim.lr"),
        (["eval", "run", "--splt", "test"], "--split"),
        (["data", "prepar"], "Did you mean 'prepare'?"),
        (["tokenizer", "shwo"], "Did you mean 'show'?"),
    ],
)
def test_did_you_mean(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    reported = capsys.readouterr()
    assert ended.value.code == 2
    assert words in reported.err + reported.out


def test_file_of_one_byte_is_not_trained_on(tmp_path: Path) -> None:
    source = tmp_path / "one.txt"
    source.write_bytes(b"a")
    with pytest.raises(UserError, match=r"one.txt', but it must be at least data.update_len \(16\) tokens to train on"):
        open_task(tiny.config(source))
    assert load_dataset(DataConfig(source=str(source)), 0).train.n_tokens == 1, "`linnet eval` may still read it"


@pytest.mark.parametrize("captions", [False, True])
def test_folder_of_images_names_data_prepare(captions: bool, tmp_path: Path) -> None:
    image_files.write_folder(tmp_path, image_files.IMAGES)
    if captions:
        for path in tmp_path.rglob("*.png"):
            path.with_suffix(".txt").write_text("a caption\n" * 100)
    with pytest.raises(
        UserError, match=r"Fix: run `linnet data prepare .* --out DIR` and train with --data.source DIR"
    ):
        load_dataset(DataConfig(source=str(tmp_path)), 0)


def test_more_steps_of_a_run_name_extra_steps(tmp_path: Path) -> None:
    source = tiny.corpus(tmp_path)
    folder = RunFolder(tmp_path / "run").create()
    codec.save(tiny.config(source, **{"optim.steps": 20}), folder.config)
    with pytest.raises(UserError, match="leave --optim.steps out and give --optim.extra-steps 30; "):
        check_resumable(tiny.config(source, **{"optim.steps": 50}), folder)
    with pytest.raises(UserError) as fewer:
        check_resumable(tiny.config(source, **{"optim.steps": 10}), folder)
    assert "extra-steps" not in str(fewer.value)
    assert check_resumable(tiny.config(source, **{"optim.steps": 20, "optim.extra_steps": 30}), folder) is not None


def test_folder_without_a_run_is_not_called_a_preset(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is a folder, but not a run: it has no config.json") as folder:
        base_config(str(tmp_path))
    assert "preset" not in str(folder.value)
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(UserError, match=r"notes.txt is a file, and neither a preset nor a run.*--data.source"):
        base_config(str(tmp_path / "notes.txt"))
