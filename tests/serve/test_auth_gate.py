"""The gate: what answers without a key (next to nothing), whose key opens what, and what is refused before routing."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fake_frontend import FakeFrontend

from quire.serve import create_admin_app, create_app, create_serving
from quire.serve.core.api_keys import ADMIN, INFERENCE, Key, KeyRing, digest
from quire.serve.http.server import ServerUrl, background_server, check_exposure, listen
from quire.types.errors import ConfigError
from quire.types.serving import ServeOptions

USER, OTHER, OPERATOR = "user-secret-0123456789", "other-secret-0123456789", "admin-secret-0123456789"
KEYS = KeyRing(
    [
        Key("user", digest(USER), frozenset({INFERENCE}), concurrency=2),
        Key("other", digest(OTHER), frozenset({INFERENCE}), tokens_per_minute=300),
        Key("operator", digest(OPERATOR), frozenset({ADMIN})),
    ]
)
# What may answer without a key: liveness, and the files of the dashboard, which hold no data.
OPEN = re.compile(r"/|/docs|/health|/ready|/ping|/favicon\.ico|/dashboard/.*")
CHAT = "/v1/chat/completions"
# A connection for each call, as callers have that know nothing of each other; what a client reads, it reads once.
http = httpx.Client(limits=httpx.Limits(max_keepalive_connections=0))


@pytest.fixture(scope="module")
def frontend() -> FakeFrontend:
    return FakeFrontend()


@pytest.fixture(scope="module")
def locked(frontend: FakeFrontend) -> Iterator[ServerUrl]:
    options = ServeOptions(port=0, grace=1, max_body="64K", max_header="8K")
    with background_server(lambda: frontend, options, keys=KEYS) as url:  # type: ignore[arg-type, return-value]
        yield url


def bearer(secret: str) -> dict[str, str]:
    return {"authorization": f"Bearer {secret}"}


def chat(content: str = "hello", **fields: Any) -> dict[str, Any]:
    return {"model": FakeFrontend.model_name, "messages": [{"role": "user", "content": content}], **fields}


def routes(app: Any) -> list[tuple[str, str]]:
    """(method, path) of everything the app would answer, documentation and mounted files included."""
    found = []
    for route in app.routes:
        included = getattr(route, "original_router", None)  # FastAPI keeps an included router as it is
        if included is not None:
            assert not route.include_context.prefix
            found += routes(included)
            continue
        path = re.sub(r"{[^}]*}", "x", route.path)
        found += [(method, path) for method in sorted(getattr(route, "methods", None) or {"GET"})]
    return found


def test_without_a_key_only_liveness_answers(locked: ServerUrl, frontend: FakeFrontend) -> None:
    serving = create_serving(frontend, keys=KEYS)  # type: ignore[arg-type]
    for base, app in ((str(locked), create_app(serving)), (locked.admin, create_admin_app(serving))):
        walked = routes(app)
        assert {("GET", "/openapi.json"), ("GET", "/metrics"), ("GET", "/health")} <= set(walked)
        for method, path in [*walked, ("GET", "/no/such/route"), ("POST", "/health"), ("OPTIONS", CHAT)]:
            for headers in ({}, bearer("wrong"), {"x-api-key": "wrong"}, {"authorization": f"Basic {USER}"}):
                response = http.request(method, base + path, headers=headers)
                may = method in ("GET", "HEAD") and OPEN.fullmatch(path)
                assert (response.status_code != 401) == bool(may), f"{method} {base}{path} → {response.status_code}"
                if not may:
                    assert response.headers["www-authenticate"] == "Bearer"


def test_scopes(locked: ServerUrl) -> None:
    models, admin = f"{locked}/v1/models", f"{locked.admin}/metrics"
    assert http.get(models, headers=bearer(USER)).status_code == 200
    assert http.get(models, headers={"x-api-key": USER}).status_code == 200
    assert http.get(admin, headers=bearer(OPERATOR)).status_code == 200
    assert http.get(f"{locked}/metrics", headers=bearer(OPERATOR)).status_code == 200
    for url, secret in ((models, OPERATOR), (admin, USER), (f"{locked}/metrics", USER)):
        refused = http.get(url, headers=bearer(secret))
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "permission_denied")
        assert refused.headers["connection"] == "close"
    for end in ("%0a", "%0D%0A", "%00"):  # a route's pattern may match before the end of a line
        for path in ("/metrics", "/view", "/v1/models"):
            assert http.get(f"{locked}{path}{end}", headers=bearer(USER)).status_code == 400


def test_refusals_have_the_shape_of_their_api(locked: ServerUrl) -> None:
    def refusal(path: str) -> Any:
        return http.post(f"{locked}{path}", json={}).json()

    assert refusal(CHAT)["error"]["type"] == "authentication_error"
    anthropic = refusal("/v1/messages")
    assert (anthropic["type"], anthropic["error"]["type"]) == ("error", "authentication_error")
    assert isinstance(refusal("/api/chat")["error"], str)


def test_every_key_has_a_cache_of_its_own(locked: ServerUrl, frontend: FakeFrontend) -> None:
    def salt_of(secret: str, **fields: Any) -> str:
        response = http.post(f"{locked}{CHAT}", headers=bearer(secret), json=chat(max_tokens=1, **fields))
        assert response.status_code == 200, response.text
        return frontend.requests[-1].salt

    salts = [salt_of(USER), salt_of(OTHER), salt_of(USER, cache_salt="x"), salt_of(OTHER, cache_salt="x")]
    assert len(set(salts)) == 4 and all(salts)
    assert salt_of(USER) == salts[0]


def test_a_key_has_its_limits(locked: ServerUrl, frontend: FakeFrontend) -> None:
    with httpx.Client(base_url=locked, headers=bearer(USER)) as user:
        streams = [user.stream("POST", CHAT, json=chat("hang", stream=True, logprobs=True)) for _ in range(2)]
        for stream in streams:
            stream.__enter__()
        refused = user.post(CHAT, json=chat())
        assert (refused.status_code, refused.json()["error"]["type"]) == (429, "rate_limit_error")
        assert int(refused.headers["retry-after"]) >= 1
        assert http.post(f"{locked}{CHAT}", headers=bearer(OTHER), json=chat(max_tokens=1)).status_code == 200
        for stream in streams:
            stream.__exit__(None, None, None)
        assert all(frontend.aborted.acquire(timeout=10) for _ in streams)
    for _ in range(100):  # the places are free again as soon as the server has noticed
        if (again := http.post(f"{locked}{CHAT}", headers=bearer(USER), json=chat(max_tokens=1))).status_code == 200:
            break
    assert again.status_code == 200
    spent = [
        http.post(f"{locked}{CHAT}", headers=bearer(OTHER), json=chat(max_tokens=200)).status_code for _ in range(4)
    ]
    assert 429 in spent


def test_request_ids(locked: ServerUrl) -> None:
    assert http.get(f"{locked}/health", headers={"x-request-id": "abc-1"}).headers["x-request-id"] == "abc-1"
    made = {http.get(f"{locked}/health", headers={"x-request-id": bad}).headers["x-request-id"] for bad in ("", "a b")}
    assert len(made) == 2 and all(re.fullmatch(r"req-[0-9a-f]{32}", each) for each in made)
    assert "x-request-id" in http.get(f"{locked}/v1/models").headers


# ---- sizes --------------------------------------------------------------------------------------------------


def raw(url: str, *pieces: bytes) -> bytes:
    """Send bytes as they are; everything that comes back."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        answer = b""
        try:
            for piece in pieces:
                connection.sendall(piece)
            while part := connection.recv(65536):
                answer += part
                if b"\r\n\r\n" in answer and b"connection: close" not in answer:
                    break
        except ConnectionError:
            pass
        return answer


@pytest.mark.parametrize("form", ["one header", "many headers", "request line", "never ending"])
def test_heads_are_bounded(locked: ServerUrl, form: str) -> None:
    heads = {
        "one header": [b"GET /health HTTP/1.1\r\nhost: x\r\na: " + b"x" * 9000 + b"\r\n\r\n"],
        "many headers": [b"GET /health HTTP/1.1\r\nhost: x\r\n" + b"a: b\r\n" * 2000 + b"\r\n"],
        "request line": [b"GET /" + b"x" * 9000 + b" HTTP/1.1\r\nhost: x\r\n\r\n"],
        "never ending": [b"GET /health HTTP/1.1\r\nhost: x\r\na: ", *[b"x" * 1000] * 9],
    }
    answer = raw(locked, *heads[form])
    assert answer.startswith(b"HTTP/1.1 431 "), answer[:100]
    assert http.get(f"{locked}/health", headers={"a": "x" * 4000}).status_code == 200


def test_bodies_are_bounded(locked: ServerUrl) -> None:
    answer = http.post(f"{locked}{CHAT}", headers=bearer(USER), content=b"x" * 70_000)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")
    assert answer.headers["connection"] == "close"


def test_bodies_must_arrive_in_time(locked: ServerUrl, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.serve.http.http_io.BODY_SECONDS", 0.2)
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {USER}\r\ncontent-length: 100\r\n\r\n{{"
    assert raw(locked, head.encode()).startswith(b"HTTP/1.1 408 ")


# ---- without keys -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"host": "localhost:8000"}, 200),
        ({"host": "[::1]:8000"}, 200),
        ({"host": "evil.example"}, 403),
        ({"host": "127.0.0.1.evil.example:8000"}, 403),
        ({"origin": "http://localhost:3000"}, 200),
        ({"origin": "http://127.0.0.1:3000"}, 200),
        ({"origin": "http://[::1]:3000"}, 200),
        ({"origin": "http://203.0.113.7:8000", "host": "203.0.113.7:8000"}, 200),
        ({"origin": "http://203.0.113.7:8000", "host": "203.0.113.8:8000"}, 403),
        ({"origin": "http://203.0.113.7"}, 403),
        ({"origin": "http://203.0.113.7:99", "host": "203.0.113.7:8000"}, 403),
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "null"}, 403),
    ],
)
def test_an_open_server_does_not_answer_other_sites(fake_server: str, headers: dict[str, str], status: int) -> None:
    assert http.get(f"{fake_server}/v1/models", headers=headers).status_code == status


def test_a_name_that_is_refused_comes_with_the_cure(fake_server: str) -> None:
    refused = http.get(f"{fake_server}/v1/models", headers={"host": "my-server.example"})
    assert "set API keys, or call it by its IP address or as localhost" in refused.json()["error"]["message"]


def test_only_loopback_may_stand_open() -> None:
    with listen("0.0.0.0", 0) as everywhere, listen("127.0.0.1", 0) as here:
        for scope in (INFERENCE, ADMIN):
            with pytest.raises(ConfigError, match=f"no API keys .*--scope {scope}"):
                check_exposure(everywhere, ServeOptions(), KeyRing(), scope)
            check_exposure(everywhere, ServeOptions(), KEYS, scope)
            check_exposure(everywhere, ServeOptions(allow_open=True), KeyRing(), scope)
            check_exposure(here, ServeOptions(), KeyRing(), scope)


# ---- the work behind ----------------------------------------------------------------------------------------


def test_deadlines_reach_the_engine(fake_server: str, fake_frontend: FakeFrontend) -> None:
    post = {"url": f"{fake_server}{CHAT}"}
    assert http.post(**post, json=chat(max_tokens=1)).status_code == 200
    assert fake_frontend.requests[-1].deadline == 0.0
    assert http.post(**post, json=chat(max_tokens=1, deadline_ms=60_000)).status_code == 200
    request = fake_frontend.requests[-1]
    assert 0 < request.deadline - time.time() < 60
    for bad in (0, -1, "1", 1 << 50):
        assert http.post(**post, json=chat(deadline_ms=bad)).json()["error"]["param"] == "deadline_ms"


def test_streams_end_in_errors_their_clients_can_read(fake_server: str) -> None:
    with http.stream("POST", f"{fake_server}{CHAT}", json=chat("dead", stream=True, logprobs=True)) as response:
        events = [line for line in response.iter_lines() if line]
    assert json.loads(events[-2].removeprefix("data: "))["error"]["code"] == "engine_dead"
    assert events[-1] == "data: [DONE]"


def test_files_and_batches_belong_to_a_key_and_count_for_it(locked: ServerUrl, frontend: FakeFrontend) -> None:
    other = {"headers": bearer(OTHER)}
    lines = [
        {"custom_id": f"{i}", "method": "POST", "url": CHAT, "body": chat(f"line {i}", max_tokens=2)} for i in range(5)
    ]
    upload = {"files": {"file": ("in.jsonl", "\n".join(map(json.dumps, lines)))}, "data": {"purpose": "batch"}}
    with httpx.Client(base_url=locked, headers=bearer(USER)) as user:
        file = user.post("/v1/files", **upload).json()["id"]
        order = {"input_file_id": file, "endpoint": CHAT, "completion_window": "24h"}
        assert http.get(f"{locked}/v1/files/{file}", **other).status_code == 404
        assert http.post(f"{locked}/v1/batches", json=order, **other).status_code == 404
        batch = user.post("/v1/batches", json=order).json()["id"]
        assert http.get(f"{locked}/v1/batches/{batch}", **other).status_code == 404
        for _ in range(500):  # the key may have two requests under way: lines beyond wait their turn
            state = user.get(f"/v1/batches/{batch}").json()
            if state["status"] == "completed":
                break
            time.sleep(0.05)
    assert state["request_counts"] == {"total": 5, "completed": 5, "failed": 0}, state
    assert len({request.salt for request in frontend.requests[-5:]}) == 1 and frontend.requests[-1].salt


# ---- other sites, where they are welcome --------------------------------------------------------------------

SITE = {"origin": "https://chat.example"}
ASKS = {**SITE, "access-control-request-method": "POST", "access-control-request-headers": "authorization"}


@pytest.mark.parametrize("keys", [KeyRing(), KEYS], ids=["open", "keys"])
def test_cors_is_for_the_origins_it_names(keys: KeyRing, frontend: FakeFrontend) -> None:
    options = ServeOptions(port=0, grace=1, cors="https://chat.example, https://other.example")
    with background_server(lambda: frontend, options, keys=keys) as url:  # type: ignore[arg-type, return-value]
        preflight = http.options(f"{url}{CHAT}", headers=ASKS)
        assert (preflight.status_code, preflight.headers["access-control-allow-origin"]) == (200, SITE["origin"])
        answer = http.post(f"{url}{CHAT}", headers=SITE | bearer(USER), json=chat(max_tokens=1))
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == SITE["origin"]
        if not keys.open:  # a page can read why it was refused
            refused = http.post(f"{url}{CHAT}", headers=SITE, json=chat())
            assert (refused.status_code, "access-control-allow-origin" in refused.headers) == (401, True)
        evil = {"origin": "https://evil.example"}
        for response in (
            http.options(f"{url}{CHAT}", headers=ASKS | evil),
            http.post(f"{url}{CHAT}", headers=evil | bearer(USER), json=chat(max_tokens=1)),
            http.options(f"{url.admin}/metrics", headers=ASKS),
        ):
            assert "access-control-allow-origin" not in response.headers


def test_cors_is_off_by_default(locked: ServerUrl) -> None:
    answer = http.post(f"{locked}{CHAT}", headers=SITE | bearer(OTHER), json=chat(max_tokens=1))
    assert "access-control-allow-origin" not in answer.headers
    assert http.options(f"{locked}{CHAT}", headers=ASKS).status_code == 401


def test_bad_origins_are_refused() -> None:
    for bad in ("example.org", "https://x/y", "", "https://a,ftp://b"):
        with pytest.raises(ConfigError, match="cors"):
            ServeOptions(cors=bad)
    with listen("127.0.0.1", 0) as here, pytest.raises(ConfigError, match="every web page"):
        check_exposure(here, ServeOptions(cors="*"), KeyRing(), INFERENCE)


# ---- content types ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        (None, 200),
        ("application/json", 200),
        ("Application/JSON; charset=utf-8", 200),
        ("application/vnd.x+json", 200),
        ("text/plain", 415),
        ("application/x-www-form-urlencoded", 415),
        ("multipart/form-data; boundary=x", 415),
    ],
)
def test_the_content_type_of_a_body_is_checked(fake_server: str, kind: str | None, status: int) -> None:
    headers = {"content-type": kind} if kind else {}
    body = json.dumps(chat(max_tokens=1)).encode()
    assert (answer := http.post(f"{fake_server}{CHAT}", content=body, headers=headers)).status_code == status
    if status == 415:
        assert answer.json()["error"]["code"] == "unsupported_media_type"
    body = json.dumps({"model": FakeFrontend.model_name, "prompt": "hi", "stream": False}).encode()
    assert http.post(f"{fake_server}/api/generate", content=body, headers=headers).status_code == 200
