"""Fetching against servers that drop the connection, do not know ranges, send something else, or are not there."""

from __future__ import annotations

import hashlib
import os
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from linnet.core.errors import UserError
from linnet.data.sources import download as download_module
from linnet.data.sources.download import download_file, read_url

CONTENT = os.urandom(300_000)
SHA256 = hashlib.sha256(CONTENT).hexdigest()
MD5 = hashlib.md5(CONTENT).hexdigest()


class Server(ThreadingHTTPServer):
    content = CONTENT
    ranges = True
    drop_after: int | None = None
    """Bytes of each answer before the connection is cut."""
    statuses: tuple[int, ...] = ()
    """Answered first, one a request."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[str | None] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/file"


class Handler(BaseHTTPRequestHandler):
    server: Server  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_GET(self) -> None:
        server, asked = self.server, self.headers["Range"]
        server.asked.append(asked)
        if server.statuses:
            status, *rest = server.statuses
            server.statuses = tuple(rest)
            self.send_error(status)
            return
        start = int(asked.removeprefix("bytes=").removesuffix("-")) if asked and server.ranges else 0
        total = len(server.content)
        if start >= total:
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{total}")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{total - 1}/{total}")
        self.send_header("Content-Length", str(total - start))
        self.end_headers()
        self.wfile.write(server.content[start:][: server.drop_after])

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(download_module, "PAUSE_SECONDS", 0.001)
    monkeypatch.setattr(download_module, "TIMEOUT_SECONDS", 5.0)
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def rejection(url: str, path: Path, **expected: object) -> str:
    with pytest.raises(UserError) as caught:
        download_file(url, path, **expected)  # pyright: ignore[reportArgumentType]
    assert "Fix: " in str(caught.value)
    return str(caught.value)


def test_file_is_fetched_checked_and_kept(server: Server, tmp_path: Path) -> None:
    path = tmp_path / "new/folder/file"
    seen: list[tuple[int, int | None]] = []
    got = download_file(server.url, path, sha256=SHA256, size=300_000, progress=lambda *done: seen.append(done))
    assert got == path
    assert path.read_bytes() == CONTENT
    assert seen == sorted(seen)
    assert seen[-1] == (300_000, 300_000)
    assert [p.name for p in path.parent.iterdir()] == ["file"]
    download_file(server.url, path, sha256=SHA256)
    assert server.asked == [None], "what is there is not fetched again"


def test_partial_download_is_resumed(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file.part").write_bytes(CONTENT[:100_000])
    download_file(server.url, tmp_path / "file", md5=MD5)
    assert (tmp_path / "file").read_bytes() == CONTENT
    assert server.asked == ["bytes=100000-"]


def test_complete_part_is_only_renamed(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file.part").write_bytes(CONTENT)
    download_file(server.url, tmp_path / "file", sha256=SHA256)
    assert (tmp_path / "file").read_bytes() == CONTENT
    assert server.asked == ["bytes=300000-"]


def test_connection_may_drop_often_while_it_makes_progress(server: Server, tmp_path: Path) -> None:
    server.drop_after = 20_000
    download_file(server.url, tmp_path / "file", sha256=SHA256)
    assert (tmp_path / "file").read_bytes() == CONTENT
    assert len(server.asked) == 15 > download_module.MAX_TRIES


def test_connection_without_progress_is_abandoned(server: Server, tmp_path: Path) -> None:
    server.drop_after = 0
    message = rejection(server.url, tmp_path / "file")
    assert len(server.asked) == download_module.MAX_TRIES
    assert f"put it at {tmp_path / 'file'}, or give it with --from PATH" in message


def test_server_without_ranges_starts_again(server: Server, tmp_path: Path) -> None:
    server.ranges = False
    (tmp_path / "file.part").write_bytes(b"x" * 100_000)
    download_file(server.url, tmp_path / "file", sha256=SHA256)
    assert (tmp_path / "file").read_bytes() == CONTENT
    assert server.asked == ["bytes=100000-"]


@pytest.mark.parametrize("old", [b"x" * 100_000, b"x" * 400_000], ids=["shorter", "longer"])
def test_partial_file_of_another_download_is_discarded(server: Server, tmp_path: Path, old: bytes) -> None:
    (tmp_path / "file.part").write_bytes(old)
    download_file(server.url, tmp_path / "file", sha256=SHA256)
    assert (tmp_path / "file").read_bytes() == CONTENT


def test_wrong_checksum_or_size_leaves_nothing_behind(server: Server, tmp_path: Path) -> None:
    message = rejection(server.url, tmp_path / "file", sha256="0" * 64)
    assert f"its sha256 is {SHA256}, not {'0' * 64}" in message
    assert "it has 300,000 bytes, not 5" in rejection(server.url, tmp_path / "file", size=5)
    assert "its md5 is" in rejection(server.url, tmp_path / "file", md5="0" * 32)
    assert list(tmp_path.iterdir()) == []


def test_wrong_existing_file_is_reported_and_kept(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"mine")
    assert f"{tmp_path / 'file'} is not the file from" in rejection(server.url, tmp_path / "file", sha256=SHA256)
    assert (tmp_path / "file").read_bytes() == b"mine"
    assert server.asked == []


def test_transient_errors_are_retried_and_others_not(server: Server, tmp_path: Path) -> None:
    server.statuses = (503, 429)
    download_file(server.url, tmp_path / "file", sha256=SHA256)
    assert len(server.asked) == 3
    server.statuses = (404,)
    assert "the server returned 404" in rejection(server.url, tmp_path / "other")
    assert len(server.asked) == 4


def test_without_a_network_the_message_names_the_file_and_its_location(server: Server, tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/file"
        message = rejection(url, tmp_path / "file")
        assert message.startswith(f"{url} cannot be downloaded (")
        assert (
            f"download it on a machine with network access and put it at {tmp_path / 'file'}, or give it with --from"
            in message
        )
        with pytest.raises(UserError, match="Fix: do this."):
            read_url(url, "do this")


def test_disk_error_is_not_reported_as_a_network_error(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    message = rejection(server.url, tmp_path / "file/below")
    assert "cannot be written" in message
    assert server.asked == []


def test_small_answer(server: Server) -> None:
    server.statuses = (500,)
    assert read_url(server.url, "nothing") == CONTENT
    server.statuses = (403,)
    with pytest.raises(UserError, match="returned 403"):
        read_url(server.url, "nothing")
