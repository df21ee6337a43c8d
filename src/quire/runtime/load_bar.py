"""Shows how loading weights gets on.

Refuses to know: what is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def load_bar(show: bool) -> Iterator[Callable[[int, int], None] | None]:
    """A progress bar on standard error while weights load, gone when they are in."""
    if not show:
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    columns = (TextColumn("loading weights"), BarColumn(), DownloadColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("load", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
