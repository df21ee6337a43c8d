"""Options are checked when they are given: every one of them, by Python, by the command line and for a server alike."""

import dataclasses
import math
from typing import get_args, get_type_hints

import pytest
from typer.testing import CliRunner

from quire import LLM
from quire.cli.main import app
from quire.runtime.hardware import Hardware, resolve
from quire.scheduling import POLICIES
from quire.types.config import CONCERNS, EngineOptions, flat_fields
from quire.types.errors import ConfigError
from quire.types.serving import ServeOptions

OPTIONS = [(kind, field) for kind in (*CONCERNS, ServeOptions) for field in dataclasses.fields(kind)]
WRONG = {bool: ["no", 1, None], int: ["4", 4.0, True, math.nan], float: ["4", True, math.nan], str: [4, b"m", ""]}


def kinds(owner, field):
    hint = get_type_hints(owner)[field.name]
    return get_args(hint) or (hint,)


def wrong_types():
    for owner, field in OPTIONS:
        first, *rest = kinds(owner, field)
        for value in (*WRONG[first], *(() if type(None) in rest else (None,))):
            yield pytest.param(owner, field.name, value, id=f"{field.name}={value!r}")


def out_of_range():
    for owner, field in OPTIONS:
        takes, whole = field.metadata["takes"], int in kinds(owner, field)
        values = [takes.low - 1] if takes.low is not None else []
        values += [takes.above, -1] if takes.above is not None else []
        values += [takes.high + 1] if takes.high is not None else []
        values += [*(f"x{form}" for form in takes.forms if not {":", "="} & set(form))] if takes.forms else []
        values += ["lots", "-1G"] if takes.size else ["folder:lots", "folder:0"] if takes.sized else []
        for value in values:
            yield pytest.param(owner, field.name, int(value) if whole else value, id=f"{field.name}={value!r}")


@pytest.mark.parametrize(("owner", "name", "value"), [*wrong_types(), *out_of_range()])
def test_what_an_option_does_not_take_is_refused_by_its_name(owner, name, value):
    with pytest.raises(ConfigError, match=f"^{name} must"):
        owner(**{name: value})
    if owner is not ServeOptions:
        with pytest.raises(ConfigError, match=f"^{name} "):
            EngineOptions.of(**{name: value})


def test_every_number_has_a_range_and_every_default_is_in_it():
    for owner, field in OPTIONS:
        takes = field.metadata["takes"]
        if {int, float} & set(kinds(owner, field)):
            assert takes.low is not None or takes.above is not None, field.name
        if field.default is not None:
            assert takes.problem(field.default) == "", field.name


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"ageing": 0, "scheduler": "priority"}, "ageing"),
        ({"prefill_chunk": -8}, "prefill_chunk"),
        ({"threads": -2}, "threads"),
        ({"max_waiting": -1}, "max_waiting"),
        ({"session_quota": -0.5}, "session_quota"),
        ({"session_quota": 1.5}, "session_quota"),
        ({"kv_policy": "fifo", "kv_host": "1M"}, "kv_policy"),
        ({"kv_pages": 0}, "kv_pages"),
        ({"step_target": math.inf}, "step_target"),
        ({"max_wait": math.inf}, "max_wait"),
        ({"depth": 0}, "depth"),
        ({"max_seqs": 0}, "max_seqs"),
        ({"speculation": "ngram", "draft_tokens": 0}, "draft_tokens"),
        ({"speculation": "draft"}, "speculation"),
        ({"speculation": "ngram:4"}, "speculation"),
        ({"device": "cuda:x"}, "device"),
        ({"kv_remote": "http://there"}, "kv_remote"),
    ],
    ids=str,
)
def test_they_were_taken_in_silence(options, named):
    with pytest.raises(ConfigError, match=f"^{named} "):
        LLM(**options)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"kv_pages": 64, "kv_memory": "1G"}, "kv_pages has no effect beside kv_memory"),
        ({"kv_fsync": True}, "kv_fsync has no effect without kv_disk"),
        ({"kv_fsync": True, "kv_host": "1G"}, "kv_fsync has no effect without kv_disk"),
        ({"kv_policy": "lfu"}, "kv_policy has no effect without kv_host or kv_disk"),
        ({"kv_policy": "cost", "kv_remote": "redis://there/0"}, "kv_policy has no effect without"),
        ({"preempt": "swap"}, "preempt swap has no effect without kv_host or kv_disk or kv_remote"),
        *(
            ({"max_wait": 5.0, "scheduler": name}, f"max_wait has no effect beside scheduler {name}")
            for name in ("fcfs", "priority", "fair", "static")
        ),
        ({"ageing": 3.0}, "ageing has no effect without scheduler"),
        ({"ageing": 3.0, "scheduler": "static"}, "ageing has no effect beside scheduler static"),
        ({"kv_host": "1G", "prefix_cache": False}, "kv_host has no effect beside prefix_cache off"),
        ({"kv_disk": "kv", "scheduler": "static"}, "kv_disk has no effect beside scheduler static"),
        ({"session_quota": 0.5, "prefix_cache": False}, "session_quota has no effect beside prefix_cache off"),
        ({"session_quota": 0.5, "scheduler": "static"}, "session_quota has no effect beside scheduler static"),
        ({"draft_tokens": 4}, "draft_tokens has no effect without speculation"),
        ({"draft_adapt": False}, "draft_adapt has no effect without speculation"),
    ],
    ids=str,
)
def test_pairs_without_effect(options, named):
    with pytest.raises(ConfigError, match=f"^{named}"):
        LLM(**options)
    flags = [word for name, value in options.items() for word in flag(name, value)]
    said = CliRunner().invoke(app, ["run", "smollm2-135m", "hello", *flags])
    assert isinstance(said.exception, ConfigError) and named in str(said.exception)


def flag(name, value):
    name = name.replace("_", "-")
    return [f"--{name}" if value else f"--no-{name}"] if isinstance(value, bool) else [f"--{name}", str(value)]


def test_max_wait_is_refused_where_no_policy_looks_at_it():
    for name, policy in POLICIES.items():
        if policy.starves:
            assert EngineOptions.of(scheduler=name, max_wait=5.0).scheduler.max_wait == 5.0
        else:
            with pytest.raises(ConfigError, match="max_wait has no effect"):
                EngineOptions.of(scheduler=name, max_wait=5.0)


def test_options_with_an_effect_are_taken():
    for options in (
        {"ageing": 3.0, "scheduler": "priority"},
        {"ageing": 3.0, "scheduler": "my.module:Policy"},
        {"kv_fsync": True, "kv_disk": "kv:1G", "kv_policy": "lfu", "preempt": "swap"},
        {"draft_tokens": 16, "draft_adapt": False, "speculation": "draft:some/model"},
        {"session_quota": 0, "step_target": 0, "device": "cuda:3"},
    ):
        assert EngineOptions.of(**options).flat() == options


def test_options_replaced_leave_no_others_without_effect():
    options = EngineOptions.of(speculation="ngram", draft_tokens=3, kv_memory="1G", kv_host="1G", kv_policy="lfu")
    assert options.but(speculation="off", kv_pages=8, kv_host=None).flat() == {"kv_pages": 8}
    with pytest.raises(ConfigError, match="kv_fsync has no effect"):
        options.but(kv_fsync=True)


@pytest.mark.parametrize(
    ("options", "device", "named"),
    [
        ({"threads": 2}, "cuda:0", "threads"),
        ({"graphs": False}, "cpu", "graphs"),
        ({"max_batch_tokens": 8}, "cpu", "max_batch_tokens"),
        ({"prefill_chunk": 4096}, "cpu", "prefill_chunk"),
    ],
    ids=str,
)
def test_what_has_no_effect_on_this_machine_is_said(options, device, named):
    (line,) = resolve(EngineOptions.of(**options), Hardware(device, "test", 1 << 34, 2)).idle
    assert line.startswith(f"{named} ")
    assert not resolve(EngineOptions.of(), Hardware(device, "test", 1 << 34, 2)).idle


def test_a_pool_that_lowers_the_context_says_so(default_model, caplog):
    for options in ({"kv_pages": 20}, {"kv_memory": "8M"}):
        caplog.clear()
        with LLM(threads=1, **options) as llm:
            said = f"context cut from 8192 to the {llm.info.max_model_len} tokens that fit"
            assert any(said in reason for reason in llm.info.reasons)
            assert not any("kv_budget" in reason for reason in llm.info.reasons), "none is taken beyond that"
        (name,) = options
        assert any(record.message.startswith(name) and said in record.message for record in caplog.records)


def test_a_context_beyond_what_the_model_was_trained_for_asks_for_a_kv_budget(default_model):
    with LLM(threads=1, kv_memory="256M", max_model_len=9000) as llm:
        said = "a request of more than 8192 tokens, up to 9000, needs a kv_budget"
        assert any(said in reason for reason in llm.info.reasons)


def test_all_options_have_help():
    assert all(field.metadata["help"] for field in flat_fields())
