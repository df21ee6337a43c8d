"""A small prompt optimiser: examples that the model itself got right become examples in its prompt.

Refuses to know: engines, tokens; a metric is a function of the caller's.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from quire.lang.model import Model
from quire.lang.pieces import Gen, assistant, gen, system, user
from quire.lang.prompt import Prompt
from quire.types.errors import InputError

ONE_LINE = gen("answer", max_tokens=32, temperature=0.0, stop="\n")


@dataclass(frozen=True)
class Example:
    question: str
    answer: str


@dataclass(frozen=True)
class Task:
    """A program with one question in and one answer out, that may be shown examples. `hole` says what an answer is."""

    instruction: str
    hole: Gen = ONE_LINE
    examples: tuple[Example, ...] = ()

    def __call__(self, model: Model, question: str) -> Prompt:
        prompt = model + system(self.instruction)
        for example in self.examples:
            prompt += [user(example.question), assistant(example.answer)]
        return prompt + user(question) + assistant(self.hole)


Metric = Callable[[Example, str], float]


@dataclass(frozen=True)
class Optimised:
    """The better task, and its mean metric on examples that had no part in making it, before and after."""

    task: Task
    before: float
    after: float
    trials: list[float]  # the metric of each set of examples tried, on training examples outside the set


def bootstrap(
    model: Model,
    task: Task,
    train: Sequence[Example],
    held_out: Sequence[Example],
    metric: Metric,
    *,
    shots: int = 4,
    trials: int = 8,
    seed: int = 0,
    passing: float = 1.0,
) -> Optimised:
    """Find examples to show. The task is run on `train` as it is; where its answer reaches `passing`, the answer in the
    model's own words becomes a candidate, elsewhere the given one. `trials` seeded draws of `shots` candidates are
    tried, those the model got right being preferred, and the best on the rest of `train` is taken, unless none beats
    having no examples."""
    if not 0 < shots < len(train):
        raise InputError(f"{shots} shots of {len(train)} examples leave none to try them on", param="shots")
    if not held_out or {e.question for e in held_out} & {e.question for e in train}:
        raise InputError("held_out must have examples, and none that are in train too", param="held_out")
    draws = random.Random(seed)
    own = _answers(model, task, train)
    marks = [metric(example, answer) for example, answer in zip(train, own, strict=True)]
    right = [replace(e, answer=a) for e, a, mark in zip(train, own, marks, strict=True) if mark >= passing]
    wrong = [e for e, mark in zip(train, marks, strict=True) if mark < passing]
    best, best_mark, seen = task, sum(marks) / len(marks), []
    for _ in range(trials):
        chosen = draws.sample(right, min(shots, len(right)))
        chosen += draws.sample(wrong, min(shots - len(chosen), len(wrong)))
        candidate = replace(task, examples=(*task.examples, *chosen))
        shown = {example.question for example in chosen}
        mark = evaluate(model, candidate, [e for e in train if e.question not in shown], metric)
        seen.append(mark)
        if mark > best_mark:
            best, best_mark = candidate, mark
    before, after = (evaluate(model, one, held_out, metric) for one in (task, best))
    return Optimised(best, before, after, seen)


def evaluate(model: Model, task: Task, examples: Sequence[Example], metric: Metric) -> float:
    """Mean metric of a task."""
    answers = _answers(model, task, examples)
    return sum(metric(example, answer) for example, answer in zip(examples, answers, strict=True)) / len(examples)


def _answers(model: Model, task: Task, examples: Sequence[Example]) -> list[str]:
    prompts = [task(model, example.question) for example in examples]  # all under way at once
    return [str(prompt[task.hole.name]) for prompt in prompts]
