"""Measure one session at a growing number of tokens, and draw docs/session_size.svg:

    linnet serve runs/quickstart
    python scripts/session_chart.py runs/quickstart > session.json

The session reads the standard library's source text. At each length it is saved, restored and continued, and the continuation of the
restored session must equal that of the original. The second line of the chart is computed: the KV cache of the same model.
"""

from __future__ import annotations

import json
import math
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import httpx

URL = "http://127.0.0.1:8000"
LENGTHS = (1_000, 10_000, 100_000, 1_000_000)
MAX_PROMPT = 100_000
N_DECODE, N_REPEAT = 256, 5
CHART = Path(__file__).parent.parent / "docs" / "session_size.svg"
LEFT, RIGHT, TOP, BOTTOM = 84, 690, 64, 264  # the plot area
UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "KB"))


def measure(client: httpx.Client) -> list[dict[str, Any]]:
    library = Path(sysconfig.get_paths()["stdlib"])
    text = "".join(path.read_text(errors="ignore") for path in sorted(library.glob("*.py")))
    text = text.encode("ascii", "ignore").decode()
    id, done, rows = post(client, "/v1/sessions", {})["id"], 0, []
    for length in LENGTHS:
        start = time.perf_counter()
        while done < length:
            part = text[done : min(done + MAX_PROMPT, length)]
            complete(client, id, part, max_tokens=1)
            done += len(part)
        rows.append({"tokens": length, "read_seconds": time.perf_counter() - start} | measure_session(client, id))
    return rows


def measure_session(client: httpx.Client, id: str) -> dict[str, Any]:
    rates = []
    for _ in range(N_REPEAT):
        fork = post(client, f"/v1/sessions/{id}/fork", None)["id"]
        start = time.perf_counter()
        complete(client, fork, "\n", max_tokens=N_DECODE, ignore_eos=True)
        rates.append(N_DECODE / (time.perf_counter() - start))
        client.delete(f"/v1/sessions/{fork}")
    state = client.get(f"/v1/sessions/{id}/state").content
    kind = {"content-type": "application/octet-stream"}
    restored = client.post("/v1/sessions/restore", content=state, headers=kind).raise_for_status().json()["id"]
    fork = post(client, f"/v1/sessions/{id}/fork", None)["id"]
    ours, theirs = (complete(client, one, "def ", max_tokens=100, logprobs=0) for one in (restored, fork))
    card = client.get(f"/v1/sessions/{id}").json()
    return {
        "state_bytes": card["state_bytes"],
        "file_bytes": len(state),
        "tokens_per_second": sorted(rates)[N_REPEAT // 2],
        "restored_is_equal": ours == theirs,
    }


def complete(client: httpx.Client, session: str, prompt: str, **fields: Any) -> Any:
    choice = post(client, "/v1/completions", {"session": session, "prompt": prompt, "seed": 1, **fields})["choices"][0]
    return {name: choice[name] for name in ("text", "logprobs", "finish_reason")}


def post(client: httpx.Client, path: str, body: Any) -> Any:
    return client.post(path, json=body).raise_for_status().json()


def cache_bytes_per_token(config: dict[str, Any]) -> int:
    """Return the size of float32 keys and values: a layer is two attention units."""
    model = config["model"]
    return 2 * model["n_layer"] * model["n_head"] * (model["d_k"] + model["d_v"]) * 4


def draw(rows: list[dict[str, Any]], per_token: int) -> str:
    lengths = [row["tokens"] for row in rows]
    low, high = 1e5, 1e10

    def at(tokens: float, size: float) -> tuple[float, float]:
        x = math.log(tokens / lengths[0]) / math.log(lengths[-1] / lengths[0])
        y = math.log(size / low) / math.log(high / low)
        return LEFT + x * (RIGHT - LEFT), BOTTOM - y * (BOTTOM - TOP)

    def line(sizes: list[float], color: str, is_measured: bool) -> str:
        points = [at(*point) for point in zip(lengths, sizes, strict=True)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        dash = "" if is_measured else ' stroke-dasharray="6 5"'
        dots = [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{color}"/>' for x, y in points if is_measured]
        return f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2.5"{dash}/>' + "".join(dots)

    ours, cache = [float(row["state_bytes"]) for row in rows], [float(per_token * n) for n in lengths]
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 320" width="760" height="320" font-family="system-ui, sans-serif" '
        'font-size="13" fill="#40484f" role="img" aria-label="Bytes of a session by tokens read">',
        '<rect width="100%" height="100%" rx="8" fill="#ffffff"/>',
        '<text x="24" y="30" font-size="16" font-weight="600" fill="#18212d">Memory of one session, by tokens read</text>',
    ]
    for power in range(5, 11):
        x, y = at(lengths[0], 10.0**power)
        parts.append(f'<line x1="{LEFT}" x2="{RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e4e9ef"/>')
        parts.append(f'<text x="{x - 12:.1f}" y="{y + 4:.1f}" text-anchor="end">{size_text(10.0**power)}</text>')
    for length in lengths:
        x, _ = at(length, low)
        parts.append(f'<text x="{x:.1f}" y="{BOTTOM + 24}" text-anchor="middle">{length:,}</text>')
    middle = (LEFT + RIGHT) / 2
    parts.append(f'<text x="{middle:.1f}" y="{BOTTOM + 46}" text-anchor="middle">tokens read</text>')
    parts += [line(cache, "#e2661b", False), line(ours, "#2f6fed", True)]
    x, y = at(lengths[0], 1.4e9)
    cache_text = f"KV cache of the same model: {per_token:,} bytes per token (computed)"
    parts.append(f'<text x="{x + 16:.1f}" y="{y:.1f}" fill="#b34d0f" font-weight="600">{cache_text}</text>')
    x, y = at(lengths[0], ours[0])
    text = f"Linnet, vq: {rows[-1]['state_bytes']:,} bytes at every length (measured)"
    parts.append(f'<text x="{x + 16:.1f}" y="{y - 14:.1f}" fill="#1d51b8" font-weight="600">{text}</text>')
    x, y = at(lengths[-1], cache[-1])
    parts.append(
        f'<text x="{x:.1f}" y="{y - 12:.1f}" text-anchor="middle" fill="#b34d0f">{size_text(cache[-1])}</text>'
    )
    return "\n".join([*parts, "</svg>\n"])


def size_text(size: float) -> str:
    factor, unit = next((factor, unit) for factor, unit in UNITS if size >= factor)
    return f"{size / factor:.3g} {unit}"


if __name__ == "__main__":
    with httpx.Client(base_url=URL, timeout=600) as client:
        result = measure(client)
    print(json.dumps(result, indent=2))
    if len({row["state_bytes"] for row in result}) > 1 or not all(row["restored_is_equal"] for row in result):
        sys.exit("The sizes or the continuations differ.")
    CHART.write_text(draw(result, cache_bytes_per_token(json.loads((Path(sys.argv[1]) / "config.json").read_text()))))
