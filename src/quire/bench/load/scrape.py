"""The server's own account of a run: a few of its Prometheus metrics, before and after.

Refuses to know: load, latency.
"""

from __future__ import annotations

from collections import defaultdict
from urllib.parse import urlsplit

import msgspec

from quire.bench.load.http import Pool


class Scrape(msgspec.Struct):
    """Metrics of one moment: name → value, summed over labels; waste also by cause, memory by process."""

    values: dict[str, float]
    waste: dict[str, float]
    memory: dict[str, float]


async def scrape(url: str, api_key: str | None) -> Scrape | None:
    """None if no server answers there with metrics."""
    from prometheus_client.parser import text_string_to_metric_families

    parts = urlsplit(url)
    pool = Pool(f"{parts.scheme}://{parts.netloc}", api_key=api_key)
    try:
        answer = await pool.send(pool.request(parts.path or "/"), 10)
    finally:
        pool.close()
    if answer.status != 200 or answer.error:
        return None
    values: dict[str, float] = defaultdict(float)
    found = Scrape(values, {}, {})
    try:
        for family in text_string_to_metric_families(answer.body.decode()):
            for sample in family.samples:
                values[sample.name] += sample.value
                if sample.name == "quire_token_rows_wasted_total":
                    found.waste[sample.labels["cause"]] = sample.value
                elif sample.name == "quire_process_memory_bytes":
                    found.memory[sample.labels["process"]] = sample.value
    except (ValueError, KeyError, UnicodeDecodeError):
        return None
    return found


def growth(before: Scrape, after: Scrape, name: str) -> float:
    return after.values.get(name, 0.0) - before.values.get(name, 0.0)
