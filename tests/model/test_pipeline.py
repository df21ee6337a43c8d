"""Pipeline parallelism: stages, here threads, compute one process's logits; engines of real processes its answers."""

from __future__ import annotations

import queue
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from model_harness import run_model
from tiny_engine import Engine
from tiny_models import CONFIGS, prompts, tiny

from quire.assets import resolve
from quire.model import load_model, read_spec
from quire.model.pipeline import stage_layers, staged_spec
from quire.types.errors import ConfigError
from quire.types.request import Request
from quire.types.sampling_params import SamplingParams

QUICK = ["llama-biased-tied", "mistral-window", "olmo2", "gpt-oss", "deepseek-v3", "phi3"]
FAMILIES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CONFIGS]


class ThreadStages:
    """Stages of one process: queues between them."""

    whole_experts, context, pipeline = False, False, True

    def __init__(self, rank: int, links: list[queue.Queue]):
        self.rank, self.size, self._links = rank, len(links), links

    def send(self, x: torch.Tensor) -> None:
        self._links[(self.rank + 1) % self.size].put(x.clone())

    def receive(self, into: torch.Tensor) -> torch.Tensor:
        return into.copy_(self._links[self.rank].get(timeout=60))


def first_stage(source, size, work, **options):
    """What `work` makes of the first stage's model, while the others do the same."""
    links = [queue.Queue() for _ in range(size)]

    def one(rank):
        return work(load_model(source, device="cpu", dtype=torch.float32, ranks=ThreadStages(rank, links), **options))

    with ThreadPoolExecutor(size) as pool:
        first, *_ = pool.map(one, range(size))
        return first


def logits(model, chunk, last):
    if model.pipeline is not None and model.pipeline.rank:
        model.logits = lambda hidden: hidden  # the first stage alone has the head
    return run_model(model, prompts(41, 29), chunk=chunk, last=last)


@pytest.mark.parametrize("name", FAMILIES)
def test_stages_compute_one_process_s_logits(name, tmp_path):
    tiny(name).save_pretrained(tmp_path)
    source = resolve(str(tmp_path)).open()
    try:
        staged_spec(read_spec(source), 0, 2)
    except ConfigError as error:
        assert name not in QUICK
        pytest.skip(str(error))
    whole = load_model(source, device="cpu", dtype=torch.float32)
    for chunk, last in ((13, False), (None, True)):
        wanted = logits(whole, chunk, last)
        found = first_stage(source, 2, lambda part, chunk=chunk, last=last: logits(part, chunk, last))
        for got, want in zip(found, wanted, strict=True):
            torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def test_random_weights_are_the_same_however_they_are_divided(tmp_path):
    tiny("llama-biased-tied").save_pretrained(tmp_path)
    source = resolve(str(tmp_path)).open()
    wanted = logits(load_model(source, device="cpu", dtype=torch.float32, random_weights=True), 13, False)
    found = first_stage(source, 2, lambda part: logits(part, 13, False), random_weights=True)
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def test_layers_are_all_there_once():
    for count, stages in ((32, 4), (30, 4), (7, 3)):
        found = [stage_layers(count, stage, stages) for stage in range(stages)]
        assert [layer for some in found for layer in some] == list(range(count))
        assert max(map(len, found)) - min(map(len, found)) <= 1


@pytest.mark.parametrize(
    ("name", "stages", "why"),
    [
        ("llama3", 3, "4 layers are fewer than 2 for each stage"),
        ("gemma4", 2, "its layers share embeddings, keys and values"),
        ("gemma3", 2, "its stages would have KV pages of different kinds"),
    ],
)
def test_what_cannot_be_divided_is_refused_by_name(name, stages, why, tmp_path):
    tiny(name).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=why):
        staged_spec(read_spec(resolve(str(tmp_path)).open()), 0, stages)


def test_an_engine_of_two_stages_answers_as_one_process(tmp_path):
    """With drafts, prefix hits, preemption and prompt log-probabilities; what stages send is counted."""
    tiny("llama3").save_pretrained(tmp_path)
    options = {"kv_pages": 300, "speculation": "ngram", "draft_tokens": 3, "draft_adapt": False}
    one, two = Engine(tmp_path, **options), Engine(tmp_path, pipeline_parallel=2, **options)
    asked = prompts(33, 21, 40, 5)
    try:
        for preempt in (0, 0, 5):
            assert two.answers(asked, preempt=preempt) == one.answers(asked)
        stats = two.core.scheduler.stats
        assert stats.exchanged_bytes == stats.rows * 48 * 4  # the first stage: each token's hidden state
        found = []
        for engine in (one, two):
            params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=1, ignore_eos=True)
            engine.core.submit(Request(id="p", prompt=prompts(70)[0][:60], params=params))
            scores = []
            while engine.core.busy:
                scores += [entry for event in engine.core.step() for entry in event.prompt_logprobs or []]
            found.append([entry.logprob for entry in scores])
        assert len(found[0]) >= 59 and found[1] == pytest.approx(found[0], abs=1e-4)
    finally:
        two.core.close()
