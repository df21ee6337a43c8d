"""The local executor: one device in this process.

A GPU works asynchronously by itself: `submit` launches and returns. A CPU computes inside `submit` when one
step is in flight, and in a thread of its own when several are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import torch

from quire.generation.grammars import GrammarStore
from quire.generation.guidance import Guidance
from quire.generation.speculation import Speculation
from quire.model import NativeModel, load_model
from quire.model.fp8 import Fp8Scheme
from quire.runtime.drafting import draft_limit, load_drafter, make_speculation
from quire.runtime.hardware import DTYPES, Hardware, Resolved, kv_budget, probe, resolve
from quire.runtime.runner import ModelRunner, PendingStep
from quire.types.config import EngineOptions
from quire.types.errors import ConfigError
from quire.types.grammar import GrammarSpec, Vocabulary
from quire.types.kv import KVLayout
from quire.types.plan import Capacity, StepPlan, StepResult
from quire.types.seams import Grammar, Proposer, Ticket, WeightSource


class LocalExecutor:
    def __init__(
        self,
        options: EngineOptions,
        source: WeightSource,
        *,
        vocabulary: Callable[[int], Vocabulary],  # given how many ids the model knows; called when a grammar needs it
        progress: bool = False,
    ):
        hardware = probe(options.device.device)
        resolved = resolve(options, hardware)
        if hardware.device == "cpu":
            torch.set_num_threads(resolved.threads)
        self.device = torch.device(resolved.device)
        self.dtype = DTYPES[resolved.dtype]
        with load_bar(progress) as report:
            self.model = load_model(
                source,
                device=self.device,
                dtype=self.dtype,
                random_weights=options.model.random_weights,
                length=options.model.max_model_len,
                compiled=resolved.threads if options.model.dtype == "auto" and not hardware.gpu else None,
                scheme=Fp8Scheme() if resolved.fp8 else None,
                invariant=options.device.invariant,
                progress=report,
            )
        if isinstance(self.model, NativeModel):
            torch.set_num_threads(1)  # the decoder has its own; torch's would spin on its cores after every draw
        spec = self.model.spec
        self.kv_dtype = self.model.kv_dtype
        if resolved.kv_fp8:
            if isinstance(self.model, NativeModel) or not self.model.stages.eight_bit_kv:
                raise ConfigError(f"8-bit KV pages need the Triton kernels, which do not run {spec.architecture} here")
            self.kv_dtype = torch.float8_e4m3fn
        self.layout: KVLayout = spec.kv_layout(
            page_size=options.cache.page_size,
            dtype=str(self.kv_dtype).removeprefix("torch."),
            itemsize=self.kv_dtype.itemsize,
        )
        drafter = load_drafter(options, resolved, self.model)
        beside = drafter.layout.page_bytes if drafter is not None else 0
        self._capacity, why = capacity_for(options, resolved, self.layout, spec.max_position, beside)
        self.reasons = [*resolved.reasons, *self.model.reasons, why]
        self._speculation, self._drafter = options.speculation, drafter
        self.vocab_size = spec.vocab_size
        self._graphs = self.device.type == "cuda" and options.device.graphs
        self._threaded = self.device.type == "cpu" and resolved.depth > 1
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="quire-compute") if self._threaded else None
        self._runner: ModelRunner | None = None
        self._grammars = GrammarStore(Guidance(), lambda: vocabulary(self.vocab_size))

    def start(self) -> Capacity:
        speculation = make_speculation(self._speculation, self.model, self._drafter, self._capacity, self._grammars)
        self._runner = ModelRunner(
            self.model, self.layout, self._capacity, self.device, self.kv_dtype, self._grammars, speculation
        )
        if self._graphs:
            self._runner.capture()
        return self._capacity

    def prepare(self, grammar: GrammarSpec) -> Future[Grammar]:
        return self._grammars.prepare(grammar)

    def watch(self, proposer: Proposer) -> None:
        """Show a proposer all that is drawn from now on, hidden states too; it is not asked for drafts unless plans
        have budgets."""
        assert self._runner is not None, "start() comes first"
        self._runner.speculate(Speculation(proposer, hidden=True))

    def submit(self, plan: StepPlan) -> Ticket:
        assert self._runner is not None, "start() comes first"
        if self._thread is None:
            return self._runner.run(plan)
        return _ThreadTicket(self._thread.submit(self._runner.run, plan))

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown()
        if self._runner is not None:
            self._runner.close()
        self._runner = None


class _ThreadTicket:
    def __init__(self, future: Future[PendingStep]):
        self._future = future

    def result(self) -> StepResult:
        return self._future.result().result()


@contextmanager
def load_bar(show: bool) -> Iterator[Callable[[int, int], None] | None]:
    """A progress bar on standard error while weights load, gone when they are in."""
    if not show:
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    columns = (TextColumn("loading weights"), BarColumn(), DownloadColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("load", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def kv_capacity(
    options: EngineOptions, hardware: Hardware, layout: KVLayout, *, taken: int = 0, beside: int = 0
) -> tuple[int, str]:
    """Pages (the null page included) and why so many; `taken` bytes of free memory are spoken for, and `beside` each
    page a draft model needs so many."""
    if options.cache.kv_pages:
        return options.cache.kv_pages + 1, f"{options.cache.kv_pages} KV pages: as asked"
    left = replace(hardware, memory=max(0, hardware.memory - taken))
    size, why = kv_budget(options, left)
    return size // (layout.page_bytes + beside), why


def capacity_for(
    options: EngineOptions, resolved: Resolved, layout: KVLayout, trained_len: int, beside: int = 0
) -> tuple[Capacity, str]:
    """How many pages and which longest context, now that the weights are in; says why."""
    pages, why = kv_capacity(options, probe(resolved.device), layout, beside=beside)
    longest = options.model.max_model_len or trained_len
    if longest < 2:
        raise ConfigError(f"max_model_len must be at least 2, got {longest}")
    fits = min((pages - 1) * g.tokens_per_page // len(layout.groups) for g in layout.groups)
    if fits < 2:
        raise ConfigError(f"no room for KV pages: {pages} pages of {layout.page_bytes} bytes; raise kv_memory")
    if fits < longest:
        if options.model.max_model_len:
            raise ConfigError(
                f"max_model_len {longest} needs more KV memory than there is ({fits} tokens fit); "
                "raise kv_memory or lower max_model_len"
            )
        why += f"; context cut from {longest} to the {fits} tokens that fit"
        longest = fits
    capacity = Capacity(
        pages=pages,
        slots=resolved.max_seqs,
        max_model_len=longest,
        max_batch_tokens=resolved.max_batch_tokens,
        depth=resolved.depth,
        drafts=draft_limit(options.speculation),
    )
    return capacity, why
