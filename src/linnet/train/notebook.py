"""Progress bars in a notebook: one HTML output that is replaced in place.

It has the methods of rich's progress bar that `progress` uses. Rich itself needs widgets in a notebook, which many lack.
"""

from __future__ import annotations

import html
import importlib
import sys
from types import TracebackType
from typing import Any, Self


def in_notebook() -> bool:
    """Return whether this is a kernel that shows HTML. A terminal's IPython is not."""
    shell = sys.modules.get("IPython")
    running = None if shell is None else shell.get_ipython()
    return running is not None and type(running).__name__ == "ZMQInteractiveShell"


class NotebookBar:
    def __init__(self) -> None:
        self.console = self
        self._tasks: dict[int, dict[str, Any]] = {}
        self._lines: list[str] = []
        self._output: Any = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def add_task(self, description: str, *, total: float | None, completed: float = 0, note: str = "") -> int:
        number = max(self._tasks, default=-1) + 1
        self._tasks[number] = {"description": description, "total": total, "completed": completed, "note": note}
        return number

    def update(self, task: int, **values: Any) -> None:
        self._tasks[task] |= values

    def remove_task(self, task: int) -> None:
        del self._tasks[task]

    def print(self, text: str, **options: Any) -> None:
        """Add a line above the bars."""
        self._lines.append(text)
        self.refresh()

    def start(self) -> None:
        self.refresh()

    def stop(self) -> None:
        self.refresh()

    def refresh(self) -> None:
        shown = importlib.import_module("IPython.display")
        if self._output is None:
            self._output = shown.display(shown.HTML(self.to_html()), display_id=True)
        else:
            self._output.update(shown.HTML(self.to_html()))

    def to_html(self) -> str:
        lines = "".join(f"<div>{html.escape(line)}</div>" for line in self._lines)
        return lines + "".join(_bar(**task) for task in self._tasks.values())


def _bar(description: str, total: float | None, completed: float, note: str) -> str:
    value = "" if total is None else f' value="{completed:g}" max="{total:g}"'
    count = f"{completed:,.0f}" + ("" if total is None else f"/{total:,.0f}")
    return f"<div><b>{html.escape(description)}</b> <progress{value}></progress> {count} {html.escape(note)}</div>"
