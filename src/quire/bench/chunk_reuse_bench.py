"""What chunks reused at other places are worth, and what they cost: time to first token and answers, against prompts
that are computed whole.

Invented documents in shuffled orders, a question about one of them, greedy answers. Refuses to know: how chunks are
reused.
"""

from __future__ import annotations

import math
import secrets
from random import Random
from statistics import mean, median
from typing import Any, NamedTuple

from quire.engine.llm import LLM
from quire.engine.text_input import prepare
from quire.text import chat_prompt
from quire.types.blend import Blend, BlendParams
from quire.types.outputs import RequestOutput
from quire.types.plan import TokenLogprobs
from quire.types.sampling_params import MAX_LOGPROBS, SamplingParams

SEPARATOR = "<|chunk|>"  # in no document
ANSWER = 32  # tokens
SHARES = (0.0, 0.15, 0.25, 1.0)
HEAD = "Read the documents, then answer the question with a short sentence.\n\n"
_SYLLABLES = ("bar", "den", "fel", "gos", "hul", "kim", "lor", "mar", "nev", "ost", "pil", "ran", "sten", "tor", "ulm")
_FACTS = (  # sentence, question, values
    ("{town} was founded in {} by travelling {trade}.", "In which year was {town} founded?", range(1100, 1900)),
    ("The market of {town} is famous for its {}.", "What is the market of {town} famous for?",
     ("copper bells", "blue cloth", "honey wine", "smoked trout", "carved flutes", "salted plums", "walnut cake")),
    ("The river that runs through {town} is called the {}.", "What is the river in {town} called?",
     ("Ashwater", "Brindle", "Corran", "Dunmere", "Elver", "Fennick", "Gareth", "Hollin")),
    ("About {} people live in {town} today.", "How many people live in {town}?", range(1200, 90000, 700)),
    ("Every year in {} the people of {town} hold a lantern festival.", "In which month is the festival of {town}?",
     ("March", "April", "May", "June", "July", "August", "September", "October")),
)  # fmt: skip
_FILLER = (
    "Its old walls were taken down when the railway came.",
    "Visitors like the narrow lanes behind the town hall.",
    "The school next to the bridge teaches painting and music.",
    "In winter the hills to the north are covered with snow.",
    "A small museum shows tools that farmers used long ago.",
    "Most houses are built from the grey stone of the valley.",
)


class Case(NamedTuple):
    documents: list[str]
    question: str
    answer: str
    place: int = 0  # of the document that has the answer

    @property
    def text(self) -> str:
        """With separators around the documents."""
        return SEPARATOR.join((HEAD, *self.documents, f"Question: {self.question}"))


def cases(count: int, *, documents: int, chosen: int, seed: int = 0) -> tuple[list[Case], list[list[str]]]:
    """Prompts about `chosen` of so many documents each, in any order, whose answers are in each of them equally often;
    and all documents in pairs, each once first and once behind another."""
    rng = Random(seed)
    library = [_document(rng) for _ in range(documents)]
    found = []
    for number in range(count):
        some, place = rng.sample(library, chosen), number % chosen
        question, answer = rng.choice(some[place][1])
        found.append(Case([text for text, _ in some], question, answer, place))
    texts = [text for text, _ in library]
    return found, [[text, texts[i - 1]] for i, text in enumerate(texts)]


def _document(rng: Random) -> tuple[str, list[tuple[str, str]]]:
    """A text about an invented town, and what may be asked about it."""
    town = "".join(rng.sample(_SYLLABLES, 3)).capitalize()
    trade = rng.choice(("monks", "weavers", "miners", "sailors", "merchants"))
    sentences, asked = [], []
    for sentence, question, values in _FACTS:
        value = str(rng.choice(values))
        sentences.append(sentence.format(value, town=town, trade=trade))
        asked.append((question.format(town=town), value))
    rng.shuffle(sentences)
    filler = rng.sample(_FILLER, len(sentences))
    lines = [line for pair in zip(sentences, filler, strict=True) for line in pair]
    return f"Document about {town}. " + " ".join([*lines, *rng.sample(_FILLER, 4)]) + "\n\n", asked


class Pair(NamedTuple):
    """A prompt computed whole and, right behind it, with its documents reused."""

    case: Case
    whole: RequestOutput
    blended: RequestOutput
    recomputed: float  # part of the reused tokens
    same: int  # tokens of the answer before the first that differs

    @property
    def compared(self) -> int:
        """Places of the answer that follow the same tokens in both."""
        longest = max(len(output.outputs[0].token_ids) for output in (self.whole, self.blended))
        return min(self.same + 1, longest)

    def divergences(self) -> list[float]:
        ours, theirs = (output.outputs[0].logprobs or [] for output in (self.whole, self.blended))
        return [_divergence(w, b) for w, b in zip(ours[: self.compared], theirs[: self.compared], strict=False)]

    def told(self) -> dict[str, Any]:
        return {
            "question": self.case.question,
            "answer": self.case.answer,
            "place": self.case.place,
            "whole": self.whole.outputs[0].text,
            "blended": self.blended.outputs[0].text,
            "right": [_right(self.case, self.whole), _right(self.case, self.blended)],
            "same": self.same,
            "compared": self.compared,
            "ttft": [_ttft(self.whole), _ttft(self.blended)],
            "recomputed": self.recomputed,
        }


def measure(
    llm: LLM,
    count: int,
    *,
    documents: int = 12,
    chosen: int = 6,
    answer: int = ANSWER,
    shares: tuple[float, ...] = SHARES,
    seed: int = 0,
) -> dict[str, Any]:
    """Every prompt computed whole, and right behind it with its documents reused and each share of them computed
    again: a machine is not always equally fast."""
    work, met = cases(count, documents=documents, chosen=chosen, seed=seed)
    warming = [_prompt(llm, Case(pair, work[0].question, "")) for pair in met]
    llm.reset()
    _answer(llm, warming[0][0][:64], None, answer)  # whatever is slow only once
    for tokens, chunks in warming:
        _answer(llm, tokens, Blend(chunks), 1)
    pairs: dict[float, list[Pair]] = {share: [] for share in shares}
    for case in work:
        tokens, chunks = _prompt(llm, case)
        output = _whole(llm, tokens, answer)
        for share in shares:
            pairs[share].append(_pair(llm, case, output, tokens, Blend(chunks, share), answer))
    some = pairs[shares[0]]
    return {
        "questions": count,
        "documents": chosen,
        "prompt_tokens": mean(len(pair.whole.prompt_token_ids) for pair in some),
        "ttft": mean(_ttft(pair.whole) for pair in some),
        "right": mean(_right(pair.case, pair.whole) for pair in some),
        "runs": {str(share): _summary(run) for share, run in pairs.items()},
    }


def _pair(llm: LLM, case: Case, whole: RequestOutput, tokens: list[int], blend: Blend, answer: int) -> Pair:
    before = llm.stats()
    blended = _answer(llm, tokens, blend, answer)
    after = llm.stats()
    moved = after.blended_tokens - before.blended_tokens
    ours, theirs = (output.outputs[0].token_ids for output in (whole, blended))
    same = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    again = (after.recomputed_tokens - before.recomputed_tokens) / moved if moved else 0.0
    return Pair(case, whole, blended, again, same)


def _summary(run: list[Pair]) -> dict[str, Any]:
    return {
        "recomputed": mean(pair.recomputed for pair in run),
        "ttft": median(_ttft(pair.blended) / _ttft(pair.whole) for pair in run),
        "reused": mean(pair.blended.blended_tokens / len(pair.blended.prompt_token_ids) for pair in run),
        "same_first": mean(pair.same > 0 for pair in run),
        "same": sum(pair.same for pair in run) / sum(pair.compared for pair in run),
        "divergence": mean(each for pair in run for each in pair.divergences()),
        "right": mean(_right(pair.case, pair.blended) for pair in run),
        "answers": [pair.told() for pair in run],
    }


def _prompt(llm: LLM, case: Case) -> tuple[list[int], list[tuple[int, int]]]:
    how = BlendParams(separator=SEPARATOR)
    tokens, blend = chat_prompt(llm.text, [{"role": "user", "content": case.text}], how)
    assert blend is not None
    return tokens, blend.chunks


def _answer(llm: LLM, tokens: list[int], blend: Blend | None, length: int) -> RequestOutput:
    return llm.generate([tokens], _greedy(length), blend=blend)[0]


def _whole(llm: LLM, tokens: list[int], length: int) -> RequestOutput:
    """The answer to a prompt of which nothing is cached: a salt of its own hides it from others, and others from it."""
    request = prepare(tokens, _greedy(length), text=llm.text, info=llm.info, salt=secrets.token_hex(8))
    return llm.collect([tokens], [request])[0]


def _greedy(length: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=length, logprobs=MAX_LOGPROBS, seed=0)


def _ttft(output: RequestOutput) -> float:
    return output.times.first_token - output.times.submitted


def _right(case: Case, output: RequestOutput) -> bool:
    return case.answer in output.outputs[0].text


def _divergence(true: TokenLogprobs, other: TokenLogprobs) -> float:
    """Kullback-Leibler divergence over the tokens that are listed as likeliest; those that the other does not list
    count as likely as its last, at most."""
    theirs = dict(zip(other.top_ids, other.top_logprobs, strict=True))
    least = min(other.top_logprobs)
    pairs = zip(true.top_ids, true.top_logprobs, strict=True)
    return sum(math.exp(p) * (p - theirs.get(token, least)) for token, p in pairs)


def rows(found: dict[str, Any]) -> list[tuple[str, ...]]:
    lines: list[tuple[str, ...]] = [
        ("recomputed", "TTFT / full", "same first token", "same next token", "KL divergence", "right answers"),
        ("full", "1.00", "100%", "100%", "0", f"{found['right']:.1%}"),
    ]
    for run in found["runs"].values():
        same = (f"{run['same_first']:.1%}", f"{run['same']:.1%}")
        lines.append(
            (f"{run['recomputed']:.1%}", f"{run['ttft']:.2f}", *same, f"{run['divergence']:.4f}", f"{run['right']:.1%}")
        )
    return lines
