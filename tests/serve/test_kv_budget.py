"""kv_budget and kv_eviction over HTTP, by OpenAI's own client."""

import openai
import pytest

PROMPT = "The river runs past the mill and on to the sea. " * 30


@pytest.fixture(scope="module")
def client(live_server):
    return openai.OpenAI(base_url=f"{live_server}/v1", api_key="none", max_retries=0)


def complete(client, **extra):
    return client.completions.create(model="smollm2-135m", prompt=PROMPT, max_tokens=8, temperature=0, extra_body=extra)


def test_a_budget_is_kept_and_told(client):
    answer = complete(client, kv_budget=128)
    assert answer.usage.prompt_tokens > 300
    assert answer.usage.evicted_tokens >= answer.usage.prompt_tokens - 128
    chat = client.chat.completions.create(
        model="smollm2-135m",
        messages=[{"role": "user", "content": PROMPT}],
        max_tokens=8,
        extra_body={"kv_budget": 128, "kv_eviction": "snapkv"},
    )
    assert chat.usage.evicted_tokens >= 200
    assert not hasattr(complete(client).usage, "evicted_tokens")


@pytest.mark.parametrize(
    ("extra", "param", "words"),
    [
        ({"kv_budget": 5}, "kv_budget", "from 64"),
        ({"kv_budget": 10**6}, "kv_budget", "to 8192"),
        ({"kv_budget": 0}, "kv_budget", ">= 1"),
        ({"kv_budget": 128, "kv_eviction": "lru"}, "kv_eviction", "lru"),
    ],
)
def test_what_cannot_be_kept_is_refused(client, extra, param, words):
    with pytest.raises(openai.BadRequestError) as refusal:
        complete(client, **extra)
    assert refusal.value.param == param and words in str(refusal.value)
