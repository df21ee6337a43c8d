"""Contexts longer than their KV budget against transformers, whose cache is edited by hand: the same pages dropped at
the same points, keys turned back to no position at all and rotated anew for their new one, attention read from its own
probabilities."""

from __future__ import annotations

from itertools import count

import pytest
import torch
from tiny_models import prompts, tiny
from transformers import DynamicCache
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from quire.assets import resolve
from quire.engine.core import EngineCore
from quire.runtime.executors.local_executor import LocalExecutor
from quire.scheduling.features.kv_eviction import KVBudget
from quire.types.config import EngineOptions
from quire.types.request import Request
from quire.types.sampling_params import SamplingParams

PAGE, WINDOW = 4, 8


class Stream:
    """transformers, a budget of pages, and a cache that forgets."""

    def __init__(self, model, budget: int, eviction: str, whole: int = 0):
        self.model, self.pages, self.eviction = model, budget // PAGE, eviction
        self.point = max(whole, self.pages * PAGE)  # tokens after which it forgets next
        self.cache, self.seen, self.held = DynamicCache(), 0, 0
        self.mass = torch.zeros(0)
        self.masses = []

    @torch.inference_mode()
    def feed(self, tokens: list[int]) -> torch.Tensor:
        """Logits after each of these tokens."""
        found = []
        while tokens:
            if self.seen == self.point:
                self.forget()
            stop = self.point
            if self.eviction == "snapkv" and self.seen < self.point - WINDOW:
                stop -= WINDOW
            now, tokens = tokens[: stop - self.seen], tokens[stop - self.seen :]
            out = self.model(
                torch.tensor([now]),
                position_ids=torch.arange(self.held, self.held + len(now))[None],
                past_key_values=self.cache,
                use_cache=True,
                output_attentions=True,
            )
            found.append(out.logits[0])
            self.note(torch.stack(out.attentions)[:, 0].sum((0, 1, 2)), counts=stop == self.point)
            self.seen, self.held = self.seen + len(now), self.held + len(now)
        return torch.cat(found)

    def note(self, paid: torch.Tensor, counts: bool) -> None:
        """Attention to each entry of the cache, by page."""
        if self.eviction == "sinks" or (self.eviction == "snapkv" and not counts):
            return
        paid = torch.nn.functional.pad(paid, (0, -len(paid) % PAGE)).view(-1, PAGE).sum(1)
        self.mass = torch.nn.functional.pad(self.mass, (0, len(paid) - len(self.mass))) + paid

    def forget(self) -> None:
        pages, keep = -(-self.held // PAGE), self.pages * 3 // 4
        if self.eviction == "sinks":
            kept = [0, *range(pages - keep + 1, pages)]
        else:
            latest = keep // 4 if self.eviction == "snapkv" else keep // 2
            old = self.mass[: pages - latest]
            kept = sorted(old.topk(keep - latest).indices.tolist()) + list(range(pages - latest, pages))
            self.masses.append(self.mass)
        self.mass = self.mass[kept] if self.eviction == "h2o" else torch.zeros(0)
        index = torch.tensor([p * PAGE + i for p in kept for i in range(PAGE) if p * PAGE + i < self.held])
        rotary = self.model.model.rotary_emb
        for layer in self.cache.layers:
            keys = layer.keys[:, :, index]
            cos, sin = rotary(keys, index[None])
            scale = rotary.attention_scaling**2
            plain = apply_rotary_pos_emb(keys, keys, cos, -sin)[1] / scale
            cos, sin = rotary(keys, torch.arange(len(index))[None])
            layer.keys, layer.values = apply_rotary_pos_emb(plain, plain, cos, sin)[1], layer.values[:, :, index]
        self.point += self.pages * PAGE - (self.held - (pages - keep) * PAGE) if self.seen == self.point else 0
        self.held = len(index)

    def greedy(self, prompt: list[int], count: int) -> tuple[list[int], torch.Tensor]:
        """The answer, and the logits after every token that was fed."""
        logits, out = [self.feed(prompt)], []
        for _ in range(count):
            out.append(int(logits[-1][-1].argmax()))
            logits.append(self.feed(out[-1:]))
        return out, torch.cat(logits)


# Rotation with a scale of its own is in the streams themselves; what else may happen to them is slow with it.
plain_rotation = pytest.mark.parametrize(
    "pair", ["llama3", pytest.param("yarn-mscale", marks=pytest.mark.slow)], indirect=True, scope="module"
)


@pytest.fixture(scope="module", params=["llama3", "yarn-mscale"])
def pair(request, tmp_path_factory):
    """(transformers model, an engine on the same weights)"""
    theirs = tiny(request.param)
    path = tmp_path_factory.mktemp(request.param)
    theirs.save_pretrained(path)
    options = EngineOptions.of(
        model=str(path), dtype="float32", page_size=PAGE, max_model_len=600, kv_pages=64, max_batch_tokens=48, threads=1
    )
    executor = LocalExecutor(options, resolve(str(path)).open(), vocabulary=None)
    core = EngineCore(options, executor)
    yield theirs, core
    core.close()


def generate(core, *requests, preempt=0):
    """Events of some requests run together; six times, every `preempt` steps, one of them loses all it
    has."""
    for request in requests:
        core.submit(request)
    events = {request.id: [] for request in requests}
    for step in count(1):
        if not core.busy:
            break
        running = list(core.scheduler.sequences.running)
        if preempt and step % preempt == 0 and step <= 6 * preempt and running:
            core.scheduler.sequences.preempt(running[step // preempt % len(running)])
        for event in core.step():
            assert not event.message, event.message
            events[event.request].append(event)
        core.scheduler.check()
    return events


def ask(name, prompt, eviction, budget=48, **params):
    return Request(
        id=name,
        prompt=prompt,
        params=SamplingParams(
            **{"temperature": 0.0, "max_tokens": 60, "kv_budget": budget, "kv_eviction": eviction} | params
        ),
    )


@pytest.mark.parametrize("eviction", ["sinks", "snapkv", "h2o"])
def test_a_stream_far_longer_than_the_trained_context(pair, eviction):
    """280 tokens through 48, every log-probability on the way; the model was trained on 128."""
    theirs, core = pair
    (prompt,) = prompts(240, seed=3)
    out, logits = Stream(theirs, 48, eviction).greedy(prompt, 40)
    core.reset()
    events = generate(core, ask("a", prompt, eviction, prompt_logprobs=0, logprobs=0, max_tokens=40))["a"]
    expected = logits.log_softmax(-1)[torch.arange(len(prompt) + 39), prompt[1:] + out]
    scored = [entry.logprob for entry in events[0].prompt_logprobs]
    drawn = [entry.logprob for event in events for entry in event.logprobs]
    torch.testing.assert_close(torch.tensor(scored + drawn), expected, atol=1e-3, rtol=0)
    assert [t for event in events for t in event.tokens] == out
    assert events[-1].counts.evicted == (len(prompt) + 39 - 48) // 12 * 12 + 12


@plain_rotation
@pytest.mark.parametrize("eviction", ["snapkv", "h2o"])
def test_a_prompt_seen_whole_then_cut_to_its_budget(pair, monkeypatch, eviction):
    theirs, core = pair
    (prompt,) = prompts(110, seed=5)
    stream = Stream(theirs, 48, eviction, whole=len(prompt))
    out, _ = stream.greedy(prompt, 50)
    core.reset()
    paid = []
    core.submit(ask("a", prompt, eviction, max_tokens=50))
    choose = KVBudget.choose

    def watched(memo, pages):
        paid.append(torch.tensor(memo.scores))
        return choose(memo, pages)

    monkeypatch.setattr(KVBudget, "choose", watched)
    events = []
    while core.busy:
        events += core.step()
    assert [t for event in events for t in event.tokens] == out
    assert len(paid) == len(stream.masses) >= 4
    for ours, their in zip(paid, stream.masses, strict=True):
        torch.testing.assert_close(ours, their, atol=2e-3, rtol=1e-3)
    queries = WINDOW if eviction == "snapkv" else len(prompt)
    config = theirs.config
    total = queries * config.num_hidden_layers * config.num_attention_heads
    assert paid[0].sum() == pytest.approx(total, rel=1e-4), "probabilities of a query add up to one"


@plain_rotation
def test_together_chunked_and_preempted_the_answer_is_the_same(pair):
    _, core = pair
    lengths = (300, 70, 110, 200)
    asked = [
        ask(f"r{i}", prompt, ["sinks", "snapkv", "h2o", "sinks"][i], 48 + 4 * i)
        for i, prompt in enumerate(prompts(*lengths, seed=7))
    ]
    core.reset()
    alone = {r.id: [t for e in generate(core, r)[r.id] for t in e.tokens] for r in asked}
    core.reset()
    events = generate(core, *asked, preempt=9)
    together = {name: [t for e in found for t in e.tokens] for name, found in events.items()}
    assert core.stats().preemptions > 3
    assert together == alone


@plain_rotation
def test_who_has_no_budget_is_not_touched(pair):
    """Beside a stream, and on pages the stream has used: what it is alone."""
    _, core = pair
    (long,) = prompts(300, seed=9)
    plain = Request(id="p", prompt=long[:40], params=SamplingParams(temperature=0.0, max_tokens=30, logprobs=0))
    core.reset()
    alone = generate(core, plain)["p"]
    core.reset()
    beside = generate(core, ask("s", long, "sinks"), plain)["p"]
    again = generate(core, plain)["p"]
    assert again[0].counts.cached == 39, "the stream's prefix was shared before it forgot"
    for other in (beside, again):
        assert [t for e in other for t in e.tokens] == [t for e in alone for t in e.tokens]
        ours, theirs_ = ([p.logprob for e in events for p in e.logprobs] for events in (other, alone))
        assert ours == pytest.approx(theirs_, abs=1e-4)
