"""Ways to reason with prompts: a chain of thought, a vote over many, a tree of them.

Each is a short program over the language, to be read and rewritten. They take a Model, or a prompt to go on from.
Refuses to know: engines, tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace as changed

from quire.engine.consensus import LAST_NUMBER, Consensus, Extract, Vote
from quire.lang.model import Model
from quire.lang.pieces import Gen, Piece, Select, assistant, gen, select, user
from quire.lang.prompt import Prompt, probabilities
from quire.lang.where import Where
from quire.types.errors import InputError

Start = Model | Prompt
STEP_BY_STEP = "\nThink step by step, then give the answer."


@dataclass(frozen=True)
class Reasoned:
    answer: Any
    reasoning: str
    prompt: Prompt


def chain_of_thought(
    start: Start,
    question: str,
    *,
    where: Where | str | None = None,
    max_tokens: int = 200,
    lead: str = "\nThe answer is ",
    temperature: float = 0.0,
    **sampling: Any,
) -> Reasoned:
    """Let the model reason, then ask it for the answer alone: what `where` allows, or else one line."""
    answer = gen("answer", where=where, stop="" if where else "\n", max_tokens=64, temperature=temperature)
    prompt = start + user(question, STEP_BY_STEP)
    prompt += assistant(gen("reasoning", max_tokens=max_tokens, temperature=temperature, **sampling), lead, answer)
    return Reasoned(prompt["answer"], prompt["reasoning"], prompt)


def self_consistency(
    start: Start,
    question: str,
    *,
    n: int = 16,
    extract: Extract = LAST_NUMBER,
    max_tokens: int = 200,
    temperature: float = 0.7,
    **sampling: Any,
) -> Consensus:
    """The answer that most of `n` chains of thought arrive at. They are branches of one request, and those still under
    way are ended once they could not change the outcome; the result says how many tokens that saved."""
    hole = gen(max_tokens=max_tokens, temperature=temperature, **sampling)
    prompt = start + user(question, STEP_BY_STEP)
    home = prompt.home
    return home.wait(home.start(_vote(prompt, hole, n, extract)))


async def _vote(prompt: Prompt, hole: Gen, n: int, extract: Extract) -> Consensus:
    vote = Vote(n, extract, hole.params.max_tokens)
    state = await prompt.state()
    async with aclosing(prompt.home.backend.stream(state, changed(hole.params, n=n))) as stream:
        async for deltas in stream:
            if any(vote.take(delta) for delta in deltas):
                break
    return vote.result()


@dataclass(frozen=True)
class Thought:
    """A node of the tree."""

    text: str
    score: float  # how likely the model found it to be good, from 0 to 1
    prompt: Prompt


@dataclass(frozen=True)
class Tree:
    answer: Any
    best: Prompt  # the whole of the way to the answer
    levels: list[list[Thought]]  # all thoughts, the best of each level first


def tree_of_thoughts(
    start: Start,
    question: str,
    *,
    branches: int = 16,
    depth: int = 2,
    keep: int = 4,
    step: Gen | None = None,
    answer: Gen | None = None,
    judge: Sequence[Piece] | None = None,
) -> Tree:
    """Let `branches` thoughts grow at each of `depth` levels, judge every one, go on from the best `keep`, and answer
    after the best of all.

    `step` and `answer` are the holes for a thought and for the answer. `judge` is put after a thought on the side; its
    last piece is a select whose first option means good.
    """
    if not 1 <= keep <= branches:
        raise InputError(f"of {branches} branches {keep} cannot be kept; give 1 <= keep <= branches", param="keep")
    hole = step or gen("thought", max_tokens=48, temperature=0.9, stop="\n")
    verdict = judge or ("\nThis thought is", select("verdict", [" right", " wrong"]))
    front, levels = [start + user(question, "\nThink step by step.")], []
    for level in range(1, depth + 1):
        grown = [
            prompt
            for parent, share in zip(front, _shares(branches, len(front)), strict=True)
            for prompt in (parent + f"Step {level}: ").fork(share) + hole + "\n"
        ]
        judged = [prompt + list(verdict) for prompt in grown]  # each begins as soon as its thought is there
        thoughts = [
            Thought(prompt[hole.name], _goodness(verdict, side), prompt)
            for prompt, side in zip(grown, judged, strict=True)
        ]
        thoughts.sort(key=lambda thought: thought.score, reverse=True)
        levels.append(thoughts)
        front = [thought.prompt for thought in thoughts[:keep]]
    last = answer or gen("answer", max_tokens=64, temperature=0.0, stop="\n")
    best = front[0] + "The answer is " + last
    return Tree(best[last.name], best, levels)


def _shares(total: int, parts: int) -> list[int]:
    return [total // parts + (i < total % parts) for i in range(parts)]


def _goodness(verdict: Sequence[Piece], side: Prompt) -> float:
    choice = verdict[-1]
    if not isinstance(choice, Select):
        raise InputError("the last piece of a judge must be a select; its first option means good", param="judge")
    return probabilities(side.scores(choice.name))[choice.options[0]]
