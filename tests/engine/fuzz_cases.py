"""Random engines and random requests for the combination fuzzer: a seed gives one case, the same one every time."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from typing import Any

import msgspec
from fuzz_models import CONTEXT, EOS, FuzzModel

from quire.types.beam import BeamParams
from quire.types.grammar import GrammarSpec
from quire.types.sampling_params import LEAST_PAGES, SamplingParams

STREAM = 2 * CONTEXT  # tokens of requests with a KV budget, on some engines
SCHEMA = {
    "type": "object",
    "properties": {"kv": {"type": "integer", "minimum": 0, "maximum": 99}, "the": {"enum": ["yes", "no", "xyz"]}},
    "required": ["kv", "the"],
    "additionalProperties": False,
}
GRAMMARS = [
    GrammarSpec("choice", json.dumps(["yes", "no", "the end", "xyz xyz xyz"])),
    GrammarSpec("regex", "(ab|cd){2,6}x?"),
    GrammarSpec("regex", "[a-f]{3,12} [0-9]{1,4}"),
    GrammarSpec("json_schema", json.dumps(SCHEMA)),
    GrammarSpec("lark", 'start: "the " ("abc" | "xyz")+ " queue" DIGIT\nDIGIT: /[0-9]+/'),
]


@dataclass
class Asked:
    """One request: what is asked for, when it is sent, after how many steps more it is aborted, if it is."""

    id: str
    prompt: list[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    beam: BeamParams | None = None
    pooling: str = ""
    at: int = 0
    abort: int | None = None
    resume: int = 0  # so many tokens of the answer have been drawn elsewhere
    priority: int = 0
    salt: str = ""
    session: str = ""
    lora: str = ""

    @property
    def told(self) -> dict[str, Any]:
        """What is not as it is by default."""
        values = {name: msgspec.to_builtins(value) for name, value in vars(self).items()}
        return {name: value for name, value in values.items() if value or (name == "abort" and value == 0)}


@dataclass
class Case:
    seed: int
    model: FuzzModel
    options: dict[str, Any]
    asked: list[Asked]

    def __str__(self) -> str:
        requests = "\n".join(f"  {one.told}" for one in self.asked)
        return f"seed {self.seed}, model {self.model.name}, options {self.options}\n{requests}"


def make_case(seed: int, models: dict[str, FuzzModel], disk: str) -> Case:
    """`disk`: where a disk tier may be."""
    rng = random.Random(seed)
    model = models[rng.choice(["compiled", "compiled", "compiled", "dense", "windows"])]
    options = _options(rng, model, disk)
    _policies(random.Random(f"policies/{seed}"), options)
    asked = _requests(rng, model, options)
    _adapters(random.Random(f"adapters {seed}"), model, options, asked)
    return Case(seed, model, options, asked)


def _policies(rng: random.Random, options: dict[str, Any]) -> None:
    """By draws of their own: what other seeds found stays what it was."""
    if options["scheduler"] == "fcfs" and rng.random() < 0.7:
        options["scheduler"] = rng.choice(["sjf", "srpt", "mlfq", "lpm", "slo", "fair", "auto"])
        wait = rng.choice([0.001, 0.1, 60.0])
        if options["scheduler"] != "fair":  # it needs no bound, and takes none
            options["max_wait"] = wait
        options["slo_ttft"] = rng.choice([0.001, 0.05, 100.0])
        options["slo_tpot"] = rng.choice([0.001, 0.5])


def _adapters(rng: random.Random, model: FuzzModel, options: dict[str, Any], asked: list[Asked]) -> None:
    if options["kv_dtype"] != "int8-kivi" and rng.random() < 0.4:
        options["lora"] = tuple(f"{name}={path}" for name, path in model.adapters.items())
        for one in asked:
            one.lora = rng.choice(["", *model.adapters])


def _options(rng: random.Random, model: FuzzModel, disk: str) -> dict[str, Any]:
    size = rng.choice([1, 2, 3, 4, 8, 16])
    scheduler = rng.choice(["fcfs", "fcfs", "priority", "priority", "static"])
    longest = STREAM if rng.random() < 0.3 and not model.windows else CONTEXT
    groups = 2 if model.windows else 1
    least = groups * -(-CONTEXT // size)
    seqs = rng.choice([1, 3, 5, 8, 8])
    options: dict[str, Any] = {
        "model": model.path,
        "page_size": size,
        "max_model_len": longest,
        "kv_pages": int(least * rng.choice([1, 1, 1, 1.2, 1.5, 4])),
        "kv_dtype": rng.choice(["auto", *model.kv_dtypes]),
        "max_seqs": seqs,
        "max_batch_tokens": max(seqs, rng.choice([1, 8, 17, 64, 256])),
        "depth": rng.choice([1, 1, 2, 3]),
        "scheduler": scheduler,
        "prefix_cache": rng.random() < 0.75,
        "threads": 1,
    }
    if rng.random() < 0.5:
        options["prefill_chunk"] = rng.choice([1, 3, 7, 16])
    if rng.random() < 0.3:
        options["step_target"] = rng.choice([0.001, 0.02, 0.2])
    if scheduler == "priority" and rng.random() < 0.5:
        options["ageing"] = rng.choice([0.01, 1.0, 1e6])
    if scheduler != "static" and options["prefix_cache"]:
        _tiers(rng, options, disk)
    return options | _speculation(rng, model)


def _tiers(rng: random.Random, options: dict[str, Any], disk: str) -> None:
    if rng.random() < 0.3:
        options["session_quota"] = rng.choice([0.0, 0.5, 1.0])
    which = rng.choice(["", "", "host", "host", "disk", "both"])
    if which in ("host", "both"):
        options["kv_host"] = rng.choice(["32K", "256K", "4M"])
    if which in ("disk", "both"):
        options["kv_disk"] = f"{disk}:{rng.choice(['256K', '4M'])}"
        options["kv_fsync"] = rng.random() < 0.2
    if which:
        options["kv_policy"] = rng.choice(["lru", "lfu", "cost"])
        options["preempt"] = rng.choice(["auto", "recompute", "swap", "swap"])


def _speculation(rng: random.Random, model: FuzzModel) -> dict[str, Any]:
    kinds = ["ngram", "suffix", f"draft:{model.path}", *(f"{kind}:{path}" for kind, path in model.heads.items())]
    if rng.random() < 0.4:
        return {}
    found: dict[str, Any] = {"speculation": rng.choice(kinds), "draft_adapt": rng.random() < 0.3}
    if rng.random() < 0.7:
        found["draft_tokens"] = rng.choice([1, 1, 2, 4, 8, 16])
    return found


def _requests(rng: random.Random, model: FuzzModel, options: dict[str, Any]) -> list[Asked]:
    stems = [[rng.randrange(EOS) for _ in range(rng.choice([8, 20, 32]))] for _ in range(2)]
    found: list[Asked] = []
    at = 0
    for i in range(rng.choice([4, 7, 10])):
        at += rng.choice([0, 0, 0, 1, 2, 12])
        tail = [rng.randrange(EOS) for _ in range(rng.choice([1, 2, 5, 16]))]
        stem = rng.choice([*stems, [*stems[0], *stems[0]][:50], []])
        repeated = (tail[:5] * 6)[:24] if rng.random() < 0.3 else []  # what drafters live on
        one = Asked(f"r{i}", [*stem[: rng.choice([len(stem), len(stem), len(stem) // 2])], *tail, *repeated], at=at)
        if options["scheduler"] == "priority":
            one.priority = rng.choice([0, 0, -2, 3])
        one.salt = rng.choice(["", "", "", "tenant"])
        if rng.random() < 0.15:
            one.session = rng.choice(["a", "b"])
        if rng.random() < 0.12:
            one.abort = rng.choice([0, 1, 3, 9, 20])
        kind = rng.choice(["sample"] * 8 + ["beam", "embed"])
        if kind == "embed":
            one.pooling = rng.choice(["mean", "last"])
        elif kind == "beam" and options["scheduler"] != "static":
            one.beam = _beam(rng)
        else:
            one.params = _params(rng, model, options, len(one.prompt))
            if one.params.n == 1 and not one.params.best_of and one.params.prompt_logprobs is None:
                one.resume = rng.choice([0, 0, 0, 0, 1, 7])
        found.append(one)
    return found


def _beam(rng: random.Random) -> BeamParams:
    beams = rng.choice([1, 2, 4])
    groups = 2 if beams > 1 and rng.random() < 0.3 else 1
    return BeamParams(
        beams=beams,
        n=rng.randint(1, beams),
        max_tokens=rng.choice([1, 3, 9]),
        length_penalty=rng.choice([1.0, 0.0, 2.0, -0.5]),
        early_stopping=rng.choice([True, False, "never"]),
        groups=groups,
        diversity=rng.choice([0.0, 0.7]) if groups > 1 else 0.0,
        stop_token_ids=rng.sample(range(EOS), rng.choice([0, 2])),
        ignore_eos=rng.random() < 0.3,
    )


def _params(rng: random.Random, model: FuzzModel, options: dict[str, Any], length: int) -> SamplingParams:
    chosen: dict[str, Any] = {
        "temperature": rng.choice([0.0, 0.0, 0.7, 1.0, 1.5]),
        "seed": rng.randrange(1 << 40),
        "max_tokens": rng.choice([1, 4, 12, 20, 30, 45]),
    }

    def sometimes(chance: float, **more: Any) -> None:
        if rng.random() < chance:
            chosen.update(more)

    sometimes(0.2, n=rng.choice([2, 3, 5]))
    sometimes(0.3, logprobs=rng.choice([0, 1, 5]))
    sometimes(0.25, prompt_logprobs=rng.choice([0, 3]))
    sometimes(0.2, top_p=rng.choice([0.3, 0.9]))
    sometimes(0.2, top_k=rng.choice([1, 4, 40]))
    sometimes(0.1, min_p=0.05)
    sometimes(0.2, repetition_penalty=rng.choice([0.8, 1.3]))
    sometimes(0.2, presence_penalty=rng.choice([-1.0, 0.8]))
    sometimes(0.2, frequency_penalty=rng.choice([-0.5, 1.2]))
    sometimes(0.15, logit_bias={rng.randrange(EOS): rng.choice([-100.0, -2.0, 3.0, 6.0]) for _ in range(3)})
    sometimes(0.15, bad_token_ids=[[rng.randrange(EOS)], [rng.randrange(EOS), rng.randrange(EOS)]])
    sometimes(0.3, stop=rng.choice([["a", "q"], ["yes", "2", "th"], ["x", '"']]), include_stop=rng.random() < 0.5)
    sometimes(0.2, stop_token_ids=rng.sample(range(EOS), 6))
    if rng.random() < 0.2:
        chosen["grammar"] = rng.choice(GRAMMARS)
    else:
        sometimes(0.4, ignore_eos=True)
        sometimes(0.2, min_tokens=rng.randint(0, chosen["max_tokens"]))
    if "n" in chosen and chosen["temperature"] > 0 and rng.random() < 0.4:
        chosen["best_of"] = chosen["n"]
        chosen["n"] = rng.randint(1, chosen["n"])
    if not model.windows and options["scheduler"] != "static" and rng.random() < 0.25:
        least = LEAST_PAGES * options["page_size"]
        chosen["kv_budget"] = rng.randint(least, min(CONTEXT, max(least, length + 10)))
        chosen["kv_eviction"] = rng.choice(["sinks", "snapkv", "h2o"])
        if options["max_model_len"] > CONTEXT:
            sometimes(0.5, max_tokens=min(90, options["max_model_len"] - length - 1))
    return SamplingParams(**chosen)
