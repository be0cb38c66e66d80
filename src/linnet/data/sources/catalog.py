"""Benchmark datasets: download locations, checksums, and the standard splits."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import hashlib
import json
import threading
import urllib.parse
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

from linnet.core.errors import UserError, invalid
from linnet.data.sources.archives import PACKED, decompress, detect_format, unpacking, zip_members
from linnet.data.sources.documents import DEFAULT_COLUMN, DocumentPart, Documents, FileDocuments, split_stream
from linnet.data.sources.download import Progress, download_file, read_url
from linnet.data.sources.files import find_files, reading
from linnet.data.splits import SPLITS

if TYPE_CHECKING:
    from linnet.data.sources.images import EncodedImage, ImageSource

READ_BYTES = 1 << 20
BUCKET = "https://storage.googleapis.com/storage/v1/b/deepmind-gutenberg/o"
BUCKET_FILES = "https://storage.googleapis.com/deepmind-gutenberg/"
CONNECTIONS = 8
IMAGENET64_TRAIN = 1_200_000
"""Number of training images, in name order; the rest of the training file is the validation split."""
IMAGENET64_FILES = ("train_64x64", "valid_64x64")


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchmarkDataset:
    name: str
    kind: Literal["text", "images"]
    url: str
    open: Callable[[Path | None, Path, Progress | None], Documents | ImageSource]


def open_benchmark(
    name: str, from_path: Path | None, cache: Path, progress: Progress | None = None
) -> Documents | ImageSource:
    """Open a dataset from the user's copy, or download it into `cache`."""
    if name not in BENCHMARKS:
        raise invalid(
            "SOURCE", name, f"one of the benchmark datasets {', '.join(BENCHMARKS)}", "name one of those, or a path"
        )
    if from_path is not None and not from_path.exists():
        raise invalid("--from", str(from_path), "an existing file or folder", f"give the path of {name}")
    return BENCHMARKS[name].open(from_path, cache, progress)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchmarkText:
    """One text with a known checksum, with splits of known sizes."""

    name: str
    url: str
    sha256: str
    sizes: dict[str, int]

    @property
    def n_bytes(self) -> int:
        return sum(self.sizes.values())


ENWIK8 = BenchmarkText(
    name="enwik8",
    url="http://mattmahoney.net/dc/enwik8.zip",
    sha256="2b49720ec4d78c3c9fabaee6e4179a5e997302b3a70029f30f2d582218c024a8",
    sizes={"train": 90_000_000, "validation": 5_000_000, "test": 5_000_000},
)


def _open_enwik8(from_path: Path | None, cache: Path, progress: Progress | None) -> BenchmarkDocuments:
    path = _find_copy(ENWIK8, from_path or cache)
    if path is None and from_path is not None:
        raise invalid("--from", str(from_path), "enwik8, enwik8.zip or enwik8.gz, or a folder with one", "correct it")
    documents = BenchmarkDocuments(ENWIK8, path or download_file(ENWIK8.url, cache / "enwik8.zip", progress=progress))
    documents.check()
    return documents


def _find_copy(text: BenchmarkText, path: Path) -> Path | None:
    if path.is_file():
        return path
    names = (text.name, *(text.name + suffix for suffix in (".zip", ".gz", ".bz2", ".xz", ".zst")))
    return next((path / name for name in names if (path / name).is_file()), None)


class BenchmarkDocuments:
    """One text with predefined splits, split at exact byte offsets; each split begins and ends a document."""

    ends_with_eos, is_single = False, True

    def __init__(self, text: BenchmarkText, path: Path) -> None:
        self._text = text
        self._path = path
        self.left_out: Counter[str] = Counter()
        with reading(path):
            self.n_bytes = path.stat().st_size

    def identity(self) -> dict[str, Any]:
        return {"kind": "named", "name": self._text.name, "sha256": self._text.sha256, "sizes": self._text.sizes}

    def check(self) -> None:
        """Read the text once and compare its checksum: a wrong byte would invalidate every metric measured on it."""
        digest, n_bytes = hashlib.sha256(), 0
        with self._opened() as (content, _):
            while data := content.read(READ_BYTES):
                digest.update(data)
                n_bytes += len(data)
        if digest.hexdigest() != self._text.sha256:
            raise UserError(
                f"{self._path} is not {self._text.name}: it has {n_bytes:,} bytes with the sha256 "
                f"{digest.hexdigest()}, and must have {self._text.n_bytes:,} with {self._text.sha256}. "
                f"Fix: download it again from {self._text.url}."
            )

    def parts(self) -> Iterator[DocumentPart]:
        position = 0
        with self._opened() as (content, raw):
            for split, size in self._text.sizes.items():
                for data, first, last in split_stream(_limit_read(size, content.read)):
                    position = max(position, raw.tell())
                    yield DocumentPart(self._text.name, data, first, last, split, position)

    @contextlib.contextmanager
    def _opened(self) -> Iterator[tuple[BinaryIO, BinaryIO]]:
        """Yield the unpacked content, and the raw file."""
        kind, codec = detect_format(self._path.name)
        with reading(self._path), unpacking(self._path), open(self._path, "rb") as raw:
            if kind != "zip":
                yield decompress(codec, raw), raw
                return
            for name, content in zip_members(raw, Counter()):
                if name.rpartition("/")[2] == self._text.name:
                    yield content, raw
                    return
            raise UserError(f"{self._path} does not contain {self._text.name}. Fix: download it from {self._text.url}.")


def _limit_read(n: int, read: Callable[[int], bytes]) -> Callable[[int], bytes]:
    left = n

    def read_limited(size: int) -> bytes:
        nonlocal left
        data = read(min(size, left))
        left -= len(data)
        return data

    return read_limited


def _open_pg19(from_path: Path | None, cache: Path, progress: Progress | None) -> FileDocuments:
    path = from_path or _download_pg19(cache / "pg19", progress)
    found = find_files(str(path), "--from", PACKED)
    if not any(_pg19_split(f.name) or detect_format(f.name)[0] in ("zip", "tar") for f in found.files):
        raise invalid(
            "--from",
            str(path),
            "a folder or archive with train/, validation/ and test/, each with the .txt files of books",
            f"name the folder above those three; they are at {BUCKET_FILES}",
        )
    documents = FileDocuments(
        found.files, column=DEFAULT_COLUMN, left_out=Counter(found.left_out), split_of=_pg19_split
    )
    documents.check()
    return documents


def _pg19_split(name: str) -> str | None:
    """Return the nearest folder or archive above a book whose name is that of a split."""
    *above, file = name.split("/")
    splits = (folder.split(".")[0] for folder in reversed(above) if file.endswith(".txt"))
    return next((split for split in splits if split in SPLITS), None)


def _download_pg19(folder: Path, progress: Progress | None) -> Path:
    """Download all books. An existing file was verified before it got its name, so only its size is checked."""
    books = [book for split in SPLITS for book in _bucket_listing(f"{split}/", folder)]
    total = sum(int(book["size"]) for book in books)
    done, lock = 0, threading.Lock()

    def download_book(book: dict[str, str]) -> None:
        nonlocal done
        path, size = folder / book["name"], int(book["size"])
        if not (path.is_file() and path.stat().st_size == size):
            md5 = base64.b64decode(book["md5Hash"]).hex()
            download_file(BUCKET_FILES + urllib.parse.quote(book["name"]), path, md5=md5, size=size)
        with lock:
            done += size
            if progress:
                progress(done, total)

    with ThreadPoolExecutor(CONNECTIONS) as pool:
        futures = [pool.submit(download_book, book) for book in books]
        try:
            for future in futures:
                future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return folder


def _bucket_listing(prefix: str, folder: Path) -> list[dict[str, str]]:
    """Return name, size and md5 of every .txt file below a prefix."""
    instead = (
        f"download train/, validation/ and test/ from {BUCKET_FILES} on a machine with network access and give the folder above "
        f"the three with --from PATH (for example --from {folder})"
    )
    items: list[dict[str, str]] = []
    page: str | None = ""
    while page is not None:
        query = {"prefix": prefix, "fields": "nextPageToken,items(name,size,md5Hash)"} | (
            {"pageToken": page} if page else {}
        )
        url = f"{BUCKET}?{urllib.parse.urlencode(query)}"
        try:
            response = json.loads(read_url(url, instead))
            items += [item for item in response.get("items", []) if item["name"].endswith(".txt")]
        except (json.JSONDecodeError, AttributeError, KeyError, TypeError):
            raise UserError(f"{url} did not return a listing. Fix: {instead}.") from None
        page = response.get("nextPageToken")
    return items


def _open_imagenet64(from_path: Path | None, cache: Path, progress: Progress | None) -> ImageNet64:
    from linnet.data.sources.images import open_images

    if from_path is not None:
        folder = from_path if from_path.is_dir() else from_path.parent
        train, valid = (_tar_or_folder(folder, name) for name in IMAGENET64_FILES)
    else:
        url = BENCHMARKS["imagenet64"].url
        train, valid = (
            download_file(f"{url}{name}.tar", cache / "imagenet64" / f"{name}.tar", progress=progress)
            for name in IMAGENET64_FILES
        )
    return ImageNet64(open_images(str(train)), open_images(str(valid)))


def _tar_or_folder(folder: Path, name: str) -> Path:
    found = next((p for p in (folder / f"{name}.tar", folder / name) if p.exists()), None)
    if found is None:
        raise invalid(
            "--from",
            str(folder),
            f"a folder with {' and '.join(f'{n}.tar' for n in IMAGENET64_FILES)} ({name}.tar is missing)",
            f"put {BENCHMARKS['imagenet64'].url}{name}.tar there",
        )
    return found


class ImageNet64:
    """The two files as three splits; the training file is in name order."""

    def __init__(self, train: ImageSource, valid: ImageSource) -> None:
        self._train, self._valid = train, valid
        self.left_out: Counter[str] = Counter()

    @property
    def n_bytes(self) -> int | None:
        sizes = (self._train.n_bytes, self._valid.n_bytes)
        return None if None in sizes else sum(size for size in sizes if size is not None)

    def identity(self) -> dict[str, Any]:
        return {
            "kind": "named",
            "name": "imagenet64",
            "n_train": IMAGENET64_TRAIN,
            "files": [self._train.identity(), self._valid.identity()],
        }

    def images(self) -> Iterator[EncodedImage]:
        self.left_out.clear()
        for i, image in enumerate(self._train.images()):
            yield dataclasses.replace(image, split="train" if i < IMAGENET64_TRAIN else "validation")
        self.left_out.update(self._train.left_out)
        before = self._train.n_bytes or 0
        for image in self._valid.images():
            yield dataclasses.replace(image, split="test", position=before + image.position)
        self.left_out.update(self._valid.left_out)


BENCHMARKS: dict[str, BenchmarkDataset] = {
    benchmark.name: benchmark
    for benchmark in (
        BenchmarkDataset(
            name="enwik8",
            kind="text",
            url=ENWIK8.url,
            open=_open_enwik8,
        ),
        BenchmarkDataset(
            name="pg19",
            kind="text",
            url=BUCKET_FILES,
            open=_open_pg19,
        ),
        BenchmarkDataset(
            name="imagenet64",
            kind="images",
            url="https://image-net.org/small/",
            open=_open_imagenet64,
        ),
    )
}
