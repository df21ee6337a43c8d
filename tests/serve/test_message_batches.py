"""Batches of messages through Anthropic's client: worked off, listed, cancelled, gone on with after a restart."""

from __future__ import annotations

import json
import os
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from fake_frontend import FakeFrontend

from quire.serve.anthropic import message_batches
from quire.serve.anthropic.message_batches import MessageBatches
from quire.serve.core.api_keys import INFERENCE, Key, KeyRing, digest
from quire.serve.core.background_lanes import Lanes
from quire.serve.http import background_work
from quire.serve.http.server import background_server
from quire.types.serving import ServeOptions

MODEL = FakeFrontend.model_name
USERS = {name: f"{name}-secret-0123456789" for name in ("ada", "bob")}
KEYS = KeyRing([Key(name, digest(secret), frozenset({INFERENCE})) for name, secret in USERS.items()])


def client(url: str, key: str = "none") -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=url, api_key=key, max_retries=0, timeout=30)


def asked(*words: str, **more: Any) -> list[Any]:
    def params(word: str) -> dict[str, Any]:
        return {"model": MODEL, "max_tokens": 4, "messages": [{"role": "user", "content": word}], **more}

    return [{"custom_id": f"r{number}", "params": params(word)} for number, word in enumerate(words)]


def until(condition: Callable[[], Any]) -> Any:
    """What becomes true while the server works."""
    for _ in range(2000):
        if found := condition():
            return found
        time.sleep(0.01)
    raise AssertionError("it never came to be")


def ended(api: anthropic.Anthropic, id: str) -> Any:
    def over() -> Any:
        batch = api.messages.batches.retrieve(id)
        return batch if batch.processing_status == "ended" else None

    return until(over)


def test_a_batch(fake_server: str) -> None:
    api = client(fake_server)
    requests = [*asked("one", "two", "boom"), {"custom_id": "odd", "params": {"model": "other", "max_tokens": 1}}]
    requests[1]["params"]["stream"] = True
    batch = api.messages.batches.create(requests=requests)
    assert batch.id.startswith("msgbatch_") and batch.results_url is None
    assert batch.request_counts.processing == 4
    batch = ended(api, batch.id)
    counts = batch.request_counts
    assert (counts.succeeded, counts.errored, counts.processing) == (1, 3, 0) and batch.ended_at
    found = {entry.custom_id: entry.result for entry in api.messages.batches.results(batch.id)}
    assert found["r0"].type == "succeeded" and found["r0"].message.usage.output_tokens == 4
    errors = {name: result.error.error for name, result in found.items() if result.type == "errored"}
    assert errors["r1"].type == "invalid_request_error" and "stream" in errors["r1"].message
    assert errors["r2"].type == "api_error" and "secret" not in errors["r2"].message
    assert errors["odd"].type == "invalid_request_error" and "messages" in errors["odd"].message
    assert batch.id in [entry.id for entry in api.messages.batches.list(limit=1)]  # pages are followed
    assert api.messages.batches.delete(batch.id).type == "message_batch_deleted"
    with pytest.raises(anthropic.NotFoundError):
        api.messages.batches.retrieve(batch.id)


def test_a_body_of_many_lines(fake_server: str) -> None:
    body = json.dumps({"requests": asked("one\ntwo")}, indent=2)
    created = httpx.post(f"{fake_server}/v1/messages/batches", content=body).json()
    assert ended(client(fake_server), created["id"]).request_counts.succeeded == 1


def test_pages(fake_server: str) -> None:
    api = client(fake_server)
    ids = [api.messages.batches.create(requests=asked("hi")).id for _ in range(5)][::-1]
    first = api.messages.batches.list(limit=2)
    assert [entry.id for entry in first.data] == ids[:2] and first.has_more
    second = api.messages.batches.list(limit=2, after_id=ids[1])
    assert [entry.id for entry in second.data] == ids[2:4]
    back = api.messages.batches.list(limit=2, before_id=ids[3])
    assert [entry.id for entry in back.data] == ids[1:3]
    with pytest.raises(anthropic.BadRequestError, match="limit"):
        api.messages.batches.list(limit=0)
    for id in ids:
        ended(api, id)


def test_cancelled(fake_server: str, fake_frontend: FakeFrontend) -> None:
    api = client(fake_server)
    batch = api.messages.batches.create(requests=asked("hang", max_tokens=40))
    assert fake_frontend.hanging.acquire(timeout=20)
    with pytest.raises(anthropic.NotFoundError, match="not ended"):
        raise_for(httpx.get(f"{fake_server}/v1/messages/batches/{batch.id}/results"))
    with pytest.raises(anthropic.BadRequestError, match="cancel"):
        api.messages.batches.delete(batch.id)
    assert api.messages.batches.cancel(batch.id).processing_status == "canceling"
    assert ended(api, batch.id).request_counts.canceled == 1
    assert [entry.result.type for entry in api.messages.batches.results(batch.id)] == ["canceled"]
    assert fake_frontend.aborted.acquire(timeout=20)


def test_cancelled_before_it_began(fake_server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reading, read = threading.Event(), MessageBatches._unanswered

    def slowly(self: MessageBatches, kept: Any) -> Any:
        first = not reading.is_set()
        reading.set()
        if first:
            until(lambda: kept.batch.cancel_initiated_at)
        return read(self, kept)

    monkeypatch.setattr(MessageBatches, "_unanswered", slowly)
    api = client(fake_server)
    batch = api.messages.batches.create(requests=asked("one", "two"))
    assert reading.wait(20)
    api.messages.batches.cancel(batch.id)
    counts = ended(api, batch.id).request_counts
    assert (counts.canceled, counts.processing) == (2, 0)


def raise_for(response: httpx.Response) -> None:
    error = response.json()["error"]
    assert response.json()["type"] == "error" and error["type"] == "not_found_error"
    raise anthropic.NotFoundError(error["message"], response=response, body=error)


@pytest.mark.parametrize("wrong", [[], asked("x") * 2, [{"custom_id": "a b", "params": {}}]])
def test_what_is_no_batch(fake_server: str, wrong: list[Any]) -> None:
    with pytest.raises(anthropic.BadRequestError):
        client(fake_server).messages.batches.create(requests=wrong)


def test_keys_have_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message_batches, "MAX_BATCHES", 4)
    frontend = FakeFrontend()
    with background_server(lambda: frontend, ServeOptions(port=0, grace=1), keys=KEYS) as url:  # type: ignore[arg-type, return-value]
        ada, bob = (client(url, secret) for secret in USERS.values())
        batch = ada.messages.batches.create(requests=asked("hi"))
        assert not bob.messages.batches.list().data
        with pytest.raises(anthropic.NotFoundError):
            bob.messages.batches.retrieve(batch.id)
        ended(ada, batch.id)
        assert frontend.requests[-1].salt and frontend.requests[-1].tenant == "ada"
        ada.messages.batches.create(requests=asked("hi"))
        with pytest.raises(anthropic.APIStatusError, match="delete some"):
            ada.messages.batches.create(requests=asked("hi"))
        assert bob.messages.batches.create(requests=asked("hi"))


def test_a_restart_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Lanes, "at_once", lambda self: 1)
    options = ServeOptions(port=0, grace=0.1, files=str(tmp_path))
    frontend = FakeFrontend()
    with background_server(lambda: frontend, options) as url:  # type: ignore[arg-type, return-value]
        batch = client(url).messages.batches.create(requests=asked("one", "two", "hang", "four", max_tokens=40))
        assert frontend.hanging.acquire(timeout=20)
    results = tmp_path / f"{batch.id}.results"
    assert results.read_bytes().count(b"\n") == 2
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in tmp_path.glob("msgbatch_*"))
    results.write_bytes(results.read_bytes() + b'{"custom_id":"r2","resu')  # as a kill would leave it
    monkeypatch.setattr(background_work, "MAX_DEATHS", 0)
    again = FakeFrontend()
    again.client.ended.set()  # what hung ends now
    with background_server(lambda: again, options) as url:  # type: ignore[arg-type, return-value]
        found = ended(client(url), batch.id)
        assert (found.request_counts.succeeded, found.request_counts.errored) == (3, 1)
        names = [entry.custom_id for entry in client(url).messages.batches.results(batch.id)]
        assert names == ["r0", "r1", "r2", "r3"]
        assert len(again.requests) == 2  # what had a result was not asked again


def test_a_key_has_one_batch_under_way(tmp_path: Path) -> None:
    """Whichever API ordered it; other keys' go on beside it."""
    frontend = FakeFrontend()
    with background_server(lambda: frontend, ServeOptions(port=0, grace=0.1), keys=KEYS) as url:  # type: ignore[arg-type, return-value]
        ada, bob = (client(url, secret) for secret in USERS.values())
        api = openai.OpenAI(base_url=f"{url}/v1", api_key=USERS["ada"], max_retries=0)
        body = {"model": MODEL, "max_tokens": 40, "messages": [{"role": "user", "content": "hang"}]}
        line = json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body})
        file = api.files.create(file=("a.jsonl", line.encode()), purpose="batch")
        first = api.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
        assert frontend.hanging.acquire(timeout=20)
        second = ada.messages.batches.create(requests=asked("two"))
        ended(bob, bob.messages.batches.create(requests=asked("three")).id)
        assert ada.messages.batches.retrieve(second.id).request_counts.processing == 1
        api.batches.cancel(first.id)
        assert ended(ada, second.id).request_counts.succeeded == 1


def test_the_batch_of_a_key_that_is_gone(tmp_path: Path) -> None:
    options = ServeOptions(port=0, grace=0.1, files=str(tmp_path))
    frontend = FakeFrontend()
    with background_server(lambda: frontend, options, keys=KEYS) as url:  # type: ignore[arg-type, return-value]
        client(url, USERS["ada"]).messages.batches.create(requests=asked("hang", max_tokens=40))
        assert frontend.hanging.acquire(timeout=20)
    with background_server(FakeFrontend, options, keys=KeyRing(KEYS.keys[1:])):  # type: ignore[arg-type]
        [path] = tmp_path.glob("msgbatch_*.json")
        until(lambda: json.loads(path.read_bytes())["batch"]["ended_at"])
    [line] = path.with_suffix(".results").read_bytes().splitlines()
    assert json.loads(line)["result"]["type"] == "errored" and not path.with_suffix(".requests").exists()


def test_no_other_server_sweeps_it_away(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with background_server(FakeFrontend, ServeOptions(port=0, grace=0.1)) as url:  # type: ignore[arg-type]
        for folder in tmp_path.iterdir():
            os.utime(folder, (0, 0))  # it was started long ago
        with background_server(FakeFrontend, ServeOptions(port=0, grace=0.1)):  # type: ignore[arg-type]
            batch = client(url).messages.batches.create(requests=asked("hi"))
            assert ended(client(url), batch.id).request_counts.succeeded == 1
    assert not list(tmp_path.iterdir())


def test_strict_fields_hold_in_batches(tmp_path: Path) -> None:
    with background_server(FakeFrontend, ServeOptions(port=0, grace=0.1, strict_fields=True)) as url:  # type: ignore[arg-type]
        batch = client(url).messages.batches.create(requests=asked("hi", no_such_field=1))
        assert ended(client(url), batch.id).request_counts.errored == 1


async def test_a_window_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message_batches, "WINDOW", 0)
    with background_server(FakeFrontend, ServeOptions(port=0, grace=0.1)) as url:  # type: ignore[arg-type]
        api = client(url)
        batch = api.messages.batches.create(requests=asked("hang", max_tokens=40))
        assert ended(api, batch.id).request_counts.expired == 1
