"""Servers of others: the plain subset, by text, equal to what the official client gets; the rest refused in words."""

import httpx
import pytest
from openai import OpenAI

from quire.lang import Model, gen, select, self_consistency, user
from quire.lang.http_backend import PlainServer
from quire.types.errors import EngineDeadError, InputError, ModelNotFoundError, UnauthorizedError


@pytest.fixture(scope="module")
def other(live_server):
    """A server that does not say it is Quire's."""
    with Model(str(live_server)) as model:
        server = model.backend
        model.backend = PlainServer(server._http, server._model)
        yield model


def test_it_answers_as_the_official_client_hears_it(other, live_server):
    client = OpenAI(base_url=f"{live_server}/v1", api_key="none")
    name = client.models.list().data[0].id
    prompt = other + user("Name a fruit.") + gen("fruit", max_tokens=8, temperature=0)
    prompt = prompt + user("Another.") + gen("more", max_tokens=8, temperature=0)
    messages = [{"role": "user", "content": "Name a fruit."}]
    for hole, following in (("fruit", "Another."), ("more", "")):
        theirs = client.chat.completions.create(model=name, messages=messages, max_tokens=8, temperature=0)
        assert prompt[hole] == theirs.choices[0].message.content
        messages += [{"role": "assistant", "content": prompt[hole]}, {"role": "user", "content": following}]
    text = other + "The capital of France is" + gen("city", max_tokens=3, temperature=0) + "!"
    theirs = client.completions.create(model=name, prompt="The capital of France is", max_tokens=3, temperature=0)
    assert text["city"] == theirs.choices[0].text and text.text.endswith("!")
    assert text.usage.output_tokens == 3 and text.tokens == ()
    branches = (other + user("Name a bird.")).fork(3) + gen("bird", max_tokens=4)
    assert len(branches["bird"]) == 3


def test_schemas_and_votes(other):
    schema = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9}}, "required": ["n"]}
    schema["additionalProperties"] = False
    assert (other + user("A number.") + gen("x", schema=schema))["x"]["n"] <= 9
    vote = self_consistency(other, "Say hello.", n=3, max_tokens=8, extract=lambda text: "yes")
    assert vote.answer == "yes" and vote.ended >= 2


@pytest.mark.parametrize(
    ("pieces", "says"),
    [
        ([user("x"), gen("y", where="a+")], "regex grammar"),
        ([user("x"), select("y", ["a", "b"])], "logprobs"),
        ([user("x"), "So ", gen("y")], "begins answers itself"),
        ([user("x"), gen("y", top_k=3)], "no top_k"),
    ],
)
def test_what_it_may_not_know_is_refused(other, pieces, says):
    with pytest.raises(InputError, match=says):
        (other + pieces)["y"]


def answering(*replies):
    """An HTTP client whose server gives these replies, the last one for ever."""
    left = list(replies)

    def handle(request):
        status, body, headers = left.pop(0) if len(left) > 1 else left[0]
        return httpx.Response(status, json=body, headers=headers)

    return httpx.AsyncClient(base_url="http://server", transport=httpx.MockTransport(handle))


async def test_a_busy_server_is_asked_again():
    busy = {"retry-after": "0"}
    server = PlainServer(answering((503, {}, busy), (429, {}, busy), (200, [1], {})), "m")
    assert await server.call("GET", "/") == [1]


async def test_errors_say_what_the_server_said():
    refused = PlainServer(answering((401, {"error": {"message": "no such key"}}, {})), "m")
    with pytest.raises(UnauthorizedError, match="no such key"):
        await refused.call("GET", "/")
    odd = PlainServer(answering((418, {"teapot": True}, {})), "m")
    with pytest.raises(InputError, match="answered 418"):
        await odd.call("GET", "/")


def test_no_server_no_model(live_server):
    with pytest.raises(EngineDeadError, match="does not answer"):
        Model("http://127.0.0.1:9")
    with pytest.raises(ModelNotFoundError, match="it has:"):
        Model(str(live_server), model="another")
