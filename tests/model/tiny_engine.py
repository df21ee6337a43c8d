"""An engine over a tiny model's files, stepped by hand."""

from __future__ import annotations

from quire.assets import resolve
from quire.engine.core import EngineCore
from quire.runtime.executors.open_executor import open_executor
from quire.types.beam import BeamParams
from quire.types.config import EngineOptions
from quire.types.request import Request
from quire.types.sampling_params import SamplingParams

TOKENS = 24
GREEDY = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)


class Engine:
    def __init__(self, path, **options):
        options = EngineOptions.of(
            **{"model": str(path), "dtype": "float32", "page_size": 4, "max_model_len": 64, "max_seqs": 4, "threads": 1}
            | options
        )
        self.core = EngineCore(options, open_executor(options, resolve(str(path)).open(), vocabulary=None))
        self.count = 0

    def prompt_logprobs(self, prompt: list[int]) -> list[float]:
        params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=1, ignore_eos=True)
        self.core.submit(Request(id="p", prompt=prompt, params=params))
        found: list[float] = []
        while self.core.busy:
            found += [entry.logprob for event in self.core.step() for entry in event.prompt_logprobs or []]
        return found

    def answers(
        self,
        asked: list[list[int]],
        preempt: int = 0,
        params: SamplingParams = GREEDY,
        beam: BeamParams | None = None,
        lora: list[str] | None = None,
    ) -> list[list[int]]:
        """Of prompts asked together, branch by branch; every `preempt` steps one of them loses all it has. `lora`: the
        adapter of each."""
        first, self.count = self.count, self.count + len(asked)
        names = [f"r{first + i}" for i in range(len(asked))]
        said = {(name, branch): [] for name in names for branch in range(params.n)}
        for name, prompt, adapter in zip(names, asked, lora or [""] * len(asked), strict=True):
            self.core.submit(Request(id=name, prompt=prompt, params=params, beam=beam, lora=adapter))
        step = 0
        while self.core.busy:
            step += 1
            running = list(self.core.scheduler.sequences.running)
            if preempt and step % preempt == 0 and step <= 4 * preempt and running:
                self.core.scheduler.sequences.preempt(running[step // preempt % len(running)])
            for event in self.core.step():
                assert not event.message, event.message
                said[event.request, event.branch] += event.tokens
            self.core.scheduler.check()
        return list(said.values())


class KnowingProposer:
    """Drafts what will be said, but for one token in five."""

    def __init__(self, whole: list[list[int]]):
        self._whole = whole

    def propose(self, contexts, budgets):
        drafts = []
        for context, budget in zip(contexts, budgets, strict=True):
            known = len(context.tokens)
            rest = next((w[known : known + budget] for w in self._whole if w[:known] == context.tokens), [])
            drafts.append([token if (known + i) % 5 else (token + 1) % 97 for i, token in enumerate(rest)])
        return drafts

    def observe(self, context, tokens):
        pass

    def forget(self, context):
        pass
