"""Hybrid models under the engine: prefix hits that start from snapshots of states, forks, drafts, refusals."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest
import torch
from tiny_engine import GREEDY, Engine, KnowingProposer
from tiny_models import prompts, tiny

from quire.generation.drafting.speculation import Speculation
from quire.scheduling.beam_group import BeamGroup
from quire.types.beam import BeamParams
from quire.types.blend import Blend
from quire.types.errors import ConfigError, InputError
from quire.types.plan import TokenLogprobs
from quire.types.request import Request
from quire.types.sampling_params import SamplingParams
from quire.types.timeline import PrefixOutcome

HYBRIDS = ["qwen3.5", "granite-hybrid", "lfm2"]


def quick(*cases):
    """Of the hybrids, for each of some other values: these, and the rest in the slow suite."""
    every = [(name, value) for name in HYBRIDS for value in dict.fromkeys(value for _, value in cases)]
    return [case if case in cases else pytest.param(*case, marks=pytest.mark.slow) for case in every]


def quick_with(*names):
    return [name if name in names else pytest.param(name, marks=pytest.mark.slow) for name in HYBRIDS]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Name → (transformers' model, its files)"""
    made = {}

    def model(name):
        if name not in made:
            theirs, path = tiny(name), tmp_path_factory.mktemp(name)
            theirs.config.max_position_embeddings = 512
            theirs.save_pretrained(path)
            made[name] = theirs, path
        return made[name]

    return model


def converse(engine: Engine, turns: int, remembers: bool) -> tuple[list[list[int]], int, int]:
    """Answers of a conversation, its prompt tokens, and how many of them were cached; if it `remembers`, prompts hold
    the answers before, as chats do, else only what was asked (thoughts are left out of later prompts)."""
    asked = prompts(*([19] + [11] * (turns - 1)), seed=5)
    known, answers = [], []
    params = SamplingParams(temperature=0, max_tokens=13, ignore_eos=True)
    for message in asked:
        known += message
        (answer,) = engine.answers([list(known)], params=params)
        answers.append(answer)
        known += answer if remembers else answer[:2]
    return answers, engine.core.scheduler.stats.prompt_tokens, engine.core.scheduler.stats.cached_tokens


@pytest.mark.parametrize(("name", "remembers"), quick(("qwen3.5", True), ("granite-hybrid", False), ("lfm2", False)))
def test_a_conversation_hits_as_much_as_with_full_attention(models, name, remembers):
    room = {"max_model_len": 300, "kv_pages": 400}
    full = Engine(models("llama3")[1], **room)
    _, total, cached = converse(full, 10, remembers)
    assert cached > total / 2
    hybrid = Engine(models(name)[1], **room)
    answers, _, found = converse(hybrid, 10, remembers)
    assert found > 0.9 * cached, f"{found} of {cached}"
    assert answers == converse(Engine(models(name)[1], prefix_cache=False, **room), 10, remembers)[0]


@pytest.mark.parametrize("name", HYBRIDS)
def test_prompts_that_part_start_where_they_do(models, name):
    """The second finds that its pages are shared further than a snapshot, and leaves one there for the third."""
    (head, *tails) = prompts(40, 9, 9, 9, 9)
    engine = Engine(models(name)[1], kv_pages=200)
    alone = Engine(models(name)[1], kv_pages=200, prefix_cache=False)
    cached = []
    for tail in tails:
        before = engine.core.scheduler.stats.cached_tokens
        assert engine.answers([head + tail]) == alone.answers([head + tail])
        cached.append(engine.core.scheduler.stats.cached_tokens - before)
        (log,) = engine.core.timelines(f"r{engine.count - 1}")
        assert log.snapshot == log.cached == cached[-1]
        if len(cached) == 2:
            assert (log.prefix, log.paged) == (PrefixOutcome.STATE, 40)
    assert cached == [0, 0, 40, 40]


def test_long_prompts_leave_snapshots_on_their_way(models):
    (head, *tails) = prompts(50, 9, 9)
    engine = Engine(models("lfm2")[1], kv_pages=200, max_model_len=96, snapshot_tokens=16)
    engine.answers([head + tails[0]])
    engine.answers([head + tails[1]])
    assert engine.core.scheduler.stats.cached_tokens == 48


@pytest.mark.parametrize("kv_snapshots", [0, 2])
def test_few_snapshots_cost_hits_not_tokens(models, kv_snapshots):
    asked = prompts(33, 21, 40, 25, 30, 37)
    path = models("granite-hybrid")[1]
    engine = Engine(path, kv_pages=200, kv_snapshots=kv_snapshots)
    plain = Engine(path, kv_pages=200, prefix_cache=False).answers(asked)
    for _ in range(3):
        assert engine.answers(asked) == plain
    assert engine.core.scheduler.memory.states.total == 8 + kv_snapshots


@pytest.mark.parametrize("name", HYBRIDS)
@pytest.mark.parametrize("preempt", [0, 5])
def test_branches_go_on_from_the_state_of_their_prompt(models, name, preempt):
    """Against branches that each compute the prompt themselves, as static batching has them."""
    asked = prompts(21, 34)
    params = SamplingParams(temperature=1.0, seed=3, n=3, max_tokens=17, ignore_eos=True)
    path = models(name)[1]
    forked = Engine(path, kv_pages=200, max_seqs=8).answers(asked, preempt=preempt, params=params)
    assert forked == Engine(path, kv_pages=200, max_seqs=8, scheduler="static").answers(asked, params=params)
    assert len({tuple(answer) for answer in forked}) > 2


@pytest.mark.parametrize("name", ["qwen3.5", "nemotron-h"])
def test_beams_go_on_from_the_states_they_fork_off(models, name):
    theirs, path = models(name)
    (prompt,) = prompts(18)
    beam = BeamParams(beams=3, n=2, max_tokens=9)
    params = SamplingParams(
        n=2, temperature=0.0, max_tokens=9, logprobs=beam.candidates(0), ignore_eos=True, stop_token_ids=[]
    )
    got = Engine(path, kv_pages=200).answers([prompt], params=params, beam=beam)
    group = BeamGroup(beam, 3, 9, set())
    answers = [[]]
    while not group.done:
        options = []
        for answer in answers:
            with torch.inference_mode():
                best = theirs(torch.tensor([prompt + answer])).logits[0, -1].log_softmax(-1).topk(params.logprobs)
            options.append(TokenLogprobs(0, 0.0, 1, best.indices.tolist(), best.values.tolist()))
        answers = [[*answers[c.parent], c.token] for c in group.advance(answers, options, Counter())]
    assert got == [h.tokens for h in sorted(group.finished, key=lambda h: -h.score)[:2]]


@pytest.mark.parametrize(("name", "depth"), quick(("granite-hybrid", 2), ("lfm2", 1)))
def test_drafts_are_rolled_back(models, name, depth):
    asked = prompts(12, 7, 20)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    room = {"kv_pages": 300, "max_model_len": 128, "page_size": 8, "scheduler": "fcfs"}
    plain = Engine(models(name)[1], **room).answers(asked, params=params)
    engine = Engine(models(name)[1], speculation="ngram", draft_tokens=6, draft_adapt=False, depth=depth, **room)
    whole = [prompt + answer for prompt, answer in zip(asked, plain, strict=True)]
    engine.core.executor._head.speculate(Speculation(KnowingProposer(whole)))
    for _ in range(2):
        assert engine.answers(asked, params=params) == plain
    assert engine.answers(asked, preempt=9, params=params) == plain
    stats = engine.core.scheduler.stats
    assert stats.accepted_tokens > 100 and stats.waste["draft"] > 50
    answered = [prompt + answer for prompt, answer in zip(asked, plain, strict=True)]
    before = stats.cached_tokens
    engine.answers(answered, params=SamplingParams(temperature=0, max_tokens=1))
    assert stats.cached_tokens - before == sum((len(p) - 1) // 8 * 8 for p in answered), "kept at boundaries of drafts"


def finish(engine: Engine) -> None:
    """Transfers under way end."""
    while engine.core.busy:
        engine.core.step()


@pytest.mark.parametrize("name", quick_with("qwen3.5"))
def test_snapshots_survive_a_restart(models, name, tmp_path):
    path, room = models(name)[1], {"kv_pages": 200, "kv_disk": f"{tmp_path}:64M", "max_model_len": 128}
    asked = prompts(33, 21, 40)
    first = Engine(path, **room)
    plain = first.answers(asked)
    first.core.close()
    second = Engine(path, **room)
    assert second.answers(asked) == plain
    assert second.core.scheduler.stats.cached_tokens == 32 + 20 + 36
    (log,) = second.core.timelines("r0")
    assert log.tiers == {"disk": 32} and log.snapshot == 32
    known = [prompt + answer + [7] for prompt, answer in zip(asked, plain, strict=True)]
    third = second.answers(known)
    assert third == Engine(path, kv_pages=200, max_model_len=128, prefix_cache=False).answers(known)
    second.core.close()


@pytest.mark.parametrize("name", quick_with("lfm2"))
def test_snapshots_that_made_room_come_back_from_host_memory(models, name):
    path = models(name)[1]
    engine = Engine(path, kv_pages=60, kv_snapshots=3, kv_host="16M")
    asked = prompts(33, 21, 40, 25, 30, 37, 39, 28)
    plain = Engine(path, kv_pages=200, prefix_cache=False).answers(asked)
    for _ in range(3):
        for prompt, answer in zip(asked, plain, strict=True):
            assert engine.answers([prompt]) == [answer]
    finish(engine)
    stats = engine.core.scheduler.stats
    assert stats.cached_tokens > 0.9 * 2 * sum((len(p) - 1) // 4 * 4 for p in asked)
    engine.core.close()


@pytest.mark.parametrize(("session", "cached"), [("s", 56), ("", 0)])
def test_a_session_keeps_its_snapshot(models, session, cached):
    path = models("lfm2")[1]
    engine = Engine(path, kv_pages=200, kv_snapshots=2, max_model_len=128)
    (mine, *others) = prompts(33, *[45] * 12)
    (answer,) = Engine(path, kv_pages=200).answers([mine])
    engine.core.submit(Request(id="mine", prompt=mine, params=GREEDY, session=session, hold=60.0))
    finish(engine)
    for other in others:
        engine.answers([other])
    before = engine.core.scheduler.stats.cached_tokens
    engine.answers([[*mine, *answer, 7]])
    assert engine.core.scheduler.stats.cached_tokens - before == cached
    engine.core.scheduler.features.sessions.reset()
    engine.core.scheduler.check()
    assert engine.core.scheduler.memory.states.used == 0


def test_embeddings_and_scores_need_no_more_than_states(models):
    theirs, path = models("qwen3.5")
    (prompt,) = prompts(29)
    engine = Engine(path, kv_pages=200, prefill_chunk=7)
    with torch.inference_mode():
        last = theirs.model(torch.tensor([prompt])).last_hidden_state[0]
    for pooling, wanted in (("mean", last.mean(0)), ("last", last[-1])):
        engine.core.submit(Request(id=pooling, prompt=prompt, params=GREEDY, pooling=pooling))
        events = []
        while engine.core.busy:
            events += engine.core.step()
        torch.testing.assert_close(torch.tensor(events[-1].embedding), wanted, atol=1e-4, rtol=1e-4)


def test_what_states_cannot_do_is_refused(models):
    path = models("lfm2")[1]
    engine = Engine(path, kv_pages=200)
    evicting = msgspec.structs.replace(GREEDY, kv_budget=16)
    for id, fields, reason in (
        ("evicting", {"params": evicting}, "recurrent layers"),
        ("blended", {"params": GREEDY, "blend": Blend(chunks=[(4, 12)])}, "states"),
    ):
        with pytest.raises(InputError, match=reason):
            engine.core.submit(Request(id=id, prompt=prompts(30)[0], **fields))
    with pytest.raises(ConfigError, match="recurrent"):
        Engine(path, kv_pages=200, kv_dtype="int8-kivi")
    with pytest.raises(ConfigError, match="recurrent"):
        Engine(models("llama3")[1], kv_pages=200, speculation=f"draft:{path}")
