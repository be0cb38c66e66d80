"""Streaming clients in a separate process (`python -m benchmarks.http_clients`): reads a task and writes its result as a line of JSON.

They use plain sockets and only count the token ids in each line, because on a machine with few cores their CPU time is taken from
the server.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

from linnet.bench.load import vary_length

REQUEST = (
    "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nConnection: close\r\n"
    "Content-Length: {length}\r\n\r\n{body}"
)
MAX_START_SECONDS = 60.0


class Clients:
    def __init__(self, port: int, server: int, n: int, answer: int) -> None:
        self._port, self._server, self._n, self._answer = port, server, n, answer
        self.n_tokens = self.n_requests = self.n_responses = 0

    async def measure(self, seconds: float) -> dict[str, Any]:
        """Run all clients in a loop. Counts the tokens received within the time, after a warm-up."""
        tasks = [asyncio.create_task(self._client(i)) for i in range(self._n)]
        try:
            await asyncio.wait_for(self._wait_for_tokens(tasks), MAX_START_SECONDS)
            n, since, cpu, own = self.n_tokens, time.perf_counter(), cpu_seconds(self._server), time.process_time()
            done, _ = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()  # a client ends only by an exception
            tokens, took = self.n_tokens - n, time.perf_counter() - since
            cpu, own = cpu_seconds(self._server) - cpu, time.process_time() - own
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return {
            "tokens_per_second": tokens / took,
            "tokens": tokens,
            "answers": self.n_responses,
            "server_cpu_seconds": cpu,
            "client_cpu_seconds": own,
        }

    async def _wait_for_tokens(self, tasks: list[asyncio.Task[None]]) -> None:
        """Wait until enough tokens were received that the initial prefill of waiting requests, which happens once, is done."""
        while self.n_tokens < 32 * self._n:
            await asyncio.sleep(0.005)
            for task in tasks:
                if task.done():
                    task.result()

    async def _client(self, number: int) -> None:
        while True:
            await self._stream(number)
            self.n_responses += 1

    async def _stream(self, number: int) -> None:
        length = vary_length(self._answer, self.n_requests)
        self.n_requests += 1
        request = {
            "prompt": f"client {number:4} asks:",
            "max_tokens": length,
            "ignore_eos": True,
            "stream": True,
            "seed": number,
            "return_token_ids": True,
        }
        body = json.dumps(request)
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            writer.write(REQUEST.format(length=len(body), body=body).encode())
            status = await reader.readline()
            if b" 200 " not in status:
                raise RuntimeError(f"{status.decode()}{(await reader.read(2000)).decode(errors='replace')}")
            got = 0
            while line := await reader.readline():
                if line.startswith(b"data: {"):
                    n = count_tokens(line[6:])
                    got += n
                    self.n_tokens += n
                elif line.startswith(b"data: [DONE]"):
                    break
            if got != length:
                raise RuntimeError(f"a response of {got} tokens instead of {length}")
        finally:
            writer.close()


def cpu_seconds(pid: int) -> float:
    """Return the CPU time that a process has used so far, or NaN if the system does not report it."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return math.nan
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def count_tokens(event: bytes) -> int:
    chunk = json.loads(event)
    if "error" in chunk:
        raise RuntimeError(f"the server returned the error {chunk['error']}")
    return sum(len(choice["token_ids"]) for choice in chunk["choices"])


def main() -> None:
    for line in sys.stdin:
        task = json.loads(line)
        clients = Clients(task["port"], task["server"], task["clients"], task["answer"])
        print(json.dumps(asyncio.run(clients.measure(task["seconds"]))), flush=True)


if __name__ == "__main__":
    main()
