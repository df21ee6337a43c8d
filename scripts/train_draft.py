"""Train draft heads on a model's own answers: Medusa-type heads, an EAGLE-type drafter, or both.

    python scripts/train_draft.py --eagle eagle.safetensors
    quire run --speculation eagle:eagle.safetensors

The model answers prompts (`draft_prompts.py`: put your own there); tokens and the hidden states they were drawn from
are recorded as they come, and a small network learns to go on from them. Answers about held-out topics tell how
well. A GPU takes minutes for thousands of prompts, a CPU for hundreds.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from draft_prompts import prompts, topics
from torch.nn.utils.rnn import pad_sequence

from quire.assets import resolve
from quire.engine.link import LocalLink, open_link
from quire.engine.text_input import prepare
from quire.generation.drafting.head_proposers import Recorder
from quire.generation.drafting.heads import WINDOW_TOKENS, EagleDrafter, Heads, MedusaHeads, save_heads
from quire.text import TextModel
from quire.types.config import EngineOptions
from quire.types.messages import Events, Submit
from quire.types.sampling_params import SamplingParams

LOSS_WEIGHTS = (1.0, 0.8, 0.64, 0.51, 0.41)  # by how many tokens ahead
MEDUSA_HEADS = 3
LOGIT_SCALE = 0.3  # at the start: directions come first, confidence is to be earned
HELD_OUT_SHARE = 16  # one topic of so many is held out


@dataclass
class Answer:
    tokens: torch.Tensor  # [n]
    hidden: torch.Tensor  # [n, (layers + 1) hidden]: what each was sampled from, the last hidden state at the end


@dataclass
class Records:
    answers: list[Answer]  # to learn from
    held_out: list[Answer]
    head: torch.Tensor  # the model's own, [vocabulary, hidden]
    layers: tuple[int, ...]  # after which hidden states were recorded, besides the last


def record(options: EngineOptions, count: int, length: int, seed: int) -> Records:
    rng, about = random.Random(seed), topics()
    rng.shuffle(about)
    cut = len(about) // HELD_OUT_SHARE
    asks = prompts(rng, count, about[cut:])
    learned = len(asks)
    asks += prompts(rng, max(8, count // 50), about[:cut])
    link = open_link(options, process=False)
    assert isinstance(link, LocalLink)
    text, recorder, executor = TextModel.load(resolve(options.model.model)), Recorder(), link.core.executor
    layers = depths(len(executor.model.spec.layers))
    executor.watch(recorder, layers)
    for number, ask in enumerate(asks):
        params = SamplingParams(temperature=0, max_tokens=length)
        prompt = text.encode_chat([{"role": "user", "content": ask}])
        link.send(Submit(prepare(prompt, params, text=text, info=link.info, request_id=str(number))))
    left = len(asks)
    while left:
        for message in link.receive(None):
            if isinstance(message, Events):
                left -= sum(event.finish is not None for event in message.events)
    head = head_of(executor.model)
    link.close()
    found: tuple[list[Answer], list[Answer]] = [], []
    for key, (tokens, states) in recorder.answers.items():
        if len(tokens) > 8:
            hidden, held_out = torch.cat(states), int(key.partition("/")[0]) >= learned
            found[held_out].append(Answer(torch.tensor(tokens, device=hidden.device), hidden))
    return Records(*found, head, layers)


def depths(layers: int) -> tuple[int, ...]:
    """An early and a middle layer; the last hidden state is recorded anyway."""
    return tuple(sorted({min(2, layers - 1), layers // 2}))


@torch.inference_mode()
def head_of(model: Any) -> torch.Tensor:
    unit = torch.eye(model.spec.hidden, device=model.device, dtype=model.dtype)
    return model.logits(unit).float().T.contiguous()


class Lesson:
    """Some answers, side by side, and what the model itself thinks comes at each of their positions."""

    def __init__(self, batch: list[Answer], heads: Heads, teacher: torch.Tensor):
        self.tapped = pad_sequence([a.hidden for a in batch], batch_first=True).float()  # [n, t, ...]
        self.hidden = self.tapped[..., -teacher.shape[1] :]
        self.tokens = pad_sequence([a.tokens for a in batch], batch_first=True)
        self.places = heads.words.places[self.tokens]  # of the tokens among the words
        self.at = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        self.lengths = torch.tensor([len(a.tokens) for a in batch], device=self.tokens.device)
        with torch.no_grad():
            self._thought = (self.hidden @ teacher.T).softmax(-1)  # [n, t, words]

    def there(self, distance: int) -> torch.Tensor:
        """Which positions have one so many places on, [n, t - distance]."""
        return self.at[distance:] < self.lengths[:, None]

    def loss(self, logits: torch.Tensor, distance: int) -> torch.Tensor:
        """Cross-entropy of drafts so many tokens ahead with the model's own distribution."""
        wrong = -(self._thought[:, distance:] * logits[:, :-distance].float().log_softmax(-1)).sum(-1)
        there = self.there(distance)
        return (wrong * there).sum() / there.sum()

    def right(self, logits: torch.Tensor, distance: int) -> torch.Tensor:
        """Which drafts are what the model sampled, [n, t]."""
        right = torch.zeros_like(self.tokens, dtype=torch.bool)
        right[:, :-distance] = (logits[:, :-distance].argmax(-1) == self.places[:, distance:]) & self.there(distance)
        return right

    def ahead(self, distance: int) -> torch.Tensor:
        """The token so many places on; any, beyond the end."""
        return self.tokens.roll(-distance, 1)


def draft_logits(heads: Heads, lesson: Lesson) -> Iterator[torch.Tensor]:
    """Logits [n, t, words] of the tokens one position ahead, two, and so forth."""
    return iter(heads(lesson.hidden, lesson.tokens)) if isinstance(heads, MedusaHeads) else eagle(heads, lesson)


def eagle(drafter: EagleDrafter, lesson: Lesson) -> Iterator[torch.Tensor]:
    """As it will be used: after the first token it reads its own states, not the model's."""
    apart = lesson.at[:, None] - lesson.at
    seen = ((apart >= 0) & (apart < WINDOW_TOKENS))[None]
    joined, trail = drafter.inputs(drafter.features(lesson.tapped), lesson.tokens)
    own: list[torch.Tensor] = []
    for depth in range(len(LOSS_WEIGHTS)):
        state = drafter(joined, trail, (apart + depth).clamp(0, WINDOW_TOKENS + depth), seen, own)
        yield drafter.logits(state)
        joined, entries = drafter.inputs(state, lesson.ahead(depth + 1))
        own.append(entries)


def build(kind: str, records: Records, words: int) -> Heads:
    counts = Counter(token for a in records.answers for token in a.tokens.tolist())
    ids = torch.tensor(sorted(token for token, _ in counts.most_common(words)))
    known = sum(count for _, count in counts.most_common(words)) / sum(counts.values())
    vocab, hidden = records.head.shape
    shown = torch.cat([a.hidden for a in records.answers[:256]]).float().unflatten(-1, (-1, hidden))
    shown = shown / (loud := shown.square().mean(-1, keepdim=True).sqrt())
    even = 1 / shown.square().mean(0).sqrt()  # [layers + 1, hidden]: brings all numbers of a state to the same size
    heads: Heads
    if kind == "medusa":
        heads = MedusaHeads(hidden, len(ids), vocab, MEDUSA_HEADS)
        norms, out = heads.norms[:1], heads.norms[2]
        even = even[-1:]
    else:
        heads = EagleDrafter(hidden, len(ids), vocab, heads=8 if hidden % 8 == 0 else 1, layers=records.layers)
        norms, out = heads.depths, heads.norms[4]
    with torch.no_grad():
        for norm, weight in zip(norms, even, strict=True):
            norm.weight.copy_(weight)
        out.weight.fill_(LOGIT_SCALE * float(loud[:, -1].mean()))  # in proportion to the model's own logits
    heads.words.ids.copy_(ids)
    heads.words.index()
    with torch.no_grad():
        heads.words.head.weight.copy_(records.head[ids])
        heads.words.embed[:-1] = records.head[ids]
    # The model's own words need no learning, and a few answers would only spoil them.
    heads.words.requires_grad_(False)
    size = sum(p.numel() for p in heads.parameters()) / 1e6
    print(f"{kind}: {size:.1f}M weights, words cover {known:.1%}", flush=True)
    return heads.to(records.head.device)


def batches(answers: list[Answer], positions: int) -> Iterator[list[Answer]]:
    batch: list[Answer] = []
    for answer in answers:
        batch.append(answer)
        if len(batch) * max(len(a.tokens) for a in batch) >= positions:
            yield batch
            batch = []
    if batch:
        yield batch


def train(
    heads: Heads, answers: list[Answer], *, epochs: int, rate: float, positions: int, seed: int
) -> Iterator[float]:
    """Goes once through the answers for every mean loss it yields."""
    rng, answers, teacher = random.Random(seed), list(answers), heads.words.head.weight
    steps = epochs * (1 + sum(1 for _ in batches(answers, positions)))
    optimizer = torch.optim.AdamW([p for p in heads.parameters() if p.requires_grad], lr=rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps + 1, pct_start=0.1)
    for _ in range(epochs):
        rng.shuffle(answers)
        losses = []
        for batch in batches(answers, positions):
            lesson = Lesson(batch, heads, teacher)
            with torch.autocast("cuda", torch.bfloat16, enabled=teacher.is_cuda):
                parts = [
                    weight * lesson.loss(logits, i + 1)
                    for i, (weight, logits) in enumerate(zip(LOSS_WEIGHTS, draft_logits(heads, lesson), strict=False))
                ]
            loss = torch.stack(parts).sum()
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(heads.parameters(), 1.0)
            optimizer.step()
            if schedule.last_epoch < steps:
                schedule.step()
            losses.append(loss.detach())
        yield float(torch.stack(losses).mean())


@torch.no_grad()
def examine(heads: Heads, answers: list[Answer], positions: int) -> list[float]:
    """How often the first draft token is right, the first two, and so forth."""
    found, total = torch.zeros(len(LOSS_WEIGHTS)), 0
    for batch in batches(answers, positions):
        lesson = Lesson(batch, heads, heads.words.head.weight)
        so_far = lesson.there(0)
        total += int(so_far.sum())
        for i, logits in enumerate(draft_logits(heads, lesson)):
            so_far = so_far & lesson.right(logits, i + 1)
            found[i] += int(so_far.sum())
    return [float(share) for share in found / total if share > 0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--medusa", metavar="FILE", help="train Medusa-type heads and write them here")
    parser.add_argument("--eagle", metavar="FILE", help="train an EAGLE-type drafter and write it here")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda: where the model answers and heads learn")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--length", type=int, default=160, help="longest answer")
    parser.add_argument("--seqs", type=int, default=None, help="answers at once")
    parser.add_argument("--kv-memory", default="512M")
    parser.add_argument("--words", type=int, default=4096, help="tokens it can draft")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--positions", type=int, default=512, help="of a training step")
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args()
    wanted = {kind: path for kind in ("medusa", "eagle") if (path := getattr(chosen, kind))}
    if not wanted:
        parser.error("say what to train: --medusa FILE, --eagle FILE or both")
    torch.manual_seed(chosen.seed)
    began = time.perf_counter()
    options = EngineOptions.of(
        model=chosen.model, device=chosen.device, dtype=chosen.dtype, max_seqs=chosen.seqs, kv_memory=chosen.kv_memory,
        max_waiting=2 * chosen.prompts + 100,
    )  # fmt: skip
    records = record(options, chosen.prompts, chosen.length, chosen.seed)
    tokens = sum(len(a.tokens) for a in records.answers)
    print(f"{len(records.answers)} answers, {tokens} tokens in {time.perf_counter() - began:.0f} s", flush=True)
    for kind, path in wanted.items():
        began = time.perf_counter()
        heads = build(kind, records, chosen.words)
        passes = train(heads, records.answers, epochs=chosen.epochs, rate=chosen.rate, positions=chosen.positions,
                       seed=chosen.seed)  # fmt: skip
        for epoch, loss in enumerate(passes):
            right = examine(heads, records.held_out, chosen.positions)
            shares, seconds = " ".join(f"{share:.1%}" for share in right), time.perf_counter() - began
            print(f"epoch {epoch + 1}: loss {loss:.3f}; right in a row on held-out topics {shares}: "
                  f"{1 + sum(right):.2f} tokens a step; {seconds:.0f} s", flush=True)  # fmt: skip
        save_heads(heads, path, {"model": chosen.model, "tokens": tokens})


if __name__ == "__main__":
    main()
