"""What becomes of those who write to a disk that is full: run by test_full_disk.py, on a disk of 4 MiB of its own."""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "serve"), str(TESTS / "assets"), str(TESTS / "runtime")]

MIB = 1 << 20


def fill(disk: Path, leave: int = 0) -> Path:
    """A file that takes what is left of the disk, but for so many bytes."""
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as out:
        try:
            while True:
                out.write(b"x" * 4096)
        except OSError:
            pass
        out.truncate(max(0, out.tell() - leave))
    return ballast


def files(disk: Path) -> None:
    from fake_frontend import FakeFrontend
    from test_batch_shares import User, serving

    sent = {}
    with serving(FakeFrontend(), disk / "files") as url:
        alice, bob = User(url, "alice"), User(url, "bob")

        def upload(number: int) -> int:
            content = bytes([number]) * (300 << 10)
            form = {"files": {"file": ("a", content)}, "data": {"purpose": "batch"}}
            answer = alice.http.post("/v1/files", **form)  # type: ignore[arg-type]
            if answer.status_code == 200:
                sent[answer.json()["id"]] = content
            else:
                assert answer.json()["error"]["code"] == "disk_full", answer.text
            return answer.status_code

        statuses = [upload(number) for number in range(20)]
        assert sorted(set(statuses)) == [200, 507], statuses
        for id, content in sent.items():
            assert alice.http.get(f"/v1/files/{id}/content").content == content
        refused = bob.order("file-" + "0" * 32)
        assert refused.status_code == 404  # it goes on answering
        for id in list(sent)[:3]:
            assert alice.http.delete(f"/v1/files/{id}").status_code == 200
            del sent[id]
        assert upload(99) == 200
    with serving(FakeFrontend(), disk / "files") as url:
        alice = User(url, "alice")
        assert {file["id"] for file in alice.http.get("/v1/files").json()["data"]} == set(sent)
        for id, content in sent.items():
            assert alice.http.get(f"/v1/files/{id}/content").content == content


def batches(disk: Path) -> None:
    from test_batch_shares import Patient, User, serving

    frontend = Patient()
    words = [*(str(number) for number in range(40)), *(f"wait {number}" for number in range(40))]
    with serving(frontend, disk / "files") as url:
        alice = User(url, "alice")
        id = alice.batch(*words)
        while alice.state(id)["request_counts"]["completed"] < 24 or not frontend.stuck.acquire(timeout=1):
            pass
        ballast = fill(disk, leave=4096)
        frontend.may.set()
        state = alice.finished(id)
        assert state["status"] == "failed" and state["errors"]["data"][0]["code"] == "disk_full", state
        done = state["request_counts"]["completed"]
        assert 24 <= done < 80
        ballast.unlink()
        assert len(set(alice.answers(state["output_file_id"]))) == done
        again = alice.finished(alice.batch("hello"))
        assert again["status"] == "completed"
    with serving(Patient(), disk / "files") as url:  # all of it is still there
        alice = User(url, "alice")
        assert alice.state(id) == state
        assert len(set(alice.answers(state["output_file_id"]))) == done
        assert alice.state(again["id"]) == again


def messages(disk: Path) -> None:
    from test_batch_shares import Patient, User, serving

    from quire.serve.anthropic import message_batches

    message_batches.DISK_SECONDS = 0.05
    frontend = Patient()

    def ask(*words: str) -> dict[str, Any]:
        bodies = [
            {"model": frontend.model_name, "max_tokens": 4, "messages": [{"role": "user", "content": word}]}
            for word in words
        ]
        return {"requests": [{"custom_id": f"r{number}", "params": body} for number, body in enumerate(bodies)]}

    with serving(frontend, disk / "files") as url:
        alice = User(url, "alice").http
        batch = alice.post("/v1/messages/batches", json=ask(*["wait"] * 81)).json()
        assert frontend.stuck.acquire(timeout=20)
        ballast = fill(disk)
        refused = alice.post("/v1/messages/batches", json=ask("y" * 8192))
        assert refused.status_code == 507, refused.text
        assert len(alice.get("/v1/messages/batches").json()["data"]) == 1
        met = threading.Event()
        message_batches.logger.warning = lambda *_: met.set()  # type: ignore[method-assign]
        frontend.may.set()
        assert met.wait(20)
        ballast.unlink()
        while (state := alice.get(f"/v1/messages/batches/{batch['id']}").json())["ended_at"] is None:
            pass
        assert state["request_counts"]["succeeded"] == 81, state
        lines = alice.get(f"/v1/messages/batches/{batch['id']}/results").text.splitlines()
        assert {json.loads(line)["custom_id"] for line in lines} == {f"r{number}" for number in range(81)}


def pages(disk: Path) -> None:
    import numpy as np
    from test_tier_contract import LAYOUT, SIZE, do, key, page

    from quire.runtime.tiers.disk import DiskFolder, DiskTier
    from quire.runtime.tiers.signed_page import PageSigner

    tier = DiskTier(DiskFolder(disk / "kv"), PageSigner(bytes(32), b"model", LAYOUT), 1 << 30, threading.Event())
    ballast = fill(disk, leave=64 << 10)
    names = [(0, number.to_bytes(16, "big")) for number in range(200)]
    kept = do(tier, "put", names, [page(number) for number in range(200)])
    assert 0 < sum(kept) < 200, sum(kept)
    buffers = [np.zeros(SIZE, np.uint8) for _ in names]
    assert do(tier, "get", names, buffers, job=2) == kept
    assert all(np.array_equal(buffers[number], page(number)) for number in range(200) if kept[number])
    ballast.unlink()
    assert do(tier, "put", [key(1)], [page(1)], job=3) == [True]
    tier.close()


def downloads(disk: Path) -> None:
    from loopback_hub import Hub

    from quire.assets import resolve
    from quire.types.errors import ModelNotFoundError

    hub = Hub()
    hub.files["org/model"] = {"config.json": b"{}", "model.safetensors": os.urandom(6 * MIB)}
    threading.Thread(target=hub.serve_forever, daemon=True).start()
    os.environ |= {"HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "QUIRE_CACHE": str(disk / "cache")}
    try:
        resolve("org/model", progress=False)
    except ModelNotFoundError as error:
        assert "disk" in str(error) and "full" in str(error) and "network" not in str(error), error
    else:
        raise AssertionError("6 MiB fitted on 4")


if __name__ == "__main__":
    case, folder = sys.argv[1:]
    os.environ["TMPDIR"] = folder
    {"files": files, "batches": batches, "messages": messages, "pages": pages, "downloads": downloads}[case](
        Path(folder)
    )
    print(json.dumps("well"))
