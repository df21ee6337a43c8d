"""The load generator: arrivals, a real run against a server, and the figures it makes of it."""

from __future__ import annotations

import asyncio
import json
import socket
import statistics
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from quire.bench.load.arrivals import at_rate, read_trace
from quire.bench.load.http import Answer
from quire.bench.load.load_report import SLO, parse_slo, rows, summarise
from quire.bench.load.plot import draw
from quire.bench.load.runner import Load, Phase, Record, Target
from quire.bench.load.scrape import Scrape
from quire.bench.workloads import Job
from quire.cli.main import app
from quire.types.errors import ConfigError

EVENT = 'data: {"choices":[{"index":0,"text":"x","finish_reason":null}]}\n\n'
COUNTS = '{"completion_tokens":3,"prompt_tokens":2,"prompt_tokens_details":{"cached_tokens":1}}'
USAGE = f'data: {{"choices":[],"usage":{COUNTS}}}\n\n'
PIECES = (EVENT[:10], EVENT[10:] + EVENT, EVENT, USAGE, "data: [DONE]\n\n")
REFUSAL = "HTTP/1.1 429 Too Many Requests\r\nRetry-After: 2\r\nContent-Length: 2\r\n\r\n{}"
STREAM = (
    "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    + "".join(f"{len(part.encode()):x}\r\n{part}\r\n" for part in PIECES)
    + "0\r\n\r\n"
)
CUT = STREAM[: len(STREAM) // 2]


@contextmanager
def canned(answers: list[str]) -> Iterator[str]:
    """A server that gives these answers in turn to whatever it is asked, over connections it keeps."""
    turn = iter(answers * 1000)
    lock = threading.Lock()

    def converse(connection: socket.socket) -> None:
        with connection:
            data = b""
            while chunk := connection.recv(65536):
                data += chunk
                head, found, body = data.partition(b"\r\n\r\n")
                length = next((int(h[15:]) for h in head.split(b"\r\n") if h.lower().startswith(b"content-length:")), 0)
                if found and len(body) >= length:
                    data = body[length:]
                    if head.startswith(b"GET /metrics"):
                        connection.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
                        continue
                    with lock:
                        answer = next(turn)
                    connection.sendall(answer.encode())
                    if answer == CUT:
                        return  # hang up

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=converse, args=(connection,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)


def run(url: str, jobs: int, concurrency: int = 1) -> Phase:
    async def work() -> Phase:
        async with Load(Target(url, model="m", timeout=20)) as load:
            return await load.closed_loop("test", [Job([1, 2], 3)] * jobs, concurrency)

    return asyncio.run(work())


@pytest.mark.parametrize(("burstiness", "expected"), [(0.25, 2.0), (1.0, 1.0), (4.0, 0.5)])
def test_gaps_have_the_rate_and_the_burstiness_asked_for(burstiness: float, expected: float) -> None:
    calls = at_rate([Job([1], 1)] * 4000, 50.0, burstiness, seed=3)
    gaps = [b.due - a.due for a, b in pairwise(calls)]
    assert statistics.mean(gaps) == pytest.approx(1 / 50, rel=0.1)
    assert statistics.stdev(gaps) / statistics.mean(gaps) == pytest.approx(expected, rel=0.15)  # 1 / sqrt(shape)
    assert calls == at_rate([Job([1], 1)] * 4000, 50.0, burstiness, seed=3)


def test_traces(tmp_path: Path) -> None:
    lines = [
        {"timestamp": 27000, "input_length": 1100, "output_length": 7, "hash_ids": [1, 2, 3]},
        {"timestamp": 28000, "input_length": 1030, "output_length": 9, "hash_ids": [1, 2, 9]},
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    first, second = read_trace(path, limit=10, speed=2.0, seed=0, vocab=5000)
    assert (first.due, second.due) == (0.0, 0.5)
    assert (len(first.job.prompt), len(second.job.prompt), second.job.output_len) == (1100, 1030, 9)
    assert first.job.prompt[:1024] == second.job.prompt[:1024]  # two equal blocks
    assert first.job.prompt[1024:1030] != second.job.prompt[1024:1030]
    table = tmp_path / "trace.csv"
    table.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
    )
    calls = read_trace(table, limit=10, speed=1.0, seed=0, vocab=5000)
    assert [len(call.job.prompt) for call in calls] == [374, 396]
    assert calls[1].due == pytest.approx(4.314579)
    path.write_text('{"timestamp": 1}\n')
    with pytest.raises(ConfigError, match="cannot read the trace"):
        read_trace(path, limit=10, speed=1.0, seed=0, vocab=5000)


def test_streams_refusals_and_hang_ups_are_told_apart() -> None:
    with canned([STREAM, REFUSAL, CUT]) as url:
        phase = run(url, 9)
    kinds = [(r.ok, r.refused) for r in phase.records]
    assert kinds.count((True, False)) == 3 and kinds.count((False, True)) == 3 and kinds.count((False, False)) == 3
    good = next(r for r in phase.records if r.ok)
    assert (good.answer.tokens, good.answer.cached, len(good.times)) == (3, 1, 3)
    summary = summarise(phase, SLO(ttft=60.0))
    assert (summary["completed"], summary["refused"], summary["failed"]) == (3, 3, 3)
    assert summary["slo_share"] == pytest.approx(1 / 3)
    assert summary["refusals_with_retry_after"] == 1.0
    assert summary["refusal_s"]["p99"] is not None and summary["compute"] is None
    assert "closed" in next(iter(summary["errors"]))


def record(due: float, *times: float, status: int = 200, tokens: int | None = None) -> Record:
    answer = Answer(status=status, times=list(times), tokens=len(times) if tokens is None else tokens)
    return Record(due, 10, 5, answer, due, times[-1] if times else due + 0.001, list(times))


def test_late_and_refused_requests_count_against_goodput() -> None:
    scrape = Scrape({"quire_token_rows_total": 0.0}, {"recompute": 0.0, "padding": 0.0}, {})
    after = Scrape({"quire_token_rows_total": 100.0}, {"recompute": 4.0, "padding": 6.0}, {"api": 5.0})
    records = [
        record(0.0, 0.1, 0.2, 0.3),  # in time
        record(0.0, 0.7, 0.8),  # first token late
        record(0.0, 0.1, 0.9),  # slow between tokens
        record(0.0, status=429),
    ]
    summary = summarise(Phase("p", 4.0, 1.0, records, scrape, after), SLO(ttft=0.5, tpot=0.3))
    assert (summary["goodput_req_s"], summary["slo_share"]) == (1.0, 0.25)
    assert summary["goodput_tok_s"] == 3.0
    compute = summary["compute"]
    assert compute["goodput"] == pytest.approx(13 / 100)  # prompt and answer of the one in time
    assert compute["waste"] == {"recompute": 4.0, "padding": 6.0, "late": 24.0}
    assert compute["waste_share"] == pytest.approx(0.34)
    text = "\n".join(f"{a} {b}" for a, b in rows(summary))
    assert "25.0% of what was offered" in text and "late 24" in text


@pytest.mark.parametrize(
    ("text", "slo"),
    [
        ("chat", SLO(ttft=0.5)),
        ("completion", SLO(ttft=0.1)),
        ("ttft=200,tpot=50", SLO(ttft=0.2, tpot=0.05)),
        ("tpot=20ms", SLO(tpot=0.02)),
    ],
)
def test_slos(text: str, slo: SLO) -> None:
    assert parse_slo(text) == slo


@pytest.mark.parametrize("text", ["fast", "ttft", "ttft=soon", "itl=5"])
def test_slos_nobody_can_read(text: str) -> None:
    with pytest.raises(ConfigError, match="SLO"):
        parse_slo(text)


def test_plots_are_well_formed() -> None:
    phases = [Phase("<all> & more", 4.0, 1.0, [record(0.0, 0.1, 0.2), record(0.5, 0.7)], None, None)]
    empty = Phase("nothing", 1.0, 0.0, [], None, None)
    for some in (phases, [empty], [*phases, empty]):
        root = ElementTree.fromstring(draw(some, SLO(ttft=0.5), "t & t"))
        assert root.tag.endswith("svg")
    assert len(ElementTree.fromstring(draw(phases, SLO(), "t")).findall(".//{*}polyline")) == 4


def test_against_a_live_server(live_server: str, tmp_path: Path) -> None:
    command = [
        "bench", "serve", live_server, "--workload", "fixed", "--in", "24", "--out", "4", "--num", "6",
        "--load", "0.5", "--slo", "ttft=60000", "--json", str(tmp_path / "out.json"),
        "--plot", str(tmp_path / "out.svg"),
    ]  # fmt: skip
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    out: dict[str, Any] = json.loads((tmp_path / "out.json").read_text())
    offline, half = out["phases"]
    assert offline["completed"] == half["completed"] == 6
    assert offline["output_tok_s"] > 0 and half["offered_req_s"] == pytest.approx(0.5 * offline["req_s"], rel=0.2)
    assert half["slo_share"] == 1.0
    compute = half["compute"]
    assert 6 * (24 + 3) <= compute["rows"] <= 6 * (24 + 5)  # the last token of an answer is never computed
    assert compute["goodput"] == pytest.approx(6 * 28 / compute["rows"])
    assert compute["memory_bytes"]["engine"][1] > 0
    assert ElementTree.parse(tmp_path / "out.svg")


def test_chat_endpoint_and_closed_loop(live_server: str, tmp_path: Path) -> None:
    command = [
        "bench", "serve", live_server, "--endpoint", "chat", "--workload", "fixed", "--in", "8", "--out", "3",
        "--num", "4", "--concurrency", "2", "--json", str(tmp_path / "out.json"),
    ]  # fmt: skip
    assert CliRunner().invoke(app, command).exit_code == 0
    phase = json.loads((tmp_path / "out.json").read_text())["phases"][0]
    assert phase["completed"] == 4 and phase["offered_req_s"] is None


def test_nobody_there() -> None:
    done = CliRunner().invoke(app, ["bench", "serve", "http://127.0.0.1:9", "--model", "m"])
    assert isinstance(done.exception, ConfigError) and "does not answer" in str(done.exception)
