"""The local executor: one device in this process.

A GPU works asynchronously by itself: `submit` launches and returns. A CPU computes inside `submit` when one
step is in flight, and in a thread of its own when several are.
"""

from __future__ import annotations

import gc
import hashlib
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from msgspec.structs import replace

from quire.assets import resolve as find_model
from quire.generation.drafting.speculation import Speculation
from quire.generation.grammar.grammar_store import GrammarStore
from quire.generation.grammar.llguidance_backend import LLGuidanceBackend
from quire.kernels.product_choices import choices
from quire.model.decoder import Model
from quire.model.decoder_spec import sparse_at
from quire.model.families.registry import read_family
from quire.model.loading.held_model import hold_model
from quire.model.loading.load import Progress
from quire.model.loading.lora_adapter import adapter_rank, read_adapter
from quire.model.quantization.key_channel_scales import key_factors
from quire.model.ranks import Ranks
from quire.runtime.capacity import capacity_for, kv_layout
from quire.runtime.drafters import Drafter, load_drafter, make_speculation
from quire.runtime.hardware import DTYPES, probe, resolve
from quire.runtime.held_weights import HolderLink
from quire.runtime.host_weights import HostWeights, give_back_freed
from quire.runtime.idle_work import IdleWork
from quire.runtime.load_bar import load_bar
from quire.runtime.load_runnable import load_runnable
from quire.runtime.product_search import ProductSearch, matrices, timed
from quire.runtime.product_trials import ProductTrials
from quire.runtime.sampling_head import SamplingHead
from quire.runtime.step_result import PendingStep, run_step
from quire.runtime.tiers.open_tiers import Tiers, fingerprint, open_tiers
from quire.runtime.tiers.signed_page import PageSigner
from quire.runtime.transfers import Transfers
from quire.runtime.worker import ForwardWorker
from quire.types.config import CacheOptions, EngineOptions, LoraOptions
from quire.types.errors import ConfigError, lacks_memory
from quire.types.grammar import GrammarSpec, Vocabulary
from quire.types.kv import KVLayout
from quire.types.membership import PeerLink
from quire.types.memory_use import available_bytes
from quire.types.plan import Capacity, StepPlan, StepResult
from quire.types.seams import ExecutorInfo, Proposer, Ticket, WeightSource
from quire.types.transfer import PEER, KVConnector

log = logging.getLogger(__name__)

TRANSFER_WAIT_S = 0.02  # of a plan that computes nothing, for the first transfer to end


class LocalExecutor:
    def __init__(
        self,
        options: EngineOptions,
        source: WeightSource,
        *,
        vocabulary: Callable[[int], Vocabulary],  # given how many ids the model knows; called when a grammar needs it
        holder: HolderLink | None = None,
        progress: bool = False,
        ranks: Ranks | None = None,
    ):
        """`holder`: of weights that outlast this process. `ranks`: with which the model is divided."""
        began = time.perf_counter()
        hardware = probe(options.device.device)
        resolved = resolve(options, hardware)
        self._device = torch.device(resolved.device)
        self._dtype = DTYPES[resolved.dtype]
        self._startup_s: dict[str, float] = {}  # by stage
        self._saved_pages: tuple[list[int], torch.Tensor | None] = ([], None)  # while asleep
        self._host_weights = HostWeights()
        self._peak_bytes = 0  # of device memory, in the largest step
        self._idle_work: IdleWork | None = None  # what the start left for later
        self._unloaded = False  # whether there is no model, while asleep
        if hardware.gpu:
            torch.zeros(1, device=self._device)
            self._startup_s["CUDA context"] = time.perf_counter() - began
        self._held = None if holder is None else holder.weights(options, resolved)
        self._load = partial(load_runnable, options, hardware, resolved, ranks=ranks, held=self._held)
        began = time.perf_counter()
        with load_bar(progress) as report:
            self.model = self._load(source, progress=report)
        self._startup_s["weights"] = time.perf_counter() - began
        spec = self.model.spec
        self.layout: KVLayout = kv_layout(options, resolved, spec, self.model.kv_dtype, self.model.kv_kinds)
        self._reasons = [*resolved.reasons, *resolved.idle, *self.model.describe()]
        if self._held is not None:
            self._reasons.append(self._held.state)
        if hardware.gpu:
            self._reasons += choices(self._device).describe(matrices(self.model))
        for line in resolved.idle:
            log.warning(line)
        self._kivi = resolved.kivi
        kivi = [self._rescale_keys()] if resolved.kivi else []
        self._name = options.model.model
        self._adapted: set[int] = set()  # slots with a LoRA adapter
        self._adapter_room = self._room_for_adapters(options.adapters) if options.adapters.slots else None
        if self._adapter_room is not None:
            self.model.reserve_adapters(*self._adapter_room)
        self._load_drafter = partial(load_drafter, options)
        self._drafter = self._load_drafter(source, self.model)
        drafter = self._drafter if isinstance(self._drafter, Drafter) else None
        self._capacity, why = capacity_for(options, resolved, self.layout, self.model, drafter)
        self._reasons.append(why)
        self._speculation = options.speculation
        self._graphs = self._device.type == "cuda" and options.device.graphs and not spec.encoder and ranks is None
        if self._graphs and self.layout.states:
            self._reasons.append("captured steps: of one token a row, because layers are recurrent")
        if spec.encoder:
            self._reasons.append("an encoder: sequences are computed whole, nothing is cached or generated")
        self._threaded = self._device.type == "cpu" and resolved.depth > 1
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="quire-compute") if self._threaded else None
        self._worker: ForwardWorker | None = None
        self._head: SamplingHead | None = None
        self._transfers: Transfers | None = None
        model, device = options.model, options.device
        how = (self._device.type, type(self.model).__name__, model.dtype, model.random_weights, device.invariant, *kivi)
        if resolved.quantize == "int4":
            how = (*how, resolved.quantize)
        if ranks is not None:
            how = (*how, ranks.rank, ranks.size)
        self._fingerprint = partial(fingerprint, how=repr(how), weights=not model.random_weights)
        self.kind = self._fingerprint(source).hex()
        self._tiers = self._open_tiers(options.cache)
        tiers, naming = tuple(self._tiers.specs), self._tiers.naming
        self._capacity = replace(self._capacity, tiers=tiers, naming=naming, layerwise=True)
        self._reasons += self._tiers.reasons
        self._grammars = GrammarStore(LLGuidanceBackend(), lambda: vocabulary(spec.vocab_size))  # not self: a cycle

    def _rescale_keys(self) -> str:
        """Scale keys by channel; what tells pages with these scales from others."""
        factors = key_factors(self.model)
        self.model.rescale_keys(factors)
        large = (factors > 1).float().mean().item()
        self._reasons.append(f"keys: {large:.1%} of channels scaled down, by up to {int(factors.max())}")
        return hashlib.blake2b(factors.numpy().tobytes(), digest_size=16).hexdigest()

    def _room_for_adapters(self, options: LoraOptions) -> tuple[int, int]:
        """How many there may be, and of which rank."""
        rank = options.max_lora_rank or max(16, *(adapter_rank(path) for path in options.named.values()), 0)
        self._reasons.append(f"LoRA: room for {options.slots} adapters of rank {rank}")
        return options.slots, rank

    def load_adapter(self, slot: int, path: str) -> str:
        assert self._adapter_room is not None, "refused where adapters are named"
        adapter, rank = read_adapter(path, *read_family(self._reopened())), self._adapter_room[1]
        if adapter.rank > rank:
            raise ConfigError(
                f"the LoRA adapter in {path} has rank {adapter.rank}, there is room for {rank}; "
                "start with a larger max_lora_rank"
            )

        def put(worker: ForwardWorker) -> None:
            before = self.model.updated
            self.model.set_adapter(slot, adapter.updates)
            if self._graphs and self.model.updated > before:
                worker.capture_adapted()
                if self._idle_work is not None:
                    self._idle_work.prepare_again()

        self._in_order(put)
        self._adapted.add(slot)
        return adapter.digest

    def unload_adapter(self, slot: int) -> None:
        self._in_order(lambda _: self.model.set_adapter(slot, {}))
        self._adapted.discard(slot)

    def describe(self) -> ExecutorInfo:
        return ExecutorInfo(
            device=str(self._device),
            dtype=str(self._dtype).removeprefix("torch."),
            vocab_size=self.model.spec.vocab_size,
            reasons=list(self._reasons),
            startup_s=dict(self._startup_s),
            labels=0 if (head := self.model.spec.class_head) is None else head.labels,
            token_types=self.model.spec.token_types,
            sparse=any(sparse_at(self.model.spec, index) for index in range(len(self.model.spec.layers))),
        )

    def start(self) -> Capacity:
        size = self._capacity
        self._make_worker(
            self._warmed_up,
            f"beside {size.pages:,} KV pages a step of {size.max_batch_tokens:,} tokens of prompts and {size.slots:,} "
            "answers finds no memory; lower kv_memory, max_batch_tokens or max_seqs",
        )
        assert self._worker is not None
        self._capacity = replace(self._capacity, captured=self._worker.captured_sizes)
        return self._capacity

    def _make_worker(self, make: Callable[[], tuple[ForwardWorker, SamplingHead]], lacking: str) -> None:
        """ConfigError, which says what is `lacking`: the device has no memory for it."""
        made = None
        try:
            made = make()
        except RuntimeError as error:
            if not lacks_memory(error):
                raise
        if made is None:  # what was allocated is garbage by now, with the error that held it
            gc.collect()
            torch.cuda.empty_cache()
            raise ConfigError(lacking)
        self._worker, self._head = made
        if self._tiers.stores:
            self._transfers = self._transfers or Transfers(self._tiers.stores, self._tiers.signal, self.layout)
            self._transfers.use(self._worker.pages)

    def _warmed_up(self) -> tuple[ForwardWorker, SamplingHead]:
        """Worker and head, after all that a GPU does only once, and the largest step."""
        worker, head = self._captured()
        if self._device.type == "cuda":
            began = time.perf_counter()
            torch.cuda.reset_peak_memory_stats(self._device)
            worker.warm_up()
            head.warm_up()
            torch.cuda.synchronize(self._device)
            self._peak_bytes = torch.cuda.max_memory_allocated(self._device)
            self._startup_s["largest step"] = time.perf_counter() - began
        return worker, head

    def _captured(self) -> tuple[ForwardWorker, SamplingHead]:
        """Worker and head, the first steps captured where they are."""
        began = time.perf_counter()
        moves = all(group.residual is None for group in self.layout.groups)
        speculation = make_speculation(
            self._speculation, self.model, self._drafter, self._capacity, self._grammars, moves=moves
        )
        worker = self._new_worker()
        head = SamplingHead(worker, self._grammars, speculation, graphs=self._graphs)
        self._startup_s["KV pages"] = time.perf_counter() - began
        if self._graphs:
            began = time.perf_counter()
            worker.capture(beside=[head.warm_up], whole=False)
            known, sizes = choices(self._device), worker.product_sizes
            faster, timer = ProductTrials(worker, known).faster, partial(timed, worker.capture_pool)
            search = ProductSearch(self.model, known, sizes, faster, timer)
            self._idle_work = IdleWork(worker, search)
            self._startup_s["captured steps"] = time.perf_counter() - began
        return worker, head

    def _new_worker(self) -> ForwardWorker:
        return ForwardWorker(self.model, self.layout, self._capacity, self._device)

    def check(self) -> None:
        pass  # there is nothing that could end by itself

    def idle(self, *, quiet: bool) -> bool:
        return self._idle_work is not None and self._idle_work.proceed(quiet=quiet)

    @property
    def offloads(self) -> bool:
        """Whether host memory is another than the device's, so that what sleeps can wait there."""
        return self._device.type != "cpu"

    def room_asleep(self) -> int:
        if not self.offloads:
            return 0
        free = available_bytes() - self._host_weights.lacks(self.model.weights())
        return max(0, free // 2) // self.layout.page_bytes

    def sleep(self, pages: list[int], level: int) -> None:
        assert self._worker is not None
        if self._transfers is not None:
            self._transfers.drain()
            self._transfers.use(torch.empty_like(self._worker.pages[:0]))
        self._saved_pages = (pages, self._worker.read_pages(pages) if pages else None)
        self._close_worker()
        gc.collect()  # as in close()
        held = self._held
        if level == 2 or (held is not None and held.held and not self.offloads and not self._adapted):
            del self.model
            self._host_weights = HostWeights()  # which keeps what it had of it
            self._drafter, self._unloaded = None, True
        else:
            self.model.forget_pages()
            if isinstance(self._drafter, Drafter):
                self._drafter.model.forget_pages()
            if self.offloads:
                self._host_weights.take(self.model.weights())
        if held is not None and (level == 2 or self.offloads):
            held.release()
        elif held is not None and self._unloaded:
            held.unmap()
        if self.offloads:
            torch.cuda.empty_cache()
        else:
            give_back_freed()

    def wake(self, on_progress: Callable[[], object]) -> None:
        def loaded(done: int, total: int) -> None:
            on_progress()

        def made() -> tuple[ForwardWorker, SamplingHead]:
            """The largest step is not run again: what it takes beside the pages was seen at the start."""
            if self._unloaded:
                self._load_again(loaded)
            elif self.offloads:
                self._host_weights.give_back(self._device)
                if self._held is not None and isinstance(self.model, Model):
                    hold_model(self.model, self._held)
            on_progress()
            ready = self._captured()
            self._check_peak()
            return ready

        pages = self._capacity.pages
        self._make_worker(
            made, f"the device has no memory left for weights, {pages:,} KV pages and a step: others have it now"
        )
        assert self._worker is not None
        self._worker.write_pages(*self._saved_pages)
        self._saved_pages = ([], None)

    def _check_peak(self) -> None:
        """Others may have taken of the device what the largest step will need."""
        if self._device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(self._device)
            if free + torch.cuda.memory_reserved(self._device) < self._peak_bytes:
                raise torch.OutOfMemoryError("out of memory: the largest step would not fit")

    def _load_again(self, progress: Progress) -> None:
        """As at the start; what was computed by the first model holds for this one, which is the same."""
        source = self._reopened()
        if self._fingerprint(source).hex() != self.kind:
            raise ConfigError(
                f"{self._name} is not what it was when this engine started: its files were changed; start anew"
            )
        self.model, self._unloaded = self._load(source, progress=progress), False
        if self._kivi:
            self.model.rescale_keys(key_factors(self.model))
        if self._adapter_room is not None:
            self.model.reserve_adapters(*self._adapter_room)
        self._drafter = self._load_drafter(source, self.model, progress=progress)

    def _reopened(self) -> WeightSource:
        """The model's files, which are not kept open: what was read of them would count as this process's memory."""
        return find_model(self._name).open()

    def rank_memory(self) -> tuple[int, int]:
        return 0, 0

    def _open_tiers(self, cache: CacheOptions) -> Tiers:
        if not (cache.kv_host or cache.kv_disk or cache.kv_remote):
            return Tiers()
        return open_tiers(cache, self.layout, bytes.fromhex(self.kind), pinned=self._device.type == "cuda")

    def connect(self, peers: PeerLink) -> KVConnector | None:
        from quire.runtime.connectors.open_connector import open_connector  # ZMQ is not needed without it

        assert self._worker is not None, "start() comes first"
        signer = PageSigner(bytes.fromhex(peers.secret), bytes.fromhex(self.kind), self.layout)
        connector = open_connector(peers, signer, self._tiers.signal)
        self._tiers.stores[PEER] = connector
        if self._transfers is None:
            self._transfers = Transfers(self._tiers.stores, self._tiers.signal, self.layout)
            self._transfers.use(self._worker.pages)
        return connector

    def read_pages(self, pages: list[int]) -> list[bytes]:
        content = self._in_order(lambda worker: worker.read_pages(pages))
        return [page.numpy().tobytes() for page in content]

    def write_pages(self, pages: list[int], content: list[bytes]) -> None:
        stacked = torch.frombuffer(bytearray(b"".join(content)), dtype=torch.uint8).view(len(pages), -1)
        self._in_order(lambda worker: worker.write_pages(pages, stacked))

    def _in_order(self, work: Callable[[ForwardWorker], Any]) -> Any:
        """Between the steps submitted so far and those that follow."""
        assert self._worker is not None, "start() comes first"
        return work(self._worker) if self._thread is None else self._thread.submit(work, self._worker).result()

    def prepare(self, grammar: GrammarSpec) -> Future[Any]:
        return self._grammars.prepare(grammar)

    def watch(self, proposer: Proposer, layers: tuple[int, ...] = ()) -> None:
        """Let a proposer observe all that is sampled from now on, with hidden states (the last, and those after
        `layers`); it is not asked for drafts unless plans have draft budgets."""
        assert self._worker is not None and self._head is not None, "start() comes first"
        self._head.speculate(Speculation(proposer, hidden_layers=layers))
        if self._graphs:
            self._worker.capture(beside=[self._head.warm_up])  # those there are return nothing of these layers

    def submit(self, plan: StepPlan) -> Ticket:
        if self._thread is None:
            return _Ticket(plan, self._run(plan), self._transfers)
        return _Ticket(plan, self._thread.submit(self._run, plan), self._transfers)

    def _run(self, plan: StepPlan) -> PendingStep:
        assert self._worker is not None and self._head is not None, "start() comes first"
        layerwise = self._transfers.start(plan) if self._transfers is not None else None
        if layerwise is None:
            return run_step(plan, self._worker, self._head)
        self._worker.observer = layerwise
        try:
            step = run_step(plan, self._worker, self._head)
            layerwise.launched()
        except BaseException:
            layerwise.abort()
            raise
        finally:
            self._worker.observer = None
        return step

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown()
        if self._transfers is not None:
            self._transfers.close()
            self._transfers = None
        self._close_worker()
        self._grammars.close()
        if self._device.type == "cuda":
            gc.collect()  # whatever cycle holds device memory must not wait for a later round
            torch.cuda.empty_cache()

    def _close_worker(self) -> None:
        if self._worker is not None and self._head is not None:
            self._head.close()
            self._worker.close()
        self._worker = self._head = self._idle_work = None


class _Ticket:
    """A step, and whichever transfers have ended by the time its result is asked for."""

    def __init__(self, plan: StepPlan, step: PendingStep | Future[PendingStep], transfers: Transfers | None):
        self._plan = plan
        self._step = step
        self._transfers = transfers

    def result(self) -> StepResult:
        step = self._step.result() if isinstance(self._step, Future) else self._step
        result = step.result()
        if self._transfers is not None:
            began = time.perf_counter()
            result.transfers = self._transfers.poll(0.0 if self._plan.computes else TRANSFER_WAIT_S)
            if not self._plan.computes:
                result.seconds = time.perf_counter() - began
        return result
