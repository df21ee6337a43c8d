"""Chunks at other places, over HTTP with the official client: the answer, the usage, the explanation, the refusals."""

import httpx
import openai
import pytest

MARK = "[[doc]]"
DOCUMENTS = [f"Notice {n}: the {thing} is kept in room {n + 20}, behind the {place}. " * 8 for n, (thing, place) in
             enumerate((("ladder", "stairs"), ("lantern", "kitchen"), ("barrel", "stable")))]  # fmt: skip


@pytest.fixture(scope="module")
def client(live_server):
    with openai.OpenAI(base_url=f"{live_server}/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(client, order, **blend):
    content = MARK.join(("Answer from the notices.\n", *(DOCUMENTS[i] for i in order), "\nWhere is the lantern?"))
    return client.chat.completions.create(
        model="smollm2-135m",
        messages=[{"role": "user", "content": content}],
        max_tokens=8,
        temperature=0,
        extra_body={"blend": {"separator": MARK, **blend}},
    )


def test_documents_are_reused_in_another_order(client, live_server):
    first, _, again = ask(client, [0, 1, 2]), ask(client, [2, 0, 1]), ask(client, [2, 1, 0])
    copied = first.usage.prompt_tokens_details.blended_tokens  # the third, which was computed apart for this request
    prefix = httpx.get(f"{live_server}/v1/requests/{first.id}/explain").json()["data"][0]["prefix"]
    assert 0 < prefix["recomputed_tokens"] <= copied == prefix["blended_tokens"] < 0.4 * first.usage.prompt_tokens
    reused = again.usage.prompt_tokens_details.blended_tokens
    assert reused > 0.4 * again.usage.prompt_tokens
    prefix = httpx.get(f"{live_server}/v1/requests/{again.id}/explain").json()["data"][0]["prefix"]
    assert prefix["blended_tokens"] == reused and 0.1 * reused < prefix["recomputed_tokens"] < 0.3 * reused
    assert 0 < prefix["blend_error"] < 1
    plain = client.chat.completions.create(
        model="smollm2-135m", messages=[{"role": "user", "content": "Hello"}], max_tokens=2
    )
    assert "blended_tokens" not in plain.usage.prompt_tokens_details.to_dict()


TEXT = MARK.join(("Answer from the notes.\n", *DOCUMENTS, "\nWhere is the lantern?"))
CHAT = [{"role": "user", "content": TEXT}]
FAMILIES = {
    "/v1/responses": {"input": TEXT, "max_output_tokens": 4},
    "/v1/messages": {"messages": CHAT, "max_tokens": 4},
    "/api/chat": {"messages": CHAT, "stream": False, "options": {"num_predict": 4}},
    "/api/generate": {"prompt": TEXT, "raw": True, "stream": False, "options": {"num_predict": 4}},
}


@pytest.mark.parametrize("path", FAMILIES)
def test_every_api_family_takes_chunks(live_server, path):
    body = {"model": "smollm2-135m", "blend": {"separator": MARK, "recompute": 0.1}, **FAMILIES[path]}

    def reused():
        lines = httpx.get(f"{live_server}/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("quire_blended_tokens_total"))

    for _ in range(2):
        before = reused()
        reply = httpx.post(f"{live_server}{path}", json=body, timeout=60)
        assert reply.status_code == 200, reply.text
    assert reused() - before > 100
    wrong = httpx.post(f"{live_server}{path}", json={**body, "blend": {"separator": "nowhere"}}, timeout=60)
    assert wrong.status_code == 400 and "separator" in wrong.text


def test_completions_take_chunks_too(client):
    prompt = "|".join(("Notices.\n", *DOCUMENTS, "The lantern is"))
    for _ in range(2):
        answer = client.completions.create(
            model="smollm2-135m", prompt=prompt, max_tokens=4, extra_body={"blend": {"separator": "|", "recompute": 0}}
        )
    assert answer.usage.prompt_tokens_details.blended_tokens > 100


@pytest.mark.parametrize(
    ("blend", "more", "message"),
    [
        ({"separator": "nowhere"}, {}, "nowhere in the prompt"),
        ({"separator": ""}, {}, "1 to 256 characters"),
        ({"separator": "|", "recompute": 7}, {}, "from 0 to 1"),
        ({"separator": "|"}, {"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"separator": "|", "max_error": -1}, {}, "0 or more"),
        ({"separator": "|", "chunks": [[0, 1]]}, {}, "not both"),
        ({"chunks": [[0, 1]]}, {}, "positions of token ids"),
        ({"chunks": [[0, 10**30]]}, {"prompt": [1, 2, 3]}, "ends behind the prompt, which has 3 tokens"),
        ({"chunks": [[2, 3], [0, 1]]}, {"prompt": [1, 2, 3]}, "begins before chunks.0. ends, at 3"),
        ({"chunks": [[0, 1], [2, 2]]}, {"prompt": [1, 2, 3]}, "chunks.1. of blend, .2, 2., has no tokens"),
    ],
)
def test_refusals_say_what_is_wrong(client, blend, more, message):
    body = {"blend": blend, **more}
    with pytest.raises(openai.BadRequestError, match=message) as refused:
        client.completions.create(model="smollm2-135m", prompt="a|b|c", max_tokens=1, extra_body=body)
    assert refused.value.param == "blend"


@pytest.mark.parametrize("prompt", ["The lantern is", [1, 2, 3]])
def test_nothing_retrieved_is_a_prompt_like_any_other(client, prompt):
    asked = {"model": "smollm2-135m", "prompt": prompt, "max_tokens": 4, "temperature": 0}
    answer = client.completions.create(**asked, extra_body={"blend": {"chunks": []}})
    assert answer.usage.prompt_tokens_details.blended_tokens == 0
    assert answer.choices[0].text == client.completions.create(**asked).choices[0].text
