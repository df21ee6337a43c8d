"""The ladder: what its rungs reserve and compute, and what its pages show."""

import json
import xml.etree.ElementTree as ElementTree

import pytest
from typer.testing import CliRunner

from quire.bench.html_report import bar_chart, html_page, html_table
from quire.bench.ladder import RUNGS, climb_ladder, ladder_html, ladder_rows, ladder_svg, ladder_workload
from quire.cli.main import app
from quire.scheduling import Scheduler
from quire.types.config import EngineOptions, SchedulerOptions
from quire.types.fakes import FakeExecutor, fake_token
from quire.types.kv import KVGroup, KVLayout
from quire.types.plan import Capacity
from quire.types.request import Request
from quire.types.sampling_params import SamplingParams

LAYOUT = KVLayout((KVGroup(layers=(0,), tokens_per_page=4, kv_heads=1, head_dim=1),), "float32")
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 2000,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": True,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
JOBS = [([i, *range(1, 3 + 3 * i)], 2 + 3 * i) for i in range(6)]


def served(policy, pages=33):
    """All jobs at once: tokens drawn, most that ran together, pages that the first had when it started, steps, and
    whether one started while others ran."""
    capacity = Capacity(pages=pages, slots=8, max_model_len=64, max_batch_tokens=256, depth=1)
    scheduler = Scheduler(SchedulerOptions(scheduler=policy), LAYOUT, capacity, prefix_cache=False)
    executor, drawn = FakeExecutor(LAYOUT, capacity), {}
    for i, (prompt, length) in enumerate(JOBS):
        params = SamplingParams(max_tokens=length, seed=0)
        scheduler.submit(Request(id=str(i), prompt=prompt, params=params, arrival=float(i)))
    together, first, steps, joined = 0, 0, 0, False
    while scheduler.busy:
        before = len(scheduler.sequences.running)
        plan = scheduler.plan(float(steps))
        joined = joined or bool(before and plan.admits)
        together = max(together, len(scheduler.sequences.running))
        first = first or len(next(iter(scheduler.sequences.running)).table.pages[0])
        for event in scheduler.commit(plan, executor.submit(plan).result(), float(steps)):
            drawn.setdefault(int(event.request), []).extend(event.tokens)
        scheduler.check()
        steps += 1
    memory = scheduler.memory
    assert memory.pool.used == 0
    return drawn, together, first, joined, memory.slots_filled / memory.slots_allocated


def alone(prompt, length):
    tokens = list(prompt)
    for _ in range(length):
        tokens.append(fake_token(tokens, 0, 0, 97))
    return tokens[len(prompt) :]


def test_what_is_reserved_before_paging_and_how_much_of_it_is_filled():
    found = {
        name: served(f"quire.bench.reservations:{name}" if name[0].isupper() else name)
        for name in ("static", "Maximum", "PowerOfTwo", "Oracle", "fcfs")
    }
    expected = {i: alone(*job) for i, job in enumerate(JOBS)}
    assert all(drawn == expected for drawn, *_ in found.values())
    assert {name: one[2] for name, one in found.items() if name != "static"} == {
        "Maximum": 16, "PowerOfTwo": 2, "Oracle": 2, "fcfs": 1
    }  # fmt: skip
    assert found["Maximum"][1] == 2 < found["PowerOfTwo"][1] <= found["Oracle"][1] <= found["fcfs"][1]
    assert not found["static"][3] and all(found[name][3] for name in ("Maximum", "PowerOfTwo", "Oracle"))
    filled = [found[name][4] for name in ("Maximum", "PowerOfTwo", "Oracle")]
    assert filled == sorted(filled) and filled[0] < 0.4 < 0.8 < filled[2]


def test_contiguous_memory_in_pieces_lets_nobody_in_who_needs_more_in_one():
    drawn, together, *_ = served("quire.bench.reservations:Oracle", pages=1 + 12)
    assert drawn == {i: alone(*job) for i, job in enumerate(JOBS)} and 1 < together < len(JOBS)


def test_pages_of_reports_are_whole_and_escape_what_is_in_them():
    chart = bar_chart("<b>", "s", [("a & b", 2.0), ("none", None), ("zero", 0.0), ("c", 8.0)])
    bars = ElementTree.fromstring(chart).findall("{http://www.w3.org/2000/svg}rect")[1:]
    assert [float(bar.get("width")) for bar in bars] == [pytest.approx(95.0), 0, 0, pytest.approx(380.0)]
    spread = ElementTree.fromstring(bar_chart("x", "s", [("a", 1.0), ("b", 100.0), ("c", 10.0)], log=True))
    low, high, middle = (float(bar.get("width")) for bar in spread.findall("{http://www.w3.org/2000/svg}rect")[1:])
    assert low < middle < high and middle - low == pytest.approx(high - middle, abs=0.2)
    page = html_page("<title>", [html_table([("a", "<i>"), ("1", "2")]), chart])
    assert "<i>" not in page and "&lt;i&gt;" in page and page.count("<th>") == 2 and "http://www.w3.org" in page
    assert "src=" not in page and "href=" not in page


def test_an_unknown_rung_is_refused():
    result = CliRunner().invoke(app, ["bench", "ladder", "--rung", "attic"])
    assert result.exit_code != 0 and "attic" in str(result.exception or result.output)


def test_the_naive_rung_really_recomputes_and_all_give_the_same_tokens(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    chosen = ["recompute", "kv-cache", "static", "iteration-oracle", "paged", "prefix-cache", "speculation"]
    found = climb_ladder(EngineOptions.of(model=str(tmp_path), random_weights=True, threads=1), 6, rungs=chosen)
    rungs = {one["name"]: one for one in found["rungs"]}
    assert list(rungs) == chosen
    work = ladder_workload(6, seed=1, vocab=CONFIG["vocab_size"])
    assert rungs["recompute"]["computed_tokens"] == sum(len(p) + i for p, length in work for i in range(length))
    needed = sum(len(prompt) + length - 1 for prompt, length in work)
    assert all(one["needed_tokens"] == needed for one in rungs.values())
    for name in ("kv-cache", "static", "iteration-oracle", "paged"):
        assert rungs[name]["computed_tokens"] == needed and rungs[name]["same_tokens"]
    assert rungs["prefix-cache"]["computed_tokens"] == needed - rungs["prefix-cache"]["cached_tokens"] < needed
    assert rungs["paged"]["kv_filled"] > rungs["static"]["kv_filled"]
    assert len(ladder_rows(found)) == len(chosen) + 1 and "prefix-cache" in ladder_html(found)
    assert len(ElementTree.fromstring(ladder_svg(found))) == 3 and len(RUNGS) == 11
