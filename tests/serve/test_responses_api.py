"""Responses beyond the plain ones, through the `openai` client: background, streams that are read again, conversations,
references, thoughts sent back, custom tools; and what the next server finds of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from fake_frontend import CONTEXT, FakeFrontend

from quire.serve.core.api_keys import INFERENCE, Key, KeyRing, digest
from quire.serve.http.server import background_server
from quire.serve.openai import responses_run, responses_store
from quire.serve.openai.carried_thoughts import carried, thought_in
from quire.types.serving import ServeOptions

MODEL = FakeFrontend.model_name


@pytest.fixture(scope="module")
def client(fake_server: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{fake_server}/v1", api_key="none", max_retries=0) as client:
        yield client


def finished(client: openai.OpenAI, id: str) -> Any:
    """A response once it is over: its stream ends when it does."""
    for _ in client.responses.retrieve(id, stream=True):
        pass
    return client.responses.retrieve(id)


def sent(frontend: FakeFrontend) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in frontend.text.rendered[-1]["messages"]]


# ---- background and streams ---------------------------------------------------------------------------------


def test_background(client: openai.OpenAI, says: Callable[..., None]) -> None:
    says("Sunny.")
    made = client.responses.create(input="Weather?", background=True, model=MODEL)
    assert made.status == "queued" and made.background
    done = finished(client, made.id)
    assert done.status == "completed" and done.output_text == "Sunny."
    assert client.responses.cancel(made.id).status == "completed"  # it is over already
    again = client.responses.create(input="Sure?", previous_response_id=made.id, model=MODEL)
    assert again.status == "completed"
    with pytest.raises(openai.BadRequestError):
        client.responses.cancel(again.id)
    with pytest.raises(openai.BadRequestError):
        client.responses.create(input="x", background=True, store=False, model=MODEL)


def test_a_background_response_is_cancelled(client: openai.OpenAI, fake_frontend: FakeFrontend) -> None:
    made = client.responses.create(input="hang", background=True, model=MODEL)
    assert fake_frontend.hanging.acquire(timeout=10)
    assert client.responses.retrieve(made.id).status == "in_progress"
    assert client.responses.cancel(made.id).status == "cancelled"
    assert fake_frontend.aborted.acquire(timeout=10)
    assert client.responses.retrieve(made.id).status == client.responses.cancel(made.id).status == "cancelled"


def test_a_background_response_that_fails(client: openai.OpenAI) -> None:
    made = client.responses.create(input="boom", background=True, model=MODEL)
    done = finished(client, made.id)
    assert done.status == "failed" and done.error is not None and "secret" not in done.error.message


def test_a_stream_is_picked_up_where_it_was_left(client: openai.OpenAI, says: Callable[..., None]) -> None:
    says("One two three four five.")
    with client.responses.create(input="Count.", background=True, stream=True, model=MODEL) as stream:
        first = [next(stream) for _ in range(6)]  # and then it hangs up
    assert [event.type for event in first][:3] == ["response.created", "response.queued", "response.in_progress"]
    id, number = first[0].response.id, first[-1].sequence_number  # type: ignore[union-attr]
    for _ in range(2):  # live or over, the same
        rest = list(client.responses.retrieve(id, stream=True, starting_after=number))
        assert [event.sequence_number for event in (*first, *rest)] == list(range(len(first) + len(rest)))
        assert rest[-1].type == "response.completed" and rest[-1].response.output_text == "One two three four five."


def test_any_stored_response_can_be_streamed_again(client: openai.OpenAI, says: Callable[..., None]) -> None:
    says('<think>Hm.</think>So:<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>', reasons=True)
    tools: list[Any] = [{"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": False}]
    with client.responses.create(input="x", stream=True, tools=tools, model=MODEL) as stream:
        events = list(stream)
    final = events[-1].response  # type: ignore[union-attr]
    again = list(client.responses.retrieve(final.id, stream=True))
    kinds = [list(dict.fromkeys(event.type for event in some)) for some in (events, again)]
    assert kinds[0] == kinds[1]
    assert again[-1].response == final  # type: ignore[union-attr]
    assert [e.item for e in again if e.type == "response.output_item.done"] == final.output
    for wrong in ("stream=maybe", "starting_after=1", "stream=true&starting_after=-1"):
        assert httpx.get(f"{client.base_url}responses/{final.id}?{wrong}").status_code == 400


def test_one_key_has_so_many_in_the_background(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(responses_run, "MAX_OWN_BACKGROUND", 2)
    frontend = FakeFrontend()
    with background_server(lambda: frontend, ServeOptions(port=0, grace=1)) as url:  # type: ignore[arg-type, return-value]
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        made = [client.responses.create(input="hang", background=True, model=MODEL) for _ in range(2)]
        with pytest.raises(openai.APIStatusError) as caught:
            client.responses.create(input="hang", background=True, model=MODEL)
        assert caught.value.status_code in (429, 503)
        client.responses.cancel(made[0].id)
        client.responses.create(input="hang", background=True, model=MODEL)


def test_a_long_log_gives_way_to_what_was_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(responses_store, "MAX_OBJECT", 2000)
    with background_server(FakeFrontend, ServeOptions(port=0, grace=1)) as url:  # type: ignore[arg-type]
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
        made = client.responses.create(input="x", background=True, model=MODEL)
        done = finished(client, made.id)
        assert done.status == "completed"
        again = list(client.responses.retrieve(made.id, stream=True))
        assert again[-1].response == done and len(again) < 12  # type: ignore[union-attr]


# ---- what is answered ---------------------------------------------------------------------------------------


def test_input_tokens(client: openai.OpenAI) -> None:
    made = client.responses.create(input="Weather?", instructions="Be brief.", model=MODEL)
    counted = client.responses.input_tokens.count(input="Weather?", instructions="Be brief.", model=MODEL)
    assert made.usage is not None and counted.input_tokens == made.usage.input_tokens
    more = client.responses.input_tokens.count(input="Sure?", previous_response_id=made.id)
    assert more.input_tokens > counted.input_tokens and more.object == "response.input_tokens"


def test_conversations(client: openai.OpenAI, says: Callable[..., None], fake_frontend: FakeFrontend) -> None:
    says("Sunny.")
    talk = client.conversations.create(metadata={"a": "b"}, items=[{"role": "user", "content": "I am in Rome."}])
    assert talk.object == "conversation" and talk.metadata == {"a": "b"}
    made = client.responses.create(input="Weather?", conversation=talk.id, model=MODEL)
    assert made.conversation is not None and made.conversation.id == talk.id
    client.responses.create(input="Tomorrow?", conversation={"id": talk.id}, model=MODEL)
    assert [text for _, text in sent(fake_frontend)] == ["I am in Rome.", "Weather?", "Sunny.", "Tomorrow?"]
    items = client.conversations.items.list(talk.id, order="asc").data
    assert [item.role for item in items] == ["user", "user", "assistant", "user", "assistant"]  # type: ignore[union-attr]
    assert [item.id for item in client.conversations.items.list(talk.id, limit=2)] == [i.id for i in items[::-1]]
    assert client.conversations.items.retrieve(items[2].id or "", conversation_id=talk.id) == items[2]
    client.conversations.items.delete(items[0].id or "", conversation_id=talk.id)
    added = client.conversations.items.create(talk.id, items=[{"role": "assistant", "content": "Bye."}])
    assert added.data[0].content[0].type == "output_text"  # type: ignore[union-attr]
    assert client.conversations.update(talk.id, metadata={"c": "d"}).metadata == {"c": "d"}
    client.responses.create(input="?", conversation=talk.id, model=MODEL)
    assert sent(fake_frontend)[0] == ("user", "Weather?")
    with pytest.raises(openai.BadRequestError):
        client.responses.create(input="?", conversation=talk.id, previous_response_id=made.id, model=MODEL)
    assert client.conversations.delete(talk.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.conversations.retrieve(talk.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.create(input="?", conversation=talk.id, model=MODEL)


def test_a_conversation_has_a_largest_size(client: openai.OpenAI) -> None:
    talk = client.conversations.create()
    item: Any = {"role": "user", "content": "x" * (3 << 20)}
    for _ in range(2):
        client.conversations.items.create(talk.id, items=[item])
    with pytest.raises(openai.BadRequestError, match="begin another"):
        client.conversations.items.create(talk.id, items=[item])
    assert len(client.conversations.items.list(talk.id).data) == 2


def test_items_are_referred_to(client: openai.OpenAI, says: Callable[..., None], fake_frontend: FakeFrontend) -> None:
    says("Sunny.")
    made = client.responses.create(input="Weather?", model=MODEL)
    asked = client.responses.input_items.list(made.id).data[0]
    references: list[Any] = [{"type": "item_reference", "id": asked.id}, {"id": made.output[0].id}]
    client.responses.create(input=[*references, {"role": "user", "content": "Sure?"}], model=MODEL)
    assert sent(fake_frontend) == [("user", "Weather?"), ("assistant", "Sunny."), ("user", "Sure?")]
    with pytest.raises(openai.BadRequestError, match="no stored item"):
        client.responses.create(input=[{"type": "item_reference", "id": "msg_unknown"}], model=MODEL)


def test_the_oldest_messages_make_room(client: openai.OpenAI, fake_frontend: FakeFrontend) -> None:
    items: list[Any] = [{"role": "system", "content": "Be brief."}]
    for number in range(12):
        items += [{"role": "user", "content": f"{number} " + "x" * 40}, {"role": "assistant", "content": "yes"}]
    items.append({"role": "user", "content": "last"})
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(input=items, model=MODEL, max_output_tokens=20)
    assert caught.value.code == "context_length_exceeded"
    made = client.responses.create(input=items, model=MODEL, max_output_tokens=20, truncation="auto")
    assert made.status in ("completed", "incomplete") and made.usage is not None
    kept = sent(fake_frontend)
    request = fake_frontend.requests[-1]
    assert CONTEXT - 20 - 50 < len(request.prompt) <= CONTEXT - 20
    rendered = fake_frontend.text.tokenizer.decode(request.prompt)
    assert rendered.startswith("system: Be brief.\n") and rendered.endswith("user: last\nassistant: ")
    assert len(kept) < len(items)
    short = client.responses.create(input="hi", model=MODEL, truncation="auto")
    assert short.truncation == "auto"


def test_a_tools_answer_goes_with_its_call(client: openai.OpenAI, fake_frontend: FakeFrontend) -> None:
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "1", "output": "y" * 300}
    items: list[Any] = [{"role": "user", "content": "x" * 200}, call, output, {"role": "user", "content": "z" * 200}]
    client.responses.create(input=items, model=MODEL, max_output_tokens=20, truncation="auto")
    assert "tool:" not in fake_frontend.text.tokenizer.decode(fake_frontend.requests[-1].prompt)


# ---- thoughts and tools -------------------------------------------------------------------------------------


def test_summaries(client: openai.OpenAI, says: Callable[..., None]) -> None:
    says("<think>Hm.</think>Yes.", reasons=True)
    with client.responses.create(input="x", reasoning={"summary": "auto"}, stream=True, model=MODEL) as stream:
        events = list(stream)
    deltas = [event.delta for event in events if event.type == "response.reasoning_summary_text.delta"]
    thought = events[-1].response.output[0]  # type: ignore[union-attr]
    assert "".join(deltas) == thought.summary[0].text == "Hm."
    assert client.responses.create(input="x", model=MODEL).output[0].summary == []  # type: ignore[union-attr]


def test_thoughts_are_sent_back(client: openai.OpenAI, says: Callable[..., None], fake_frontend: FakeFrontend) -> None:
    says("<think>Rome is sunny.</think>Yes.", reasons=True)
    made = client.responses.create(input="x", include=["reasoning.encrypted_content"], store=False, model=MODEL)
    thought = made.output[0].to_dict()
    assert thought["encrypted_content"] and "sunny" not in str(thought["encrypted_content"])
    back: dict[str, Any] = {**thought, "content": None, "summary": []}
    items: list[Any] = [
        {"role": "user", "content": "x"},
        back,
        made.output[1].to_dict(),
        {"role": "user", "content": "y"},
    ]
    client.responses.create(input=items, store=False, model=MODEL)
    assert fake_frontend.text.rendered[-1]["messages"][1]["reasoning_content"] == "Rome is sunny."
    back["encrypted_content"] = back["encrypted_content"][:-4] + "AAAA"
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(input=items, store=False, model=MODEL)
    assert caught.value.code == "invalid_encrypted_content"


@pytest.mark.parametrize("text", ["", "a thought", "€😀" * 1000])
def test_thoughts_as_they_are_carried(text: str) -> None:
    made = carried(text)
    assert thought_in(made) == text and (not text or text not in made)
    for wrong in ("", "qr2_", "x", "é", made[:-8], made + "AAAA", made.removeprefix("qr2_"), made[:-2] + "xx"):
        assert thought_in(wrong) is None


def test_thoughts_of_another_server(client: openai.OpenAI, fake_frontend: FakeFrontend) -> None:
    thought = {"type": "reasoning", "summary": [], "encrypted_content": carried("Hm.")}
    items: list[Any] = [{"role": "user", "content": "x"}, thought, {"role": "user", "content": "y"}]
    client.responses.create(input=items, store=False, model=MODEL)
    assert fake_frontend.text.rendered[-1]["messages"][1]["reasoning_content"] == "Hm."


def test_custom_tools(client: openai.OpenAI, says: Callable[..., None], fake_frontend: FakeFrontend) -> None:
    says('<tool_call>{"name": "patch", "arguments": {"input": "*** \\"a\\"\\n"}}</tool_call>')
    form = {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}
    tools: list[Any] = [
        {"type": "custom", "name": "patch", "description": "Applies.", "format": form}, {"type": "web_search"}
    ]  # fmt: skip
    with client.responses.stream(input="x", tools=tools, model=MODEL) as stream:
        events = list(stream)
        final = stream.get_final_response()
    [call] = final.output
    assert call.type == "custom_tool_call" and call.input == '*** "a"\n' and call.name == "patch"
    deltas = [event.delta for event in events if event.type == "response.custom_tool_call_input.delta"]
    assert "".join(deltas) == '*** "a"\n'
    told = fake_frontend.text.rendered[-1]["tools"]
    assert [tool["function"]["name"] for tool in told] == ["patch"] and "start: /.+/" in str(told)
    items: list[Any] = [{"type": "custom_tool_call_output", "call_id": call.call_id, "output": "done"}]
    client.responses.create(input=items, previous_response_id=final.id, tools=tools, model=MODEL)
    messages = fake_frontend.text.rendered[-1]["messages"]
    assert messages[1]["tool_calls"][0]["function"] == {"name": "patch", "arguments": {"input": '*** "a"\n'}}
    assert messages[2] == {"role": "tool", "content": "done", "tool_call_id": call.call_id}
    raw = httpx.post(f"{client.base_url}responses", json={"input": "x", "tools": tools})
    assert raw.headers["x-quire-ignored-fields"] == "tools[].web_search"


def test_sampling_extensions(client: openai.OpenAI, fake_frontend: FakeFrontend) -> None:
    more = {"top_k": -1, "min_p": 0.1, "stop": ["two"], "presence_penalty": 1, "logit_bias": {"3": 1}, "min_tokens": 1}
    client.responses.create(input="x", model=MODEL, extra_body=more)
    params = fake_frontend.requests[-1].params
    assert (params.top_k, params.min_p, params.stop, params.presence_penalty) == (0, 0.1, ["two"], 1)
    made = client.responses.create(input="x", model=MODEL, text={"verbosity": "low"}, reasoning={"effort": "low"})
    assert fake_frontend.text.rendered[-1]["verbosity"] == made.text.verbosity == "low"  # type: ignore[union-attr]


# ---- what outlives the server -------------------------------------------------------------------------------


def test_everything_kept_is_there_after_a_restart(tmp_path: Path) -> None:
    options = ServeOptions(port=0, grace=1, files=str(tmp_path / "files"))
    frontend = FakeFrontend()
    frontend.says, frontend.text.reasons = "<think>Hm.</think>Sunny.", True
    with background_server(lambda: frontend, options) as url:  # type: ignore[arg-type, return-value]
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
        made = client.responses.create(input="Weather?", include=["reasoning.encrypted_content"], model=MODEL)
        talk = client.conversations.create(items=[{"role": "user", "content": "Hi."}])
        chat = client.chat.completions.create(messages=[{"role": "user", "content": "x"}], store=True, model=MODEL)
        frontend.says = None
        cut = client.responses.create(input="hang", background=True, model=MODEL)
        assert frontend.hanging.acquire(timeout=10)
    files = [path for path in (tmp_path / "files").rglob("*") if path.is_file()]
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
    frontend = FakeFrontend()
    with background_server(lambda: frontend, options) as url:  # type: ignore[arg-type, return-value]
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
        assert client.responses.retrieve(made.id) == made
        assert client.responses.retrieve(cut.id).status == "failed"
        client.responses.create(input="Sure?", previous_response_id=made.id, model=MODEL)
        assert [role for role, _ in sent(frontend)] == ["user", "assistant", "user"]
        client.responses.create(input=[{"type": "item_reference", "id": made.output[1].id}], model=MODEL)
        thought: Any = made.output[0].to_dict() | {"content": None}
        client.responses.create(input=[thought, {"role": "user", "content": "?"}], model=MODEL)
        assert frontend.text.rendered[-1]["messages"][0]["reasoning_content"] == "Hm."
        assert client.conversations.items.list(talk.id).data[0].content[0].text == "Hi."  # type: ignore[union-attr]
        assert client.chat.completions.retrieve(chat.id).choices[0].message.content == "Sunny."


def test_stored_completions(client: openai.OpenAI, says: Callable[..., None]) -> None:
    says("Sunny.")
    ask: dict[str, Any] = {"messages": [{"role": "user", "content": "Weather?"}], "model": MODEL}
    made = client.chat.completions.create(**ask, store=True, metadata={"run": "7"})
    streamed = list(client.chat.completions.create(**ask, store=True, metadata={"run": "8"}, stream=True))
    unkept = client.chat.completions.create(**ask)
    found = client.chat.completions.retrieve(made.id)
    assert found.choices == made.choices and found.metadata == {"run": "7"}  # type: ignore[attr-defined]
    assert client.chat.completions.retrieve(streamed[0].id).choices[0].message.content == "Sunny."
    assert client.chat.completions.messages.list(made.id).data[0].content == "Weather?"
    assert [c.id for c in client.chat.completions.list(metadata={"run": "7"})] == [made.id]
    assert {made.id, streamed[0].id} <= {c.id for c in client.chat.completions.list(limit=1)}
    client.chat.completions.update(made.id, metadata={"run": "9"})
    assert [c.id for c in client.chat.completions.list(metadata={"run": "9"})] == [made.id]
    assert client.chat.completions.delete(made.id).deleted
    for id in (made.id, unkept.id):
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.retrieve(id)


def test_each_key_has_its_own() -> None:
    keys = KeyRing([Key(name, digest=digest(name), scopes=frozenset({INFERENCE})) for name in ("one", "two")])
    with background_server(FakeFrontend, ServeOptions(port=0, grace=1), keys=keys) as url:  # type: ignore[arg-type]
        one, two = (openai.OpenAI(base_url=f"{url}/v1", api_key=name) for name in ("one", "two"))
        made = one.responses.create(input="x", background=True, model=MODEL)
        talk = one.conversations.create()
        for attempt in (
            lambda: two.responses.retrieve(made.id),
            lambda: two.responses.cancel(made.id),
            lambda: list(two.responses.retrieve(made.id, stream=True)),
            lambda: two.conversations.items.list(talk.id),
        ):
            with pytest.raises(openai.NotFoundError):
                attempt()
        assert finished(one, made.id).status == "completed"


def test_many_in_the_background_wait_for_their_turn() -> None:
    """More than may run at once: all are answered."""
    options = ServeOptions(port=0, grace=1, key_concurrency=2)
    with background_server(FakeFrontend, options) as url:  # type: ignore[arg-type]
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=5)
        made = [client.responses.create(input=f"{n}", background=True, model=MODEL) for n in range(6)]
        assert {finished(client, one.id).status for one in made} == {"completed"}
