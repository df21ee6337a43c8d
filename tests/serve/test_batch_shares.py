"""Batches of several keys: what each may hold, whose turn it is, and what a server's end does to them."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import random
import stat
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from fake_frontend import FakeClient, FakeFrontend

from quire.serve import create_serving
from quire.serve.core import stored_records
from quire.serve.core.api_keys import INFERENCE, Key, KeyRing, digest
from quire.serve.core.background_lanes import Lanes
from quire.serve.core.generation import BACKGROUND
from quire.serve.core.stored_records import LOCK, Shares, sweep_temporary
from quire.serve.http.server import background_server
from quire.serve.openai import batches, file_store, upload_parts
from quire.serve.openai.batches import Batches
from quire.serve.openai.file_store import FileStore
from quire.types.errors import ConfigError, OverloadedError
from quire.types.outputs import Delta
from quire.types.request import Request
from quire.types.serving import ServeOptions

CHAT = "/v1/chat/completions"
SECRETS = {"alice": "alice-secret-0123456789", "bob": "bob-secret-0123456789"}


def ring(*names: str) -> KeyRing:
    return KeyRing([Key(name, digest(SECRETS[name]), frozenset({INFERENCE})) for name in names])


class Patient(FakeFrontend):
    """Answers what has `wait` in it when it may."""

    def __init__(self) -> None:
        super().__init__()
        self.may = threading.Event()
        self.stuck = threading.Semaphore(0)

    async def stream(self, request: Request, direct: object = None) -> AsyncIterator[list[Delta]]:
        import asyncio

        if b"wait" in bytes(request.prompt) and not self.may.is_set():
            self.stuck.release()
            while not self.may.is_set():
                await asyncio.sleep(0.01)
        async for deltas in super().stream(request, direct):
            yield deltas


@contextmanager
def serving(frontend: FakeFrontend, folder: Path | None = None, keys: KeyRing | None = None) -> Iterator[str]:
    options = ServeOptions(port=0, grace=0.1, files=str(folder) if folder else None)
    with background_server(lambda: frontend, options, keys=keys or ring(*SECRETS)) as url:  # type: ignore[arg-type, return-value]
        yield url


class User:
    def __init__(self, url: str, name: str):
        self.http = httpx.Client(base_url=url, headers={"authorization": f"Bearer {SECRETS[name]}"}, timeout=30)

    def upload(self, *words: str) -> str:
        lines = []
        for word in words:
            body = {"model": FakeFrontend.model_name, "messages": [{"role": "user", "content": word}], "max_tokens": 2}
            lines.append(json.dumps({"custom_id": word[:100], "method": "POST", "url": CHAT, "body": body}))
        form = {"files": {"file": ("in.jsonl", "\n".join(lines))}, "data": {"purpose": "batch"}}
        return self.http.post("/v1/files", **form).raise_for_status().json()["id"]  # type: ignore[no-any-return]

    def order(self, file: str, **fields: Any) -> httpx.Response:
        return self.http.post(
            "/v1/batches", json={"input_file_id": file, "endpoint": CHAT, "completion_window": "24h", **fields}
        )

    def batch(self, *words: str, **fields: Any) -> str:
        return self.order(self.upload(*words), **fields).raise_for_status().json()["id"]  # type: ignore[no-any-return]

    def state(self, id: str) -> Any:
        return self.http.get(f"/v1/batches/{id}").raise_for_status().json()

    def finished(self, id: str) -> Any:
        for _ in range(1500):
            if (state := self.state(id))["status"] in ("completed", "failed", "cancelled", "expired"):
                return state
            time.sleep(0.02)
        raise AssertionError(f"the batch is still {state['status']}")

    def answers(self, file: str) -> list[str]:
        text = self.http.get(f"/v1/files/{file}/content").raise_for_status().text
        return [json.loads(line)["custom_id"] for line in text.splitlines()]


def test_a_share_leaves_as_much_as_it_takes() -> None:
    share = Shares(100, shared=True)
    for owner, most in (("a", 50), ("b", 25), ("c", 12)):
        assert share.fits(owner, most) and not share.fits(owner, most + 1)
        share.take(owner, most)
    share.take("a", -50)
    assert share.fits("b", 1) and share.held == {"b": 25, "c": 12}
    assert Shares(100, shared=False).fits("a", 100)


def test_batches_of_one_key_keep_nobody_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Seen: 10,000 finished batches of one key, and every other got 503, after a restart too."""
    monkeypatch.setattr(batches, "MAX_BATCHES", 16)
    monkeypatch.setattr(batches, "MAX_ACTIVE", 8)
    frontend = Patient()
    with serving(frontend, tmp_path) as url:
        alice, bob = User(url, "alice"), User(url, "bob")
        bad = alice.upload("same", "same")
        made = []
        for _ in range(20):  # over at once, the oldest make room
            made.append(alice.order(bad).raise_for_status().json()["id"])
            alice.finished(made[-1])
        assert [batch["id"] for batch in alice.http.get("/v1/batches").json()["data"]] == made[:-9:-1]
        file = alice.upload("wait")
        states = [alice.order(file).status_code for _ in range(6)]
        assert states == [200] * 4 + [503] * 2
        assert bob.finished(bob.batch("hello"))["status"] == "completed"
        frontend.may.set()
    with serving(Patient(), tmp_path) as url:
        assert User(url, "bob").order(User(url, "bob").upload("x")).status_code == 200


def test_a_batch_waits_for_its_own_key_only() -> None:
    frontend = Patient()
    with serving(frontend) as url:
        alice, bob = User(url, "alice"), User(url, "bob")
        first, second = alice.batch("wait"), alice.batch("hello")
        assert frontend.stuck.acquire(timeout=20)
        assert bob.finished(bob.batch("hello"))["status"] == "completed"
        assert alice.state(second)["status"] == "validating"
        frontend.may.set()
        assert {alice.finished(id)["status"] for id in (first, second)} == {"completed"}


def test_metadata_is_bounded_and_counted(tmp_path: Path) -> None:
    with serving(FakeFrontend(), tmp_path) as url:
        alice = User(url, "alice")
        file = alice.upload("hello")
        for bad in ({str(n): "" for n in range(17)}, {"x" * 65: ""}, {"x": "y" * 513}, {"x": 1}):
            refused = alice.order(file, metadata=bad)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "metadata"), refused.text
        most = {f"{n:064}": "€" * 512 for n in range(16)}
        assert alice.order(file, metadata=most).json()["metadata"] == most


async def test_records_count_as_storage(tmp_path: Path) -> None:
    serving = create_serving(FakeFrontend(), keys=ring(*SECRETS))  # type: ignore[arg-type]
    store = FileStore(tmp_path, max_bytes=100_000, shared=True)
    with store.arriving("alice") as (id, _):
        store.write(id, open(os.devnull, "rb"))  # noqa: SIM115
        store.adopt(id, 0, "a", "batch", "alice")
    made = Batches(serving, store)
    body = batches.BatchRequest(input_file_id=id, endpoint=CHAT, completion_window="24h", metadata={"x": "y" * 512})
    before = store.used
    one = made.create(body, "alice")
    assert store.used - before > 512
    await made._tasks[one.id]
    made.delete(one.id, "alice")
    assert store.used == before and not list(tmp_path.glob("batch-*"))
    await made.close()


def test_listings_are_paged_by_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_store, "PAGE_BYTES", 1000)
    with serving(FakeFrontend()) as url:
        alice = User(url, "alice")
        file = alice.upload("same", "same")
        made = [alice.order(file).json()["id"] for _ in range(8)]
        found, after = [], {}
        while True:
            page = alice.http.get("/v1/batches", params=after).json()
            assert len(json.dumps(page["data"])) < 2500
            found += [batch["id"] for batch in page["data"]]
            if not page["has_more"]:
                break
            after = {"after": page["last_id"]}
        assert found == made[::-1]


def test_deleting_batches() -> None:
    frontend = Patient()
    with serving(frontend) as url:
        alice, bob = User(url, "alice"), User(url, "bob")
        id = alice.batch("wait")
        assert frontend.stuck.acquire(timeout=20)
        assert alice.http.delete(f"/v1/batches/{id}").status_code == 400
        frontend.may.set()
        output = alice.finished(id)["output_file_id"]
        assert bob.http.delete(f"/v1/batches/{id}").status_code == 404
        assert alice.http.delete(f"/v1/batches/{id}").json()["deleted"]
        assert alice.http.get(f"/v1/batches/{id}").status_code == 404
        assert alice.answers(output) == ["wait"]


def test_batches_that_are_over_are_forgotten_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(FakeFrontend()) as url:
        alice = User(url, "alice")
        id = alice.batch("hello")
        alice.finished(id)
        monkeypatch.setattr(batches, "KEPT", -10)
        assert alice.http.get(f"/v1/batches/{id}").status_code == 404


# ---- the server's end ---------------------------------------------------------------------------------------


def stopped(folder: Path, *words: str) -> str:
    """The id of a batch that a server's end cut short, all that need not wait answered."""
    frontend = Patient()
    with serving(frontend, folder) as url:
        alice = User(url, "alice")
        id = alice.batch(*words)
        assert frontend.stuck.acquire(timeout=20)
        while alice.state(id)["request_counts"]["completed"] < sum("wait" not in word for word in words):
            time.sleep(0.01)
    return id


def test_batches_go_on_after_a_restart(tmp_path: Path) -> None:
    id = stopped(tmp_path, "one", "two", "wait", "three")
    record = json.loads((tmp_path / f"{id}.json").read_text())
    output = tmp_path / record["outputs"]["output"]
    output.write_bytes(output.read_bytes() + b'{"custom_id":"wait","resp')  # a line that was cut short
    frontend = Patient()
    frontend.may.set()
    with serving(frontend, tmp_path) as url:
        alice = User(url, "alice")
        state = alice.finished(id)
        assert state["request_counts"] == {"total": 4, "completed": 4, "failed": 0}
        assert sorted(alice.answers(state["output_file_id"])) == ["one", "three", "two", "wait"]
    assert ["wait" in bytes(request.prompt).decode() for request in frontend.requests] == [True]
    assert frontend.requests[0].tenant == "alice" and frontend.requests[0].salt


def test_long_lines_go_on_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long prompts are prepared in threads, which a batch has after a restart as well."""
    monkeypatch.setattr(Lanes, "at_once", lambda self: 1)
    id = stopped(tmp_path, "one", "wait", "wait" + "x" * 5000)
    frontend = Patient()
    frontend.may.set()
    with serving(frontend, tmp_path) as url:
        alice = User(url, "alice")
        state = alice.finished(id)
        assert state["request_counts"] == {"total": 3, "completed": 2, "failed": 1}
        failed = alice.http.get(f"/v1/files/{state['error_file_id']}/content").json()
        assert failed["response"]["body"]["error"]["code"] == "context_length_exceeded"


def test_a_batch_whose_key_is_gone_ends(tmp_path: Path) -> None:
    id = stopped(tmp_path, "one", "wait")
    with serving(Patient(), tmp_path, ring("bob")):
        pass
    with serving(Patient(), tmp_path) as url:
        alice = User(url, "alice")
        state = alice.state(id)
        assert (state["status"], state["errors"]["data"][0]["code"]) == ("failed", "key_removed")
        assert alice.answers(state["output_file_id"]) == ["one"]


def test_what_was_left_behind_is_removed(tmp_path: Path) -> None:
    id = stopped(tmp_path, "one", "wait")
    known = set(tmp_path.iterdir())
    for name in ("file-" + "0" * 32, "file-" + "1" * 32 + ".json", "batch-" + "2" * 32 + ".tmp"):
        (tmp_path / name).write_text('{"file": {}}')
    (tmp_path / "notes.txt").write_text("mine")
    with serving(Patient(), tmp_path):
        pass
    left = set(tmp_path.iterdir()) - known
    assert left == {tmp_path / "notes.txt"} and (tmp_path / f"{id}.json").exists()


def test_folders_of_servers_that_were_killed_are_removed(tmp_path: Path) -> None:
    ours, theirs, old, young = (tmp_path / f"{stored_records.PREFIX}{name}" for name in "abcd")
    store = FileStore(ours)
    FileStore(theirs).close()
    for folder in (old, young):
        folder.mkdir()
    os.utime(old, (0, 0))
    sweep_temporary(tmp_path)
    assert ours.exists() and young.exists() and not theirs.exists() and not old.exists()
    store.close()


def test_nobody_else_may_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tmp_path.chmod(0o755)
    before = os.umask(0)
    try:
        with caplog.at_level(logging.WARNING), serving(FakeFrontend(), tmp_path) as url:
            alice = User(url, "alice")
            alice.finished(alice.batch("hello"))
    finally:
        os.umask(before)
    files = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir() if path.is_file()}
    folders = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir() if path.is_dir()}
    assert len(files) >= 6 and set(files.values()) == {0o600}, files
    assert set(folders.values()) <= {0o700}, folders
    assert "chmod 700" in caplog.text


def test_a_folder_has_one_server(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    with pytest.raises(ConfigError, match="another server"):
        FileStore(tmp_path)
    store.close()
    FileStore(tmp_path).close()
    assert (tmp_path / LOCK).exists()


# ---- behind what callers wait for ---------------------------------------------------------------------------


async def test_lines_leave_room_to_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    info = FakeClient.info.__class__(**{**{f: getattr(FakeClient.info, f) for f in FakeClient.info.__struct_fields__}})
    info.slots, info.priorities = 16, False
    monkeypatch.setattr(FakeClient, "info", info)
    serving = create_serving(FakeFrontend())  # type: ignore[arg-type]
    admission, made = serving.admission, serving.lanes
    key = serving.keys.find(None)
    assert made.at_once() == 8
    lines = [admission.enter(key, background=True) for _ in range(8)]
    assert (made.at_once(), admission.waiting) == (8, 0)
    callers = [admission.enter(key) for _ in range(3)]
    assert made.at_once() == 1  # they wait
    for permit in callers:
        admission.start(permit)
    assert made.at_once() == 5
    made._working.update(("alice", "bob"))
    assert made.at_once() == 2
    info.priorities = True
    assert made.at_once() == 8
    for permit in (*lines, *callers):
        admission.leave(permit)
    assert (admission.inflight, admission.background) == (0, 0)


def test_lines_have_the_lowest_priority() -> None:
    frontend = FakeFrontend()
    with serving(frontend) as url:
        alice = User(url, "alice")
        alice.finished(alice.batch("hello"))
        alice.http.post(CHAT, json={"model": frontend.model_name, "messages": [{"role": "user", "content": "hi"}]})
    assert [request.priority for request in frontend.requests] == [BACKGROUND, 0]


# ---- uploads in parts ---------------------------------------------------------------------------------------


def test_an_upload_in_parts_goes_on_after_a_restart(tmp_path: Path) -> None:
    content = random.Random(3).randbytes(300_000)
    pieces = [content[:100_000], content[100_000:250_000], content[250_000:]]
    keys = ring("alice", "bob")
    with serving(FakeFrontend(), tmp_path, keys) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key=SECRETS["alice"])
        made = client.uploads.create(bytes=len(content), filename="a.jsonl", mime_type="text/jsonl", purpose="batch")
        parts = [client.uploads.parts.create(made.id, data=piece).id for piece in pieces[1:]]
    with serving(FakeFrontend(), tmp_path, keys) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key=SECRETS["alice"])
        other = openai.OpenAI(base_url=f"{url}/v1", api_key=SECRETS["bob"])
        with pytest.raises(openai.NotFoundError):
            other.uploads.cancel(made.id)
        with pytest.raises(openai.BadRequestError, match="announced"):
            client.uploads.complete(made.id, part_ids=parts)
        first = client.uploads.parts.create(made.id, data=pieces[0]).id
        with pytest.raises(openai.BadRequestError, match="more than"):
            client.uploads.parts.create(made.id, data=b"x")
        with pytest.raises(openai.BadRequestError, match="md5"):
            client.uploads.complete(made.id, part_ids=[first, *parts], md5="0" * 32)
        assert not list(client.files.list())  # parts are no files
        whole = client.uploads.complete(made.id, part_ids=[first, *parts], md5=hashlib.md5(content).hexdigest())
        assert whole.status == "completed" and whole.file is not None
        assert client.files.content(whole.file.id).content == content
        with pytest.raises(openai.NotFoundError):
            client.uploads.complete(made.id, part_ids=[first, *parts])
    assert len([path for path in tmp_path.iterdir() if "file-" in path.name]) == 2  # the file and its record
    assert not [path for path in tmp_path.iterdir() if "upload" in path.name]


async def test_uploads_that_are_not_completed_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload_parts, "KEPT", -1)
    store = FileStore(tmp_path, max_bytes=1000, shared=True)
    uploads = upload_parts.Uploads(store)

    def body(size: int) -> upload_parts.UploadRequest:
        return upload_parts.UploadRequest(bytes=size, filename="a", mime_type="b", purpose="batch")

    uploads.create(body(10), "alice")
    with pytest.raises(OverloadedError):
        uploads.create(body(600), "alice")  # more than its share
    uploads.create(body(10), "alice")
    assert len(list(tmp_path.glob("upload-*"))) == 1  # the first has expired
    monkeypatch.setattr(upload_parts, "MAX_PENDING", 2)
    few = upload_parts.Uploads(store)
    few._expire()
    monkeypatch.setattr(upload_parts, "KEPT", 100)
    few.create(body(10), "alice")
    with pytest.raises(OverloadedError, match="not complete"):
        few.create(body(10), "alice")
