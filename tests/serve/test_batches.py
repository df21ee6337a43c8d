"""Files and batches through the `openai` client, their stores' bounds, and `quire batch`."""

from __future__ import annotations

import gc
import io
import json
import time
import tracemalloc
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from fake_frontend import FakeFrontend
from typer.testing import CliRunner

from quire.cli.main import app
from quire.serve import create_app, create_serving
from quire.serve.http.http_io import NotFoundError
from quire.serve.http.server import background_server
from quire.serve.openai.file_store import FileStore
from quire.types.errors import InputError, OverloadedError
from quire.types.serving import ServeOptions

MODEL = FakeFrontend.model_name


@pytest.fixture
def client(fake_server: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{fake_server}/v1", api_key="none", max_retries=0, timeout=30)


def line(id: str, url: str = "/v1/chat/completions", **body: Any) -> bytes:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], **body}
    return json.dumps({"custom_id": id, "method": "POST", "url": url, "body": body}).encode()


def uploaded(client: openai.OpenAI, *lines: bytes) -> str:
    return client.files.create(file=("in.jsonl", b"\n".join(lines)), purpose="batch").id


def finished(client: openai.OpenAI, id: str) -> Any:
    for _ in range(600):
        batch = client.batches.retrieve(id)
        if batch.status in ("completed", "failed", "expired", "cancelled"):
            return batch
        time.sleep(0.02)
    raise AssertionError(f"the batch is still {batch.status}")


def run(client: openai.OpenAI, *lines: bytes, **more: Any) -> Any:
    file = uploaded(client, *lines)
    made = client.batches.create(input_file_id=file, endpoint="/v1/chat/completions", completion_window="24h", **more)
    return finished(client, made.id)


def records(client: openai.OpenAI, file: str) -> dict[str, Any]:
    found = [json.loads(text) for text in client.files.content(file).text.splitlines()]
    return {record["custom_id"]: record for record in found}


def test_files(client: openai.OpenAI) -> None:
    made = client.files.create(file=("a.jsonl", b"abc\n"), purpose="batch")
    assert (made.bytes, made.filename, made.purpose) == (4, "a.jsonl", "batch")
    assert client.files.content(made.id).content == b"abc\n"
    assert made.id in [file.id for file in client.files.list()]
    assert client.files.retrieve(made.id) == made
    assert client.files.delete(made.id).deleted
    for call in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError):
            call(made.id)
    expiring: Any = {"anchor": "created_at", "seconds": 3600}
    later = client.files.create(file=("a", b"x"), purpose="batch", expires_after=expiring)
    assert later.expires_at == later.created_at + 3600
    client.files.delete(later.id)


@pytest.mark.parametrize(
    ("fields", "files", "param"),
    [
        ({"purpose": "batch"}, {}, None),
        ({"purpose": "batch"}, {"other": b"x"}, "other"),
        ({"purpose": "fun"}, {"file": b"x"}, "purpose"),
        ({}, {"file": b"x"}, "purpose"),
        ({"purpose": "batch", "expires_after[anchor]": "x"}, {"file": b"x"}, "expires_after[anchor]"),
        (
            {"purpose": "batch", "expires_after[anchor]": "created_at", "expires_after[seconds]": "1"},
            {"file": b"x"},
            "expires_after[seconds]",
        ),
    ],
)
def test_bad_forms(fake_server: str, fields: dict[str, str], files: dict[str, bytes], param: str | None) -> None:
    response = httpx.post(f"{fake_server}/v1/files", data=fields, files=files)
    assert response.status_code == 400 and response.json()["error"]["param"] == param


@pytest.mark.parametrize("path", ["../../etc/passwd", "%2e%2e%2fx", "file-" + "0" * 32, "batch-x.json"])
def test_paths_lead_nowhere(fake_server: str, path: str) -> None:
    assert httpx.get(f"{fake_server}/v1/files/{path}/content").status_code == 404


def test_outputs_that_expire(client: openai.OpenAI) -> None:
    expiry = {"anchor": "created_at", "seconds": 7200}
    batch = run(client, line("a", max_tokens=3), output_expires_after=expiry)
    file = client.files.retrieve(batch.output_file_id or "")
    assert file.expires_at == file.created_at + 7200
    with pytest.raises(openai.BadRequestError, match="seconds"):
        run(client, line("a"), output_expires_after=expiry | {"seconds": 1})


def test_batch(client: openai.OpenAI) -> None:
    batch = run(client, line("a", max_tokens=3), line("b", temperature=-1), line("c", stream=True), line("d", n=2))
    assert batch.status == "completed"
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (4, 2, 2)
    good, bad = records(client, batch.output_file_id), records(client, batch.error_file_id)
    assert set(good) == {"a", "d"} and set(bad) == {"b", "c"}
    assert good["a"]["response"]["status_code"] == 200
    assert good["a"]["response"]["body"]["usage"]["completion_tokens"] == 3
    assert len(good["d"]["response"]["body"]["choices"]) == 2
    assert bad["b"]["response"]["status_code"] == 400
    assert bad["b"]["response"]["body"]["error"]["param"] == "temperature"
    assert batch.id in [found.id for found in client.batches.list()]


def test_more_lines_than_run_at_once(client: openai.OpenAI) -> None:
    batch = run(client, *(line(str(number), max_tokens=2) for number in range(200)))
    assert set(records(client, batch.output_file_id)) == {str(number) for number in range(200)}


def test_files_that_are_no_batches(client: openai.OpenAI) -> None:
    for lines, word in (
        ([b"{}"], "custom_id"),
        ([line("a"), line("a")], "twice"),
        ([line("a", url="/v1/completions")], "url"),
        ([b"nonsense"], "JSON"),
        ([b""], "empty"),
    ):
        batch = run(client, *lines)
        assert batch.status == "failed" and word in batch.errors.data[0].message
    with pytest.raises(openai.NotFoundError):
        client.batches.create(input_file_id="file-x", endpoint="/v1/completions", completion_window="24h")
    with pytest.raises(openai.BadRequestError) as caught:
        client.batches.create(input_file_id="x", endpoint="/v1/images", completion_window="24h")  # type: ignore[arg-type]
    assert caught.value.param == "endpoint"


def test_a_batch_may_be_cancelled(client: openai.OpenAI, fake_frontend: FakeFrontend) -> None:
    hang = [{"role": "user", "content": "hang"}]
    file = uploaded(client, line("a", max_tokens=2), line("b", messages=hang))
    made = client.batches.create(input_file_id=file, endpoint="/v1/chat/completions", completion_window="24h")
    assert fake_frontend.hanging.acquire(timeout=20)
    deadline = time.monotonic() + 20
    while client.batches.retrieve(made.id).request_counts.completed < 1:  # type: ignore[union-attr]
        assert time.monotonic() < deadline, "the line that can be answered never was"
    assert client.batches.cancel(made.id).status == "cancelling"
    assert fake_frontend.aborted.acquire(timeout=20)
    batch = finished(client, made.id)
    assert batch.status == "cancelled" and set(records(client, batch.output_file_id)) == {"a"}
    with pytest.raises(openai.BadRequestError):
        client.batches.cancel(made.id)


def test_a_folder_outlives_the_server(tmp_path: Path) -> None:
    options = ServeOptions(port=0, grace=1, files=str(tmp_path / "files"))
    made: list[Any] = []
    for round in range(2):
        with background_server(FakeFrontend, options) as url:  # type: ignore[arg-type]
            client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
            if round == 0:
                made = [run(client, line("a", max_tokens=2))]
                assert (tmp_path / "files").stat().st_mode & 0o777 == 0o700
            else:
                assert client.batches.retrieve(made[0].id) == made[0]
                assert "a" in records(client, made[0].output_file_id)


def test_the_file_store_is_bounded_and_owned(tmp_path: Path) -> None:
    store = FileStore(tmp_path, max_bytes=10, max_files=2)

    def add(content: bytes, name: str) -> str:
        with store.arriving("me") as (id, _):
            return store.adopt(id, store.write(id, io.BytesIO(content)), name, "batch", "me").id

    one = add(b"12345", "a")
    with pytest.raises(NotFoundError):
        store.get(one, "you")
    with pytest.raises(OverloadedError, match="full"):
        store.room("me", 6)
    add(b"1", "b")
    with pytest.raises(OverloadedError, match="full"):
        store.room("me", 0)
    store.close()
    again = FileStore(tmp_path, max_bytes=10, max_files=2)
    assert ({file.id for file in again.listing("me")}, again.used) == ({file.id for file in store.listing("me")}, 6)
    again.delete(one, "me")
    again.room("me", 6)
    (tmp_path / "file-x.json").write_text("{")  # cut short: what else is there is still found
    again.close()
    assert len(FileStore(tmp_path).listing("me")) == 1


async def test_stored_responses_take_the_bytes_they_are_counted_with() -> None:
    frontend = FakeFrontend()
    app = create_app(create_serving(frontend))  # type: ignore[arg-type]
    tool = {"type": "function", "name": "f", "parameters": {"x": [{}] * 100_000}}  # 0.3 MB as JSON, 7 as objects
    body = {"model": MODEL, "input": "hi", "max_output_tokens": 1, "tool_choice": "none", "tools": [tool]}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        made = [(await client.post("/v1/responses", json=body)).json()]  # what is made but once is made
        tracemalloc.start()
        try:
            ids = [(await client.post("/v1/responses", json=body)).json()["id"] for _ in range(2)]
            frontend.text.rendered.clear()
            gc.collect()
            grown = tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()
        assert grown < 2_000_000
        assert (await client.get(f"/v1/responses/{made[0]['id']}")).json() == made[0]
        assert all([(await client.get(f"/v1/responses/{id}")).json()["tools"] == made[0]["tools"] for id in ids])


def test_quire_batch(default_model: Any, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    name = default_model.name
    words = [{"role": "user", "content": "What is gravity?"}]
    lines = [
        line("chat", model=name, messages=words, max_tokens=8, temperature=0),
        json.dumps(
            {"custom_id": "text", "method": "POST", "url": "/v1/completions", "body": {"model": name, "prompt": "One,"}}
        ).encode(),
        json.dumps(
            {"custom_id": "vector", "method": "POST", "url": "/v1/embeddings", "body": {"model": name, "input": "One"}}
        ).encode(),
    ]
    source.write_bytes(b"\n".join(lines))
    options = ["--kv-memory", "64M", "--tool-parser", "auto"]
    done = CliRunner().invoke(app, ["batch", str(source), str(target), *options], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    found = {record["custom_id"]: record["response"]["body"] for record in map(json.loads, target.open())}
    assert found["chat"]["choices"][0]["message"]["content"].startswith("Gravity")
    assert found["text"]["choices"][0]["text"] and len(found["vector"]["data"][0]["embedding"]) > 100
    source.write_bytes(line("a", model="other"))
    done = CliRunner().invoke(app, ["batch", str(source), str(target), "--kv-memory", "64M"], catch_exceptions=False)
    assert done.exit_code == 1 and "no model" in target.read_text()


def test_lines_that_are_no_requests_keep_their_names(default_model: Any, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    wrong = [{"method": "GET"}, {"url": "/v1/nope"}, {"method": 5}, {"body": None}, {"url": None}]
    lines = [json.dumps({**json.loads(line(str(at))), **change}) for at, change in enumerate(wrong)]
    source.write_text("\n".join([*lines, '{"custom_id": 7}', "nonsense"]))
    done = CliRunner().invoke(app, ["batch", str(source), str(target), "--kv-memory", "64M"], catch_exceptions=False)
    found = [json.loads(text)["custom_id"] for text in target.open()]
    assert done.exit_code == 1 and sorted(map(str, found)) == ["0", "1", "2", "3", "4", "None", "None"]


def test_lines_of_one_name_are_refused_before_any_is_answered(default_model: Any, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(b"\n".join([line("a"), line("b"), line("a", url="/v1/nope")]))
    with pytest.raises(InputError, match="custom_id 'a' occurs twice"):
        CliRunner().invoke(app, ["batch", str(source), str(target)], catch_exceptions=False)
    assert not target.exists()
