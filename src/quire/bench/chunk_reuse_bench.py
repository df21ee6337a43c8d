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
EVERY = 8  # tokens of an answer between places that are compared
FRACTIONS = (0.0, 0.15, 0.3, 1.0)
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

    @property
    def text(self) -> str:
        """With separators around the documents."""
        return SEPARATOR.join((HEAD, *self.documents, f"Question: {self.question}"))


def cases(count: int, *, documents: int, chosen: int, seed: int = 0) -> tuple[list[Case], list[list[str]]]:
    """Prompts about `chosen` of so many documents each, in any order; and all documents in lots of as many."""
    rng = Random(seed)
    library = [_document(rng) for _ in range(documents)]
    found = []
    for _ in range(count):
        some = rng.sample(library, chosen)
        question, answer = rng.choice(rng.choice(some)[1])
        found.append(Case([text for text, _ in some], question, answer))
    texts = [text for text, _ in library]
    return found, [texts[i : i + chosen] for i in range(0, documents, chosen)]


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


def measure(
    llm: LLM,
    count: int,
    *,
    documents: int = 12,
    chosen: int = 6,
    answer: int = ANSWER,
    fractions: tuple[float, ...] = FRACTIONS,
) -> dict[str, Any]:
    """Every prompt computed whole, then with its documents reused and each part of them computed again."""
    work, lots = cases(count, documents=documents, chosen=chosen)
    prompts = [_prompt(llm, case) for case in work]
    warming = [_prompt(llm, Case(lot, work[0].question, "")) for lot in lots]
    _answer(llm, prompts[0][0][:64], None, answer)  # whatever is slow only once
    whole = []
    for tokens, _ in prompts:
        llm.reset()
        whole.append(_answer(llm, tokens, None, answer))
    full = mean(_ttft(output) for output in whole)
    found: dict[str, Any] = {
        "prompts": count,
        "prompt_tokens": mean(len(tokens) for tokens, _ in prompts),
        "ttft": full,
        "right": mean(_right(c, o) for c, o in zip(work, whole, strict=True)),
        "runs": {},
    }
    for part in fractions:
        llm.reset()
        first = [(_whole(llm, tokens), _answer(llm, tokens, Blend(chunks, part), 1)) for tokens, chunks in warming]
        how = [(tokens, Blend(chunks, part)) for tokens, chunks in prompts]
        pairs = [(_whole(llm, tokens), _answer(llm, tokens, blend, answer)) for tokens, blend in how]
        blended = [output for _, output in pairs]
        stats = llm.stats()
        places = [_places(llm, *p, part, w, b) for p, w, b in zip(prompts, whole, blended, strict=True)]
        found["runs"][str(part)] = {
            "first_time": median(_ttft(output) / seconds for seconds, output in first),
            "ttft": median(_ttft(output) / seconds for seconds, output in pairs),
            "reused": stats.blended_tokens / stats.prompt_tokens,
            "same": mean(w.token == b.token for pairs in places for w, b in pairs),
            "divergence": mean(_divergence(w, b) for pairs in places for w, b in pairs),
            "right": mean(_right(c, o) for c, o in zip(work, blended, strict=True)),
        }
    return found


def _prompt(llm: LLM, case: Case) -> tuple[list[int], list[tuple[int, int]]]:
    how = BlendParams(separator=SEPARATOR)
    tokens, blend = chat_prompt(llm.text, [{"role": "user", "content": case.text}], how)
    assert blend is not None
    return tokens, blend.chunks


def _answer(llm: LLM, tokens: list[int], blend: Blend | None, length: int) -> RequestOutput:
    params = SamplingParams(temperature=0.0, max_tokens=length, logprobs=MAX_LOGPROBS, seed=0, ignore_eos=True)
    return llm.generate([tokens], params, blend=blend)[0]


def _whole(llm: LLM, tokens: list[int]) -> float:
    """Seconds to the first token of a prompt of which nothing is cached, now: beside what it is compared with, because
    a machine is not always equally fast. A salt of its own hides it from others, and others from it."""
    params = SamplingParams(temperature=0.0, max_tokens=1, seed=0)
    request = prepare(tokens, params, text=llm.text, info=llm.info, salt=secrets.token_hex(8))
    (output,) = llm.collect([tokens], [request])
    return _ttft(output)


def _places(
    llm: LLM, tokens: list[int], chunks: list[tuple[int, int]], part: float, whole: RequestOutput, own: RequestOutput
) -> list[tuple[TokenLogprobs, TokenLogprobs]]:
    """What follows some beginnings of the whole prompt's answer, after the whole prompt and after the blended one."""
    answer = whole.outputs[0]
    places = range(EVERY, len(answer.token_ids), EVERY)
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=MAX_LOGPROBS, seed=0)
    begun = [tokens + answer.token_ids[:place] for place in places]
    outputs = [own, *llm.generate(begun, params, blend=Blend(chunks, part))]
    assert answer.logprobs is not None
    return [
        (answer.logprobs[place], output.outputs[0].logprobs[0])
        for place, output in zip((0, *places), outputs, strict=True)
        if output.outputs[0].logprobs
    ]


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
        ("recomputed", "TTFT / full", "first time", "same token next", "KL divergence", "right answers"),
        ("full", "1.00", "1.00", "100%", "0", f"{found['right']:.0%}"),
    ]
    for part, run in found["runs"].items():
        times = (f"{run['ttft']:.2f}", f"{run['first_time']:.2f}")
        agreement = (f"{run['same']:.1%}", f"{run['divergence']:.4f}", f"{run['right']:.0%}")
        lines.append((f"{float(part):.0%}", *times, *agreement))
    return lines
