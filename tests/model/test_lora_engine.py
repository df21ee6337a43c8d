"""LoRA under the engine: greedy answers are those of merged weights, whatever else goes on; KV is an adapter's own."""

from __future__ import annotations

import copy

import pytest
from lora_writer import merge, write_adapter
from tiny_engine import GREEDY, TOKENS, Engine
from tiny_models import prompts, tiny

from quire.types.beam import BeamParams
from quire.types.errors import ConfigError, InputError, ModelFileError, ModelNotFoundError, OverloadedError
from quire.types.request import Request
from quire.types.sampling_params import SamplingParams

ASKED = prompts(33, 21, 33, 5)
WHOSE = ["a", "b", "", "a"]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """(directory, base, two adapters) with the adapters merged beside them, as models of their own."""
    root, theirs = tmp_path_factory.mktemp("lora"), tiny("llama3")
    theirs.save_pretrained(root / "base")
    for name, rank in (("a", 4), ("b", 7)):
        write_adapter(root / name, theirs, r=rank, seed=rank)
        merged = copy.deepcopy(theirs)
        merge(merged, root / name)
        merged.save_pretrained(root / f"merged-{name}")
    return root


@pytest.fixture(scope="module")
def wanted(files):
    """Answers of the merged models, each prompt alone."""
    engines = {name: Engine(files / (f"merged-{name}" if name else "base"), kv_pages=200) for name in ("", "a", "b")}
    found = [engines[name].answers([prompt])[0] for name, prompt in zip(WHOSE, ASKED, strict=True)]
    assert engines["a"].answers([ASKED[2]])[0] != found[2]
    return found


def engine(files, **options):
    lora = [f"{name}={files / name}" for name in ("a", "b")]
    return Engine(files / "base", **{"kv_pages": 200, "lora": lora} | options)


def test_adapters_in_one_batch(files, wanted):
    made = engine(files)
    for i, (prompt, name) in enumerate(zip(ASKED, WHOSE, strict=True)):
        assert made.answers([prompt], lora=[name]) == [wanted[i]]
    assert made.answers(ASKED, lora=WHOSE) == wanted
    assert made.answers(ASKED, lora=WHOSE, preempt=5) == wanted
    assert made.core.scheduler.stats.preemptions >= 4


@pytest.mark.parametrize(
    "options",
    [
        {"kv_pages": 36},
        {"prefill_chunk": 7},
        {"depth": 2},
        {"speculation": "ngram", "draft_adapt": False},
        {"speculation": "draft", "draft_adapt": False},
    ],
    ids=lambda options: " ".join(map(str, options.items())),
)
def test_answers_do_not_depend_on_how_they_are_computed(files, wanted, options):
    if options.get("speculation") == "draft":
        options = options | {"speculation": f"draft:{files / 'base'}"}
    made = engine(files, **options)
    assert made.answers(ASKED, lora=WHOSE) == wanted
    if "speculation" in options:
        assert made.core.scheduler.stats.drafted_tokens > 0


def test_prefixes_are_an_adapters_own(files, wanted):
    made = engine(files)
    prompt = ASKED[0]
    alone = [Engine(files / name, kv_pages=200).answers([prompt])[0] for name in ("merged-a", "merged-b", "base")]
    assert made.answers([prompt] * 3, lora=["a", "b", ""]) == alone
    assert made.core.scheduler.stats.cached_tokens == 0
    assert made.answers([prompt] * 3, lora=["b", "", "a"]) == [alone[1], alone[2], alone[0]]
    assert made.core.scheduler.stats.cached_tokens == 3 * (len(prompt) - 1)


def test_no_salt_of_a_callers_reaches_an_adapters_pages(files):
    """Pages that the base computed under a salt like those of an adapter's requests are not that adapter's."""
    made, alone = engine(files), Engine(files / "merged-a", kv_pages=200).answers(ASKED[:1])
    digest = made.core.adapters.resolved(Request(id="x", prompt=[1], params=GREEDY, lora="a")).salt
    made.core.submit(Request(id="x", prompt=ASKED[0], params=GREEDY, salt=digest))
    while made.core.busy:
        made.core.step()
    assert made.answers(ASKED[:1], lora=["a"]) == alone
    assert made.core.scheduler.stats.cached_tokens == 0


def test_branches_and_beams(files):
    sampled = SamplingParams(temperature=0.9, seed=3, n=3, max_tokens=TOKENS, ignore_eos=True)
    beams = BeamParams(beams=3, n=2, max_tokens=8, ignore_eos=True)
    search = SamplingParams(n=2, temperature=0, max_tokens=8, ignore_eos=True, logprobs=6)
    made, merged = engine(files), Engine(files / "merged-a", kv_pages=200)
    assert made.answers(ASKED[:1], params=sampled, lora=["a"]) == merged.answers(ASKED[:1], params=sampled)
    assert made.answers(ASKED[:1], params=search, beam=beams, lora=["a"]) == merged.answers(
        ASKED[:1], params=search, beam=beams
    )


def test_tiers_keep_adapters_apart_over_a_restart(files, wanted, tmp_path):
    """On disk, pages of another adapter that has the same name now are not found, those of the same one are."""
    disk = {"kv_disk": str(tmp_path / "kv"), "kv_pages": 200}
    made = engine(files, **disk)
    assert made.answers(ASKED, lora=WHOSE) == wanted
    made.core.close()
    again = engine(files, **disk)
    assert again.answers(ASKED, lora=WHOSE) == wanted
    assert again.core.scheduler.stats.cached_tokens >= 3 * 16
    again.core.close()
    swapped = Engine(files / "base", lora=[f"a={files / 'b'}", f"b={files / 'a'}"], **disk)
    assert swapped.answers(ASKED, lora=[{"a": "b", "b": "a"}.get(name, "") for name in WHOSE]) == wanted
    assert swapped.core.scheduler.stats.cached_tokens >= 3 * 16
    swapped.core.close()


def test_unloading_waits_for_those_that_run_with_it(files, wanted):
    made = engine(files, max_loras=2)
    core = made.core
    core.submit(Request(id="x", prompt=ASKED[0], params=GREEDY, lora="a"))
    said = [token for _ in range(8) for event in core.step() for token in event.tokens]
    core.unload_adapter("a")
    with pytest.raises(ModelNotFoundError, match="'a'"):
        core.submit(Request(id="y", prompt=ASKED[0], params=GREEDY, lora="a"))
    with pytest.raises(OverloadedError, match="1 of them by adapters that were unloaded"):
        core.load_adapter("c", str(files / "b"))
    while core.busy:
        said += [token for event in core.step() for token in event.tokens]
    assert said == wanted[0]
    core.load_adapter("a", str(files / "b"))  # another one by that name: none of the first one's pages are its
    assert made.answers([ASKED[1], ASKED[1]], lora=["a", "b"]) == [wanted[1]] * 2
    assert [one.name for one in core.adapters.list()] == ["b", "a"]


def test_weights_with_adapters_are_not_given_up(files, wanted):
    """At level 1 they stay; at level 2, which loads the base again, they would be lost."""
    made = engine(files)
    made.core.power(asleep=True)
    assert made.answers(ASKED, lora=WHOSE) == wanted
    for level in (0, 1):  # awake, and asleep at level 1: a refusal changes neither
        with pytest.raises(ConfigError, match="unload them, or sleep at level 1"):
            made.core.power(asleep=True, level=2)
        assert made.core.stats().sleep_level == level
        made.core.power(asleep=True)
    assert made.answers(ASKED, lora=WHOSE) == wanted
    for name in ("a", "b"):
        made.core.unload_adapter(name)
    made.core.power(asleep=True, level=2)
    made.core.load_adapter("b", str(files / "b"))
    assert made.answers(ASKED[1:3], lora=WHOSE[1:3]) == wanted[1:3]


def test_what_cannot_be_loaded_is_refused(files, tmp_path):
    made = engine(files, max_loras=3, max_lora_rank=7)
    for name, path, error, why in [
        ("a", files / "a", InputError, "loaded already"),
        ("", files / "a", InputError, "needs a name"),
        ("c", tmp_path, ModelFileError, "holds no LoRA adapter"),
        ("c", write_adapter(tmp_path / "wide", tiny("llama3"), r=8), ConfigError, "max_lora_rank"),
    ]:
        with pytest.raises(error, match=why):
            made.core.load_adapter(name, str(path))
    made.core.load_adapter("c", str(files / "a"))
    with pytest.raises(InputError, match="max_loras"):
        made.core.load_adapter("d", str(files / "a"))
    with pytest.raises(InputError, match="start it with max_loras"):
        Engine(files / "base", kv_pages=200).core.load_adapter("a", str(files / "a"))
    for options, why in [
        ({"max_loras": 1}, "allows 1"),
        ({"lora": ["a=x", "a=y"]}, "two adapters 'a'"),
        ({"lora": ["a"]}, "NAME=PATH"),
        ({"kv_dtype": "int8-kivi"}, "int8-kivi"),
    ]:
        with pytest.raises(ConfigError, match=why):
            engine(files, **options)


def test_the_compiled_decoder_has_adapters_too(tmp_path):
    theirs = tiny("block-sized")
    theirs.save_pretrained(tmp_path / "base")
    for name in ("a", "b"):
        write_adapter(tmp_path / name, theirs, r=5, seed=ord(name))
    options = {"dtype": "auto", "speculation": "ngram", "draft_adapt": False}
    made = engine(tmp_path, **options)
    assert "compiled" in " ".join(made.core.executor.describe().reasons)
    alone = [made.answers([prompt], lora=[name])[0] for prompt, name in zip(ASKED, WHOSE, strict=True)]
    assert alone[2] == Engine(tmp_path / "base", dtype="auto", kv_pages=200).answers([ASKED[2]])[0]
    assert alone[0] != made.answers([ASKED[0]])[0] != alone[1]
    assert engine(tmp_path, **options).answers(ASKED, lora=WHOSE, preempt=5) == alone
