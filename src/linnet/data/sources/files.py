"""Find the files of a source: a text file, a folder, a glob, or the running Python's standard library."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import glob
import itertools
import os
import stat
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from linnet.config.schema import EMBEDDED_CORPUS
from linnet.core.errors import UserError, invalid
from linnet.core.local_path import check_local

SNIFF_BYTES = 8192
NOT_STDLIB = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})

FileId = tuple[int, int]
"""Device and inode: identifies a file under several names."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourceFile:
    path: Path
    name: str
    """The path below the source's root, with '/': the same on every machine."""
    size: int
    identity: FileId
    """Used to read a linked file once, so that held-out text cannot leak into training under another name."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourceFiles:
    """The files of a source in name order, and counts of what was left out, by reason."""

    root: Path
    files: tuple[SourceFile, ...]
    left_out: dict[str, int]

    @property
    def n_bytes(self) -> int:
        return sum(f.size for f in self.files)


def find_files(source: str, field: str = "data.source", packed: tuple[str, ...] = ()) -> SourceFiles:
    """Find the files of a source. `packed`: lower-case suffixes of files that the caller unpacks, so NUL bytes are allowed."""
    if source == EMBEDDED_CORPUS:
        return _python_stdlib()
    paths = match_files(source, field=field)
    if paths is None:
        needs = f"an existing file, folder or glob, or {EMBEDDED_CORPUS!r}"
        raise invalid(field, source, needs, _suggest_name(source, field))
    return _check_not_empty(_select_text(paths.root, paths.paths, packed, paths.left_out), field, source)


def find_held_out(patterns: Sequence[str], below: Path, field: str) -> SourceFiles:
    """Return the files of several patterns, each once. A pattern is resolved as given, then below the root of the source."""
    groups: list[SourceFiles] = []
    for pattern in patterns:
        paths = match_files(pattern, field=field)
        if paths is None or not paths.paths:
            paths = match_files(pattern, below) or paths
        if paths is None:
            raise invalid(field, pattern, "existing files, folders or globs", _suggest_name(pattern, "data.source"))
        groups.append(_check_not_empty(_select_text(paths.root, paths.paths, left_out=paths.left_out), field, pattern))
    files = {f.identity: f for group in groups for f in group.files}
    left_out = sum((Counter(group.left_out) for group in groups), Counter[str]())
    return SourceFiles(root=below, files=tuple(files.values()), left_out=dict(left_out))


def format_left_out(left_out: Mapping[str, int]) -> str:
    """List counts of skipped items by reason, as in "2 binary, 1 empty"."""
    return ", ".join(f"{n} {reason.replace('_', ' ')}" for reason, n in sorted(left_out.items()))


@contextlib.contextmanager
def writing(path: Path, fix: str) -> Iterator[None]:
    """Convert an OSError to a `UserError` that names the path and a way to solve it."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror or error}). Fix: {fix}.") from None


@contextlib.contextmanager
def reading(path: str | os.PathLike[str]) -> Iterator[None]:
    """Convert an OSError to a `UserError` that names the path."""
    try:
        yield
    except OSError as error:
        raise _unreadable(error, os.fspath(path)) from None


def _unreadable(error: OSError, path: str) -> UserError:
    return UserError(
        f"{path} cannot be read ({error.strerror or error}). Fix: make it readable, or leave it out of the source."
    )


def _python_stdlib() -> SourceFiles:
    root = Path(sysconfig.get_path("stdlib"))
    paths = [p for p in _walk(root, NOT_STDLIB) if p.suffix == ".py"] if root.is_dir() else []
    found = _select_text(root, paths)
    if not found.files:
        raise invalid(
            "data.source",
            EMBEDDED_CORPUS,
            f"a Python that comes with its source files (none is below {root})",
            "set --data.source to a text file or folder of your own",
        )
    return found


class MatchedFiles(NamedTuple):
    """Files that match a path, folder or glob."""

    root: Path
    paths: list[Path]
    left_out: Counter[str]
    """Symbolic links that leave the root are not followed: an untrusted folder must not include other files of this machine."""


OUTSIDE_LINKS = "links_that_leave_the_folder"


def match_files(pattern: str, below: Path = Path(), *, field: str = "SOURCE") -> MatchedFiles | None:
    """Return the root and the files of a path or glob; None if nothing matches the name."""
    check_local(field, pattern)
    pattern = os.path.expanduser(pattern)
    path = below / pattern
    mode = _file_mode(path) if pattern else None
    if mode is None:
        # A name that exists is meant literally, so wildcards are only expanded if it does not.
        return _expand_glob(pattern, below) if _has_magic(pattern) else None
    if stat.S_ISDIR(mode):
        left_out = Counter[str]()
        return MatchedFiles(path, list(_walk(path, left_out=left_out)), left_out)
    if stat.S_ISREG(mode):
        return MatchedFiles(path.parent, [path], Counter())
    raise UserError(f"{path} is neither a file nor a folder. Fix: name a regular file, a folder or a glob.")


def _expand_glob(pattern: str, below: Path) -> MatchedFiles:
    literal = itertools.takewhile(lambda part: not _has_magic(part), Path(pattern).parts)
    matches = [below / match for match in glob.glob(pattern, root_dir=below, recursive=True)]
    root, files = below.joinpath(*literal), [match for match in matches if not os.path.isdir(match)]
    inside = [path for path in files if not leaves_root(path, root)]
    return MatchedFiles(
        root, inside, Counter({OUTSIDE_LINKS: len(files) - len(inside)} if len(inside) < len(files) else {})
    )


def leaves_root(path: Path, root: Path) -> bool:
    """Return whether a path below `root` leaves it through a symbolic link."""
    real = os.path.realpath(root)
    return os.path.commonpath((real, os.path.realpath(path))) != real


def _has_magic(pattern: str) -> bool:
    return any(character in pattern for character in "*?[")


def _file_mode(path: Path) -> int | None:
    """Return the mode bits of a file; None if it does not exist or is a broken link."""
    try:
        return path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a NUL character in the name
        return None
    except OSError as error:
        raise _unreadable(error, str(path)) from None


def _walk(root: Path, skip: frozenset[str] = frozenset(), *, left_out: Counter[str] | None = None) -> Iterator[Path]:
    """Yield every file below `root` that is not hidden.

    Links to folders are followed, each folder once, so loops end. With `left_out`, links that leave the root are counted there
    instead of followed.
    """

    def is_inside(path: str) -> bool:
        if left_out is None or not os.path.islink(path) or not leaves_root(Path(path), root):
            return True
        left_out[OUTSIDE_LINKS] += 1
        return False

    def fail(error: OSError) -> None:
        raise _unreadable(error, str(error.filename))

    seen = {os.path.realpath(root)}
    for folder, folders, names in os.walk(root, followlinks=True, onerror=fail):
        wanted = [(f, os.path.realpath(os.path.join(folder, f))) for f in sorted(folders) if not f.startswith(".")]
        wanted = [
            (f, real) for f, real in wanted if f not in skip and real not in seen and is_inside(os.path.join(folder, f))
        ]
        folders[:] = [f for f, _ in wanted]
        seen.update(real for _, real in wanted)
        yield from (
            Path(folder, name) for name in names if not name.startswith(".") and is_inside(os.path.join(folder, name))
        )


def _select_text(
    root: Path, paths: Iterable[Path], packed: tuple[str, ...] = (), left_out: Counter[str] | None = None
) -> SourceFiles:
    """Keep regular files that contain text, once each, sorted by name."""
    named = sorted((Path(os.path.relpath(path, root)).as_posix(), path) for path in paths)
    files: dict[FileId, SourceFile] = {}
    left_out = Counter(left_out)
    for name, path in named:
        mode = _file_mode(path)
        if mode is None or not stat.S_ISREG(mode):
            left_out["not_regular"] += 1
            continue
        with reading(path), open(path, "rb") as file:
            info, head = os.fstat(file.fileno()), file.read(SNIFF_BYTES)
        if b"\0" in head and not name.lower().endswith(packed):
            left_out["binary"] += 1
        elif not info.st_size:
            left_out["empty"] += 1
        else:
            identity = (info.st_dev, info.st_ino)
            files.setdefault(identity, SourceFile(path=path, name=name, size=info.st_size, identity=identity))
    return SourceFiles(root=root, files=tuple(files.values()), left_out=dict(left_out))


def _check_not_empty(found: SourceFiles, field: str, source: str) -> SourceFiles:
    if found.files:
        return found
    if not found.left_out:
        raise invalid(field, source, "a name that matches at least one file", _suggest_pattern(source))
    raise invalid(
        field,
        source,
        f"a source with text in it (left out: {format_left_out(found.left_out)})",
        "name text; for archives, parquet and images run `linnet data prepare` first and name its folder; save UTF-16 as UTF-8 "
        "(a NUL byte in the first 8 KB counts as binary)"
        if OUTSIDE_LINKS not in found.left_out
        else "name what the links point to: symbolic links that leave the source's folder are not followed",
    )


def _suggest_pattern(source: str) -> str:
    if _has_magic(source) and any(os.path.isdir(p) for p in glob.glob(os.path.expanduser(source), recursive=True)):
        return f"it matches folders only; use {source.rstrip('/')}/** for the files in them"
    return "correct the pattern (** reaches into folders), or put files there (hidden files are skipped)"


def _suggest_name(name: str, field: str) -> str:
    """Return a suggestion: a similar name in the same folder, or the deepest existing folder of the path."""
    path = Path(os.path.expanduser(name)) if name else Path("?")
    parent = next(p for p in (*path.parents, Path()) if os.path.isdir(p))
    wanted = path.relative_to(parent).parts[0]
    with reading(parent):
        siblings = sorted(os.listdir(parent))
    near = difflib.get_close_matches(wanted, [*siblings, EMBEDDED_CORPUS], n=1, cutoff=0.7)
    if not near:
        how = f"with --{field}" if "." in field else f"as {field}"
        return f"give its path {how} ({str(parent.absolute())!r} is the nearest folder that exists)"
    if near[0] == EMBEDDED_CORPUS:
        return f"did you mean {EMBEDDED_CORPUS!r}?"
    return f"did you mean {str(parent / near[0])!r}?"
