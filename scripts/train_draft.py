"""Train draft heads on a model's own answers: Medusa-type heads, or an EAGLE-type drafter.

    python scripts/train_draft.py --kind eagle --out eagle.safetensors
    quire run --speculation eagle:eagle.safetensors

The model answers a few hundred prompts; tokens and the hidden states they were drawn from are recorded as they come,
and a small network learns to go on from them. Minutes on a CPU. `quire bench spec --workload chat` asks about topics
that are not among those trained on.
"""

from __future__ import annotations

import argparse
import itertools
import random
import time
from collections import Counter
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from quire.assets import resolve
from quire.bench.spec import edit
from quire.engine.inputs import prepare
from quire.engine.link import LocalLink, open_link
from quire.generation.head_proposers import Recorder
from quire.generation.heads import WINDOW, EagleDrafter, Heads, MedusaHeads, save_heads
from quire.text import TextModel
from quire.types.config import EngineOptions
from quire.types.sampling import SamplingParams
from quire.types.wire import Events, Submit

ASKS = (
    "Explain {} to a child.",
    "Write a short story about {}.",
    "What is interesting about {}?",
    "List five facts about {}.",
    "How did people come to know {}?",
    "Why do people like {}?",
)
TOPICS = (
    "horses apples the ocean gold castles dreams snow birds cheese ships gardens clouds wheels honey silk fire "
    "mountains fish roses clocks kites lamps forests dogs cats rice tea maps money sleep hats shoes doors windows "
    "planets sand rain thunder islands deserts whales spiders bread-making farming painting dance football swimming "
    "history numbers letters stones iron copper tigers elephants frogs butterflies onions potatoes lemons grapes sugar "
    "pepper soap candles bicycles cars planes boats roads towers schools markets libraries hospitals villages cities "
    "spring summer autumn night morning friendship courage patience laughter memory language writing cooking sewing"
)
UNSURE = 0.3  # directions are right from the start, confidence is to be earned
DEPTHS = (1.0, 0.8, 0.6, 0.5)  # what a wrong guess so far ahead weighs


@dataclass
class Answer:
    tokens: torch.Tensor  # [n]
    hidden: torch.Tensor  # [n, hidden]: what each was drawn from


def record(model: str, count: int, length: int, seed: int) -> tuple[list[Answer], torch.Tensor, int]:
    """Answers of the model, its head [vocab, hidden], and how many ids it knows."""
    rng = random.Random(seed)
    asks = [ask.format(topic) for ask, topic in itertools.product(ASKS, TOPICS.split())]
    chosen = rng.sample(asks, min(len(asks), count - count // 8)) + [edit(rng) for _ in range(count // 8)]
    link = open_link(EngineOptions.of(model=model, kv_memory="512M"), process=False)
    assert isinstance(link, LocalLink)
    text, recorder, executor = TextModel.load(resolve(model)), Recorder(), link.core.executor
    executor.watch(recorder)
    for ask in chosen:
        params = SamplingParams(temperature=0, max_tokens=length)
        prompt = text.encode_chat([{"role": "user", "content": ask}])
        link.send(Submit(prepare(prompt, params, text=text, info=link.info)))
    left = len(chosen)
    while left:
        for message in link.receive(None):
            if isinstance(message, Events):
                left -= sum(event.finish is not None for event in message.events)
    with torch.inference_mode():
        head = executor.model.logits(torch.eye(executor.model.spec.hidden)).float().T.contiguous()
    link.close()
    kept = [(tokens, states) for tokens, states in recorder.answers.values() if len(tokens) > 8]
    answers = [Answer(torch.tensor(tokens), torch.cat(states)) for tokens, states in kept]
    return answers, head, link.info.vocab_size


class Lesson:
    """A batch of positions, and what the model itself thinks comes at each of them."""

    def __init__(self, batch: list[Answer], teacher: torch.Tensor):
        self.hidden, self.tokens = torch.cat([a.hidden for a in batch]), torch.cat([a.tokens for a in batch])
        self.at = torch.cat([torch.arange(len(a.tokens)) for a in batch])
        self.left = torch.cat([torch.arange(len(a.tokens) - 1, -1, -1) for a in batch])
        self._thought = (self.hidden @ teacher.T).softmax(-1)  # [n, words]

    def loss(self, logits: torch.Tensor, distance: int) -> torch.Tensor:
        """How far a guess of the word so many places on is from the model's own mind, where there is one."""
        there = (self.left >= distance).nonzero().squeeze(-1)
        return F.cross_entropy(logits[there], self._thought[there + distance])

    def ahead(self, distance: int) -> torch.Tensor:
        """The token so many places on; any, beyond the end."""
        return self.tokens[(torch.arange(len(self.at)) + distance).clamp(max=len(self.at) - 1)]


def medusa_loss(heads: MedusaHeads, lesson: Lesson) -> torch.Tensor:
    guesses = zip(DEPTHS, heads(lesson.hidden, lesson.tokens), strict=False)
    return torch.stack([weight * lesson.loss(logits, i + 1) for i, (weight, logits) in enumerate(guesses)]).sum()


def eagle_loss(drafter: EagleDrafter, lesson: Lesson) -> torch.Tensor:
    """As it will be used: after the first token it reads its own states, not the model's."""
    back = torch.arange(WINDOW - 1, -1, -1)
    valid = lesson.at[:, None] >= back  # [n, WINDOW]
    joined, own = drafter.inputs(lesson.hidden, lesson.tokens)
    pages = own[(torch.arange(len(own))[:, None] - back).clamp(min=0)]
    losses = []
    for depth, weight in enumerate(DEPTHS):
        state = drafter(joined, pages, depth, valid)
        losses.append(weight * lesson.loss(drafter.logits(state), depth + 1))
        joined, entries = drafter.inputs(state, lesson.ahead(depth + 1))
        pages = torch.cat((pages, entries[:, None]), 1)
    return torch.stack(losses).sum()


def build(kind: str, answers: list[Answer], head: torch.Tensor, vocab: int, words: int) -> Heads:
    counts = Counter(token for a in answers for token in a.tokens.tolist())
    ids = torch.tensor(sorted(token for token, _ in counts.most_common(words)))
    hidden = head.shape[1]
    heads: Heads
    if kind == "medusa":
        heads = MedusaHeads(hidden, len(ids), vocab, 3)
        for block in heads.blocks:
            torch.nn.init.zeros_(block.weight)
    else:
        heads = EagleDrafter(hidden, len(ids), vocab, heads=8 if hidden % 8 == 0 else 1)
    heads.words.ids.copy_(ids)
    heads.words.index()
    with torch.no_grad():
        heads.words.head.weight.copy_(head[ids])
        heads.words.embed[:-1] = head[ids]
        if isinstance(heads, EagleDrafter):  # begins with the two simply added up
            heads.join.weight.copy_(torch.eye(hidden).repeat(1, 2) + 0.01 * torch.randn(hidden, 2 * hidden))
            heads.norms[4].weight.fill_(UNSURE)
        else:
            heads.norms[0].weight.fill_(UNSURE)
    # The model's own words need no learning, and a few answers would only spoil them.
    heads.words.requires_grad_(False)
    return heads


def train(
    heads: Heads, answers: list[Answer], *, epochs: int, rate: float, positions: int, seed: int
) -> None:
    rng, loss_of = random.Random(seed), medusa_loss if isinstance(heads, MedusaHeads) else eagle_loss
    total = sum(len(a.tokens) for a in answers)
    steps = epochs * total // positions + epochs
    teacher = heads.words.head.weight
    optimizer = torch.optim.AdamW([p for p in heads.parameters() if p.requires_grad], lr=rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps + 1, pct_start=0.1)
    began = time.perf_counter()
    for epoch in range(epochs):
        rng.shuffle(answers)
        losses, batch = [], []
        for number, answer in enumerate(answers):
            batch.append(answer)
            if sum(len(a.tokens) for a in batch) < positions and number + 1 < len(answers):
                continue
            loss = loss_of(heads, Lesson(batch, teacher))  # type: ignore[arg-type]
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(heads.parameters(), 1.0)
            optimizer.step()
            if schedule.last_epoch < steps:
                schedule.step()
            losses.append(loss.item())
            batch = []
        mean, seconds = sum(losses) / len(losses), time.perf_counter() - began
        print(f"epoch {epoch + 1}: loss {mean:.3f}, {seconds:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=("medusa", "eagle"), required=True)
    parser.add_argument("--out", required=True, help="safetensors file to write")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--length", type=int, default=128, help="longest answer")
    parser.add_argument("--words", type=int, default=4096, help="words it can guess")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--positions", type=int, default=256, help="of a training step")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    began = time.perf_counter()
    answers, head, vocab = record(options.model, options.prompts, options.length, options.seed)
    tokens = sum(len(a.tokens) for a in answers)
    print(f"{len(answers)} answers, {tokens} tokens in {time.perf_counter() - began:.0f} s", flush=True)
    heads = build(options.kind, answers, head, vocab, options.words)
    train(heads, answers, epochs=options.epochs, rate=options.rate, positions=options.positions, seed=options.seed)
    save_heads(heads, options.out, {"model": options.model, "tokens": tokens})


if __name__ == "__main__":
    torch.manual_seed(1)
    main()
