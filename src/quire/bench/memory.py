"""What tiers and preemption are worth: the same work over and over, with KV memory that is too small for it.

Greedy and EOS ignored; every run must give the same tokens as the first. Refuses to know: how pages move.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

from quire.bench.offline import run_workload, stats_of
from quire.bench.workloads import Workload, fixed, multi_turn
from quire.engine.link import Link, open_link
from quire.types.config import EngineOptions
from quire.types.errors import ConfigError, from_wire
from quire.types.events import EngineStats
from quire.types.messages import Events, Reset, Submit
from quire.types.request import FinishReason, Request
from quire.types.sampling_params import SamplingParams

TIERS = ("off", "host", "host+disk", "remote")
MODES = ("recompute", "swap", "auto")


def converse(link: Link, rounds: list[Workload]) -> tuple[float, list[list[int]], EngineStats]:
    """Every client asks again as soon as it is answered, its whole conversation before it. Seconds, answers, stats."""
    link.send(Reset())
    clients = len(rounds[0])
    said: list[list[int]] = [[] for _ in range(clients)]
    answers: list[list[int]] = [[] for _ in range(clients)]
    turn = [0] * clients

    def ask(client: int) -> None:
        fresh, length = rounds[turn[client]][client]
        said[client] += fresh
        params = SamplingParams(temperature=0.0, seed=client, max_tokens=length, ignore_eos=True)
        name = f"{client}/{turn[client]}"
        link.send(Submit(Request(id=name, prompt=list(said[client]), params=params, arrival=time.time())))

    began = time.perf_counter()
    for client in range(clients):
        ask(client)
    left = clients
    while left:
        for message in link.receive(None):
            for event in message.events if isinstance(message, Events) else ():
                if event.finish is FinishReason.ERROR:
                    raise from_wire(event.error, event.message)
                client = int(event.request.partition("/")[0])
                said[client] += event.tokens
                answers[client] += event.tokens
                if event.finish is not None:
                    turn[client] += 1
                    if turn[client] < len(rounds):
                        ask(client)
                    else:
                        left -= 1
    return time.perf_counter() - began, answers, stats_of(link)


@contextmanager
def _engine(options: EngineOptions, **changes: Any) -> Iterator[Link]:
    with closing(open_link(options.but(**changes), process=False)) as link:
        yield link


def conversations(
    options: EngineOptions, tiers: list[str], *, clients: int, rounds: int, n_in: int, n_out: int, share: float
) -> dict[str, Any]:
    """Conversations over a device that holds `share` of what they come to, with each of these sets of tiers."""
    size = options.cache.page_size
    whole = clients * -(-rounds * (n_in + n_out) // size)
    pages = max(int(whole * share), -(-rounds * (n_in + n_out) // size) + 1)
    found: dict[str, Any] = {"pages": pages, "pages_needed": whole, "runs": {}}
    first: list[list[int]] | None = None
    with tempfile.TemporaryDirectory(prefix="quire-kv-") as folder:
        for name in tiers:
            changes = _tiers(name, options, folder)
            with _engine(options, kv_pages=pages, **changes) as link:
                work = multi_turn(clients, rounds, n_in, n_out, seed=5, vocab=link.info.vocab_size)
                run_workload(link, fixed(2, 8, 2, seed=9, vocab=link.info.vocab_size))
                seconds, answers, stats = converse(link, work)
            first = first or answers
            found["runs"][name] = _summary(seconds, stats, answers == first)
    return found


def _tiers(name: str, options: EngineOptions, folder: str) -> dict[str, Any]:
    cache = options.cache
    if name not in TIERS:
        raise ConfigError(f"no such set of tiers: {name!r}; there are {', '.join(TIERS)}")
    if name == "remote" and not cache.kv_remote:
        raise ConfigError("the remote tier needs a server: --kv-remote redis://host:port/0")
    return {
        "kv_host": (cache.kv_host or "4G") if "host" in name else None,
        "kv_disk": (cache.kv_disk or f"{folder}:16G") if "disk" in name else None,
        "kv_remote": cache.kv_remote if name == "remote" else None,
    }


def _summary(seconds: float, stats: EngineStats, same: bool) -> dict[str, Any]:
    load = sum(tier.load_seconds for tier in stats.tiers)
    return {
        "seconds": seconds,
        "hit_rate": stats.hit_rate,
        "tier_tokens": {tier.name: tier.hit_tokens for tier in stats.tiers},
        "load_seconds": load,
        "hidden": 1 - min(1.0, stats.tier_waits / load) if load else None,
        "preemptions": stats.preemptions,
        "same_tokens": same,
    }


def conversation_rows(found: dict[str, Any]) -> list[tuple[str, ...]]:
    lines: list[tuple[str, ...]] = [("tiers", "seconds", "hit rate", "tokens from tiers", "load s", "hidden", "same")]
    for name, run in found["runs"].items():
        tokens = ", ".join(f"{tier} {count}" for tier, count in run["tier_tokens"].items()) or "-"
        hidden = "-" if run["hidden"] is None else f"{run['hidden']:.0%}"
        figures = (f"{run['seconds']:.1f}", f"{run['hit_rate']:.1%}", tokens, f"{run['load_seconds']:.2f}", hidden)
        lines.append((name, *figures, "yes" if run["same_tokens"] else "NO"))
    return lines


def oversubscribed(options: EngineOptions, *, num: int, n_in: int, n_out: int, over: float) -> dict[str, Any]:
    """Requests that need `over` times the pages there are, with every way to preempt, and once with pages for all."""
    size = options.cache.page_size
    each = -(-(n_in + n_out) // size)
    pages = max(each + 1, int(num * each / over))
    found: dict[str, Any] = {"pages": pages, "pages_needed": num * each, "runs": {}}
    first: list[list[int]] | None = None
    for name in ("uncontended", *MODES):
        room = {"kv_pages": num * each + 1} if name == "uncontended" else {"kv_pages": pages, "preempt": name}
        host = options.cache.kv_host or "4G"
        with _engine(options, kv_host=None if name == "uncontended" else host, max_seqs=num, **room) as link:
            work = fixed(num, n_in, n_out, seed=6, vocab=link.info.vocab_size)
            run = run_workload(link, work)
        answers = [trace.tokens for trace in run.traces]
        first = first or answers
        stats = run.stats
        found["runs"][name] = {
            "seconds": run.seconds,
            "preemptions": stats.preemptions,
            "most_preemptions": stats.preempted_most,
            "swaps": stats.swaps,
            "recomputed": stats.waste["recompute"],
            "same_tokens": answers == first,
        }
    return found


def oversubscribed_rows(found: dict[str, Any]) -> list[tuple[str, ...]]:
    lines: list[tuple[str, ...]] = [
        ("preempt", "seconds", "preemptions", "at most", "swaps", "rows recomputed", "same")
    ]
    for name, run in found["runs"].items():
        counts = (run["preemptions"], run["most_preemptions"], run["swaps"], run["recomputed"])
        lines.append((name, f"{run['seconds']:.1f}", *map(str, counts), "yes" if run["same_tokens"] else "NO"))
    return lines
