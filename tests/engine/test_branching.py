"""Branches of one request: beam search equal to transformers', diverse groups equal to a plain twin, best_of and
self-consistency; pages are shared."""

import math
from collections import Counter

import pytest
import torch

from quire import LLM, AsyncLLM, SamplingParams
from quire.engine.consensus import Vote
from quire.types.beam import BeamParams
from quire.types.errors import ContextLengthError, InputError
from quire.types.grammar import GrammarSpec
from quire.types.outputs import Delta
from quire.types.request import FinishReason

PLACES = ["France", "Japan", "Peru", "Kenya", "Norway", "Egypt", "Canada", "Spain", "India", "Cuba"]
PROMPTS = [f"The capital of {place} is" for place in PLACES] + [
    "Once upon a time", "def fib(n):", "1, 2, 3, 4,", "The best way to learn is", "Water boils at", "She said that",
    "In 1969,", "A list of fruits:", "To be or not to be,", "The cat sat on the",
]  # fmt: skip
SETTINGS = [
    {"length_penalty": 1.0},
    {"length_penalty": 0.0, "early_stopping": "never"},
    {"length_penalty": 2.0, "early_stopping": True},
    {"length_penalty": -0.5},
]


def ends(llm):
    """Ends of answers: the model's own, and the full stop, so that some answers do end."""
    return [*sorted(llm.text.tokenizer.eos_ids), *llm.text.tokenizer.encode(".", add_special=False)]


def theirs(oracle, llm, prompt, beams, tokens, setting):
    ids = torch.tensor([llm.text.tokenizer.encode(prompt)])
    with torch.no_grad():
        found = oracle.generate(
            ids, attention_mask=torch.ones_like(ids), num_beams=beams, num_return_sequences=beams, do_sample=False,
            max_new_tokens=tokens, eos_token_id=ends(llm), pad_token_id=0, return_dict_in_generate=True,
            output_scores=True, **setting,
        )  # fmt: skip
    return found.sequences[:, ids.shape[1] :].tolist(), found.sequences_scores.tolist()


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_beam_search_equals_transformers(llm, oracle, every):
    beams, tokens = 3, 8
    stops = llm.text.tokenizer.encode(".", add_special=False)
    same = total = finished = 0
    for i, setting in enumerate(SETTINGS):
        prompts = PROMPTS[i :: len(SETTINGS) * every]
        beam = BeamParams(beams=beams, n=beams, max_tokens=tokens, stop_token_ids=stops, **setting)
        for prompt, result in zip(prompts, llm.beam_search(prompts, beam), strict=True):
            sequences, scores = theirs(oracle, llm, prompt, beams, tokens, setting)
            assert [o.score for o in result.outputs] == pytest.approx(scores, abs=2e-3), prompt
            for output, expected in zip(result.outputs, sequences, strict=True):
                total += 1
                same += output.token_ids == expected[: len(output.token_ids)]
                finished += output.finish_reason is FinishReason.STOP
    assert same >= 0.95 * total, "they may differ where two scores are all but equal"
    assert finished > 0.1 * total


def twin(oracle, prompt, ends, params):
    """Diverse beam search, said plainly: every group looks at all its beams and all tokens, in turn."""
    width = params.beams // params.groups
    groups = [{"beams": [([], 0.0)], "finished": [], "done": False} for _ in range(params.groups)]
    while going := [group for group in groups if not group["done"]]:
        taken = Counter()
        with torch.no_grad():
            ids = torch.tensor([[*prompt, *tokens] for group in going for tokens, _ in group["beams"]])
            rows = iter(oracle(ids, logits_to_keep=1).logits[:, -1].double().log_softmax(-1))
        for group in going:
            options = []
            for (tokens, score), logprobs in zip(group["beams"], rows, strict=False):
                for token, count in taken.items():
                    logprobs[token] -= params.diversity * count
                top = logprobs.topk(64)
                pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
                options += [([*tokens, token], score + logprob) for token, logprob in pairs]
            options.sort(key=lambda option: -option[1])
            length = len(options[0][0])
            over = [tokens[-1] in ends or length == params.max_tokens for tokens, _ in options]
            group["finished"] += [
                (tokens, score / length**params.length_penalty)
                for (tokens, score), ended in zip(options[:width], over, strict=False)
                if ended
            ]
            group["finished"] = sorted(group["finished"], key=lambda f: -f[1])[:width]
            group["beams"] = [option for option, ended in zip(options, over, strict=True) if not ended][:width]
            taken.update(tokens[-1] for tokens, _ in group["beams"])
            full = len(group["finished"]) == width
            best = group["beams"][0][1] / length**params.length_penalty if group["beams"] else -math.inf
            group["done"] = not group["beams"] or (full and best <= group["finished"][-1][1])
    return sorted((f for group in groups for f in group["finished"]), key=lambda f: -f[1])


def test_diverse_groups_equal_a_plain_twin(llm, oracle):
    stops = llm.text.tokenizer.encode(".", add_special=False)
    params = BeamParams(beams=4, n=4, groups=2, diversity=1.5, max_tokens=4, stop_token_ids=stops)
    for prompt, result in zip(PROMPTS[9:11], llm.beam_search(PROMPTS[9:11], params), strict=True):
        expected = twin(oracle, llm.text.tokenizer.encode(prompt), ends(llm), params)
        assert [o.token_ids for o in result.outputs] == [tokens for tokens, _ in expected]
        assert [o.score for o in result.outputs] == pytest.approx([score for _, score in expected], abs=2e-3)


def test_beams_share_the_pages_of_their_prompt(fast):
    prompt, new = [1 + i % 3000 for i in range(640)], 8
    size = fast.info.page_size
    fast.reset()
    fast.generate(prompt, SamplingParams(temperature=0, max_tokens=new, ignore_eos=True))
    alone = fast.stats().pages_peak
    fast.reset()
    (result,) = fast.beam_search(prompt, BeamParams(beams=8, n=8, max_tokens=new, ignore_eos=True))
    assert len(result.outputs) == 8 and all(len(o.token_ids) == new for o in result.outputs)
    assert fast.stats().pages_peak < 1.3 * alone + 8 * new / size
    assert fast.stats().pages_used == 0


def test_beams_among_others_and_when_memory_is_short(fast):
    prompts = PROMPTS[:6]
    beam = BeamParams(beams=4, n=2, max_tokens=16)
    calm = fast.beam_search(prompts, beam)
    plain = fast.generate(prompts, SamplingParams(temperature=0, max_tokens=16))
    with LLM("smollm2-135m", kv_pages=14, page_size=8, max_model_len=64, max_seqs=6, depth=2, process=True) as small:
        tight = small.beam_search(prompts, beam)
        again = small.generate(prompts, SamplingParams(temperature=0, max_tokens=16))
        assert small.stats().preemptions > 0
        with pytest.raises(ContextLengthError, match="beams"):
            small.beam_search(prompts[0], BeamParams(beams=6, max_tokens=50))
        with pytest.raises(InputError, match="slots"):
            small.beam_search(prompts[0], BeamParams(beams=8, max_tokens=4))
    assert [[o.token_ids for o in r.outputs] for r in tight] == [[o.token_ids for o in r.outputs] for r in calm]
    assert [r.outputs[0].token_ids for r in again] == [r.outputs[0].token_ids for r in plain]


@pytest.mark.parametrize(
    "wrong",
    [
        {"beams": 0}, {"beams": 100}, {"n": 5}, {"groups": 3}, {"diversity": 1.0}, {"length_penalty": math.inf},
        {"max_tokens": 0}, {"groups": 0},
    ],
    ids=str,
)  # fmt: skip
def test_impossible_searches_are_refused(wrong):
    with pytest.raises(InputError):
        BeamParams(**wrong)


def test_the_best_are_the_likeliest(fast):
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=10, n=6, logprobs=0)
    (all_six,) = fast.generate(PROMPTS[0], params)
    (best,) = fast.generate(PROMPTS[0], SamplingParams(temperature=1.0, seed=3, max_tokens=10, n=2, best_of=6))
    ranked = sorted(all_six.outputs, key=lambda o: o.cumulative_logprob / len(o.token_ids), reverse=True)
    assert [o.token_ids for o in best.outputs] == [o.token_ids for o in ranked[:2]]
    assert [o.index for o in best.outputs] == [0, 1]
    with pytest.raises(InputError, match="best_of"):
        SamplingParams(n=3, best_of=2)
    with pytest.raises(InputError, match="streamed"):
        next(fast.stream(PROMPTS[0], SamplingParams(best_of=2)))


def ended(branch, text):
    return Delta(branch=branch, text=text, token_ids=[1] * len(text), finish_reason=FinishReason.STOP)


def test_a_vote_ends_when_it_is_decided():
    vote = Vote(5, r"answer is (\w+)")
    assert not vote.take(Delta(branch=4, text="the ", token_ids=[1, 2]))
    assert not vote.take(ended(0, "the answer is 7 or the answer is 8"))
    assert not vote.take(ended(1, "the answer is 9"))
    assert not vote.take(ended(2, "no idea"))
    assert not vote.take(ended(3, "the answer is 8"))
    assert vote.take(ended(4, "answer is 8"))
    result = vote.result()
    assert result.answer == "8" and result.votes == {"8": 3, "9": 1} and result.tokens_saved == 0
    early = Vote(5, str.strip)
    assert [early.take(ended(b, "yes!")) for b in range(3)] == [False, False, True]
    result = early.result()
    assert (result.answer, result.ended, result.asked, result.tokens_saved) == ("yes!", 3, 5, 8)


def test_branches_that_cannot_change_the_vote_are_stopped(fast):
    fast.reset()
    grammar = GrammarSpec("regex", r"( [a-z]{1,8}){0,30} so 42")
    params = SamplingParams(temperature=1.0, seed=1, n=9, max_tokens=200, grammar=grammar)
    result = fast.self_consistency("The answer:", params)
    assert result.answer == "42" and 5 <= result.ended < 9 and result.tokens_saved > 0
    stats = fast.stats()
    assert stats.running == stats.pages_used == 0


async def test_the_async_forms():
    async with await AsyncLLM.open("smollm2-135m", kv_memory="128M") as engine:
        found = await engine.beam_search(PROMPTS[0], BeamParams(beams=2, n=2, max_tokens=4))
        assert found.outputs[0].score >= found.outputs[1].score
        grammar = GrammarSpec("choice", '["7"]')
        consensus = await engine.self_consistency("Pick:", SamplingParams(n=3, seed=1, grammar=grammar))
        assert consensus.answer == "7" and consensus.votes["7"] >= 2
