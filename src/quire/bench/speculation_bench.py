"""What speculation brings: the same prompts with and without, turn by turn, and how many drafts were accepted.

    edit   a text in the prompt, to be written again with a small change (as in code edits and answers from documents)
    chat   short questions

Every round asks about other texts, so that no proposer has seen an answer before. Speeds are those of single streams,
from the first token to the last. Answers are greedy, and how many are as without speculation is counted: on a CPU and
with `--invariant` all, elsewhere what is computed together may round otherwise.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from random import Random
from typing import Any

from quire.engine.link import Link
from quire.engine.llm import LLM
from quire.engine.request_progress import RequestProgress
from quire.types.events import EngineStats
from quire.types.sampling_params import SamplingParams

NAMES = ("Ada", "Ben", "Cleo", "Dana", "Emil", "Fay", "Gus", "Hana", "Ivo", "June", "Kofi", "Lena", "Milo", "Nora")
PLACES = ("Oslo", "Lima", "Cairo", "Perth", "Quito", "Turin", "Busan", "Davos", "Kyoto", "Accra", "Nice", "Ghent")
THINGS = ("maps", "boats", "lamps", "clocks", "pianos", "kites", "ropes", "tents", "drums", "bells", "coats", "desks")
TOPICS = ("bread", "winter", "bees", "glass", "trains", "salt", "paper", "music", "rivers", "chess", "coffee", "stars")
ASKS = ("Explain {} to a child.", "What is interesting about {}?", "Write a short story about {}.")


@dataclass
class Figures:
    """What one way of running came to."""

    speeds: list[float] = field(default_factory=list)  # tokens per second after the first token, by round
    answers: int = 0
    equal: int = 0  # of them, those that are as the first engine's
    tokens: int = 0
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0

    @property
    def speed(self) -> float:
        return statistics.median(self.speeds)

    @property
    def acceptance(self) -> float:
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def length(self) -> float:
        """Tokens that a step with a draft came to: those accepted, and the one every step draws."""
        return 1 + self.accepted / self.drafts if self.drafts else 1.0

    @property
    def per_step(self) -> float:
        """Tokens per step, those without a draft among them."""
        return self.tokens / (self.tokens - self.accepted) if self.tokens else 0.0

    def add(self, stats: EngineStats) -> None:
        self.drafts += stats.drafts
        self.drafted += stats.drafted_tokens
        self.accepted += stats.accepted_tokens


def edit(rng: Random) -> str:
    """A small table of facts, and a change to make in it."""
    lines = [
        f"{name} lives in {rng.choice(PLACES)} and sells {rng.choice(THINGS)} for {rng.randint(3, 99)} dollars each."
        for name in rng.sample(NAMES, 6)
    ]
    text = "\n".join(lines)
    return f"Here is a text:\n\n{text}\n\nWrite the same text again, every line, and change 'dollars' to 'euros'."


def chat(rng: Random) -> str:
    return rng.choice(ASKS).format(rng.choice(TOPICS))


WORKLOADS = {"edit": edit, "chat": chat}


def compare(
    llms: dict[str, LLM], workload: str, *, rounds: int, num: int, max_tokens: int, seed: int
) -> dict[str, Figures]:
    """The same `num` prompts a round through every engine, one after the other."""
    rng, found = Random(seed), {name: Figures() for name in llms}
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    for number in range(rounds + 1):
        prompts = [WORKLOADS[workload](rng) for _ in range(num)]
        answers: dict[str, list[list[int]]] = {}
        for name, llm in llms.items():
            encoded = [llm.text.encode_chat([{"role": "user", "content": prompt}]) for prompt in prompts]
            llm.reset()
            results = []
            with RequestProgress(num) as progress:
                for prompt_ids in encoded:
                    results += llm.generate(prompt_ids, params)
                    progress.ended()
            answers[name] = [result.outputs[0].token_ids for result in results]
            if number == 0:
                continue  # first-use costs, and time for budgets to settle
            figures = found[name]
            tokens = sum(len(answer) - 1 for answer in answers[name])
            seconds = sum(r.times.finished - r.times.first_token for r in results)
            figures.speeds.append(tokens / seconds)
            figures.tokens += tokens
            figures.add(llm.stats())
        first = next(iter(answers.values()))
        for name, each in answers.items():
            found[name].answers += num
            found[name].equal += sum(a == b for a, b in zip(each, first, strict=True))
    return found


def rows(workload: str, found: dict[str, Figures]) -> list[tuple[str, ...]]:
    plain = next(iter(found.values())).speeds
    return [
        (
            workload,
            name,
            f"{figures.speed:.1f} tok/s",
            f"{statistics.median(a / b for a, b in zip(figures.speeds, plain, strict=True)):.2f}x",
            f"{figures.acceptance:.0%} of {figures.drafted}" if figures.drafted else "-",
            f"{figures.length:.2f}",
            f"{figures.per_step:.2f}",
            f"{figures.equal} of {figures.answers}" if figures.answers else "-",
        )
        for name, figures in found.items()
    ]


HEADS = ("work", "speculation", "speed", "to plain", "accepted", "length", "per step", "same answers")


def plain_figures(found: dict[str, Figures]) -> dict[str, Any]:
    return {
        name: {
            "tok_s": f.speed,
            "speeds": f.speeds,
            "acceptance": f.acceptance,
            "drafted": f.drafted,
            "accepted_length": f.length,
            "tokens_per_step": f.per_step,
            "answers": f.answers,
            "equal": f.equal,
        }
        for name, f in found.items()
    }


def batched(link: Link, batch: int, *, n_in: int, n_out: int, rounds: int, seed: int) -> Figures:
    """Fixed lengths, `batch` at a time: for engines whose answers mean nothing."""
    from quire.bench import workloads
    from quire.bench.offline import run_workload

    found, vocab = Figures(), link.info.vocab_size
    for number in range(rounds + 1):
        run = run_workload(link, workloads.fixed(batch, n_in, n_out, seed=seed + number, vocab=vocab))
        if number:
            first, end = max(t.times[0] for t in run.traces), max(t.end for t in run.traces)
            after = sum(sum(time > first for time in t.times) for t in run.traces)
            found.speeds.append(after / (end - first))
            found.tokens += run.stats.output_tokens - batch
            found.add(run.stats)
    return found
