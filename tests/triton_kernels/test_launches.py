"""No kernel is compiled while somebody waits: what steps launch in service has been launched at start.

Nothing is computed here. An 8B Llama without memory (torch's meta device) goes through the steps of a start and then
through those of a service, and every launch is noted by what Triton would compile it for.
"""

import inspect
import json
import random

import pytest
import torch

from quire.assets import resolve
from quire.bench.suite import DATA
from quire.generation.sampling import kernel_sampling, logit_processors, logprobs, sampler
from quire.generation.sampling import slot_params as slots
from quire.generation.sampling import top_k as order
from quire.kernels import attention_backend as attention
from quire.kernels import backend_choice as registry
from quire.kernels.triton import paged_attention as paged
from quire.model import load_model
from quire.model.blocks import fused
from quire.model.loading import load as loading
from quire.model.quantization.fp8 import Fp8Scheme
from quire.runtime.sampling_head import SamplingHead
from quire.runtime.worker import ForwardWorker
from quire.types.plan import Admit, Capacity
from quire.types.sampling_params import SamplingParams

interpreter = pytest.importorskip("triton.runtime.interpreter")
META = torch.device("meta")
CONTEXT, BUDGET, SLOTS = 16384, 8192, 1024


def variant(kernel, arguments, options):
    """What tells one compiled form of a kernel from another: constants, and of numbers whether they are one or a
    multiple of 16, except where the kernel says that it does not care."""
    given = inspect.signature(kernel.fn).bind(*arguments, **{k: v for k, v in options.items() if k in kernel.arg_names})
    free = kernel.kwargs.get("do_not_specialize") or ()
    loose = kernel.kwargs.get("do_not_specialize_on_alignment") or ()
    found = []
    for name, value in given.arguments.items():
        if isinstance(value, torch.Tensor):  # whose storage is aligned
            aligned = value.storage_offset() * value.element_size() % 16 == 0
            found.append((name, value.dtype, aligned or name in loose))
        elif "constexpr" in str(kernel.fn.__annotations__.get(name)):
            found.append((name, value))
        elif isinstance(value, int):
            found.append((name, None if name in free else "one" if value == 1 else value % 16 == 0))
        else:
            found.append((name, type(value)))
    return kernel.fn.__name__, *found, options.get("num_warps"), options.get("num_stages")


@pytest.fixture
def launched(monkeypatch):
    """Everything believes to be on a GPU; launches are noted and go no further."""
    if not hasattr(paged.attend_kernel, "rewrite"):
        pytest.skip("needs the interpreter")
    seen = set()

    def note(kernel, *arguments, grid, warmup, **options):
        seen.add(variant(kernel, arguments, options))

    monkeypatch.setattr(interpreter.InterpretedFunction, "run", note)
    for module in (registry, fused, paged, sampler, order, logprobs, logit_processors):
        monkeypatch.setattr(module, "why_not", lambda device: None)
    monkeypatch.setattr(loading, "fill_random", lambda *_: None)
    for module, name in (
        (attention, "_ship"),
        (slots, "to_device"),
        (sampler, "to_device"),
        (kernel_sampling, "to_device"),
    ):
        send = getattr(module, name)
        monkeypatch.setattr(module, name, lambda values, to, send=send: send(values, to).to(META))
    return seen


def worker_of(folder, eight):
    config = json.loads((DATA / "llama-3.1-8b" / "config.json").read_text()) | {"num_hidden_layers": 3}
    (folder / "config.json").write_text(json.dumps(config))
    scheme = Fp8Scheme() if eight else None
    model = load_model(
        resolve(str(folder)).open(), device=META, dtype=torch.bfloat16, random_weights=True, length=CONTEXT,
        scheme=scheme,
    )  # fmt: skip
    layout = model.spec.kv_layout(page_size=16, dtype="float8_e4m3fn" if eight else "bfloat16")
    capacity = Capacity(pages=99, slots=SLOTS, max_model_len=CONTEXT, max_batch_tokens=BUDGET, depth=2)
    worker = ForwardWorker(model, layout, capacity, META)
    assert worker._captured._shared_sizes() and len(worker._warmup_model.layers) == 2
    return worker, SamplingHead(worker, None)


def steps(worker, forward, sizes):
    """Of these sizes, and those over shared prefixes."""
    captured = worker._captured
    for size in sizes:
        captured._step(forward, *size, captured._null_inputs(*size))
    for rows in captured._shared_sizes():
        captured._step(forward, rows, rows, captured._null_inputs(rows, rows, shared=True))


def start(worker, head):
    """What it compiles in threads; what is captured and launched later adds nothing, as the tests show."""
    steps(worker, worker._captured._warmups[-1], worker._captured._compile_sizes())
    for warm_up in [*worker._warmups(worker._warmup_model), head.warm_up]:
        warm_up()


def some_rows(rng):
    """(query tokens, KV length) of a step's rows, within the budget."""
    rows, left = [], BUDGET
    for _ in range(rng.choice([1, 2, 5, 16, 30, 100, 300, SLOTS])):
        count = rng.choice([1, 1, 1, rng.randint(2, 40), rng.randint(2, 600), rng.randint(600, BUDGET)])
        count = max(min(count, left), 1)
        left -= count if count > 1 else 0
        rows.append((count, count + rng.choice([0, 0, rng.randrange(300), rng.randrange(CONTEXT - count + 1)])))
    return rows


@torch.inference_mode()
@pytest.mark.parametrize("eight", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["16 bits", "8 bits"])
def test_what_service_launches_was_compiled_at_start(launched, tmp_path, eight):
    (worker, head), rng = worker_of(tmp_path, eight), random.Random(7)
    start(worker, head)
    known = set(launched)
    assert {name for name, *_ in known} >= {"attend_kernel", "assemble_kernel", "finish_kernel", "argmax_kernel"}
    for _ in range(150):
        rows = some_rows(rng)
        counts, lens = [count for count, _ in rows], [n for _, n in rows]
        table = torch.empty(4, len(rows), dtype=torch.int64, device=META)
        input_ids, batch = worker.slots.batch(table, sum(counts), counts, lens)
        worker.model.logits(worker.model.forward(input_ids, batch, worker._kv, last=True))
    ways = [
        {"temperature": 0.0},
        {"temperature": 0.0, "logprobs": 0},
        {"temperature": 2.0},
        {"top_p": 0.5},
        {"top_k": 3, "presence_penalty": 1.0},
    ]
    for slot, way in enumerate(ways):
        head._sampler.admit(Admit(slot, "a/0", [1, 2], 1, SamplingParams(**way), seed=1, branch=0, stop_ids=[]))
    for asked in ([0], [1], [2], [3], [4], [0, 0], [0, 1, 2, 3, 4] * 60):
        logits = torch.empty(len(asked), worker.model.spec.vocab_size, dtype=torch.bfloat16, device=META)
        head._sampler.sample(logits, asked, [2] * len(asked), worker.slots.tokens)
    assert not launched - known


@torch.inference_mode()
@pytest.mark.parametrize("eight", [False, True], ids=["16 bits", "8 bits"])
def test_a_start_compiles_all_that_is_captured(launched, tmp_path, eight):
    worker, head = worker_of(tmp_path, eight)
    captured = worker._captured
    start(worker, head)
    known = set(launched)
    launched.clear()
    steps(worker, captured._forward, captured.sizes())
    assert launched <= known
    attending = {launch for launch in launched if launch[0] == "attend_kernel"}
    launched.clear()
    steps(worker, captured._warmups[0], captured._compile_sizes())
    assert {launch for launch in launched if launch[0] == "attend_kernel"} == attending, "ahead of all else"
