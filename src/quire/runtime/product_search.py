"""Measuring which kernel multiplies each shape of a model the fastest, a little at a time, while an engine is idle.

    asked for ──► kernels that might be faster ──► each once or twice ──► the fastest against the usual one, in turn
              kept, if whole steps are faster by it (`product_trials.py`) ◄── tried, if it saves 1.5% ◄─────┘

The matrices are the model's own, in turn, so that none lies in a cache that it would not lie in. Refuses to know: when
nobody asks, where choices are kept.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from itertools import groupby
from operator import attrgetter
from statistics import median_low
from typing import Any

import torch

from quire.assets import cache_dir
from quire.kernels import products
from quire.kernels.library import cublas
from quire.kernels.product_choices import CHUNKS, FIXED_ROWS, LIBRARY, Choice, ProductChoices, Shape, choices
from quire.kernels.triton import configs
from quire.kernels.triton.configs import Matmul
from quire.model import Runnable
from quire.model.blocks.linear import Linear
from quire.model.decoder import Model
from quire.model.quantization.scheme import State

log = logging.getLogger(__name__)

MAX_TIME_RATIO = 0.985  # of a kernel worth choosing
MAX_ERROR = 0.01  # of the norm of a product, to what the usual kernel gives
CHECKED_ROWS = 64
COLD_BYTES = 250_000_000  # of weights that are gone through before one comes again
FINALISTS = 6
ROUNDS = 3
LAUNCHES = 10  # of a small product, one after the other
PIECE_US = 15_000  # microseconds that products may run before requests are looked for again
COMPILE_POLL_S = 0.005

Run = Callable[[int], object]  # of one of the matrices
Timer = Callable[[Run, int, bool], float]  # (launches, whether they are captured first) → microseconds a launch


def known_products(device: torch.device) -> ProductChoices:
    """With what engines have measured on this machine."""
    found = choices(device)
    found.use(cache_dir() / "products")
    return found


def matrices(model: Runnable) -> dict[tuple[int, int, int], list[State]]:
    """Those that are multiplied by kernels that can be chosen, by bytes of an element, outputs and width."""
    found: dict[tuple[int, int, int], list[State]] = {}
    modules = model.modules().values() if isinstance(model, Model) else []
    for linear in (m for m in modules if isinstance(m, Linear) and m.bias is None):
        weight = linear.state.get("weight")
        if weight is not None and weight.dtype in cublas.TYPES:
            found.setdefault((weight.element_size(), *weight.shape), []).append(linear.state)
    return found


class ProductSearch:
    """Iterate: a piece of work each, of some tens of milliseconds at most."""

    def __init__(
        self,
        model: Runnable,
        known: ProductChoices,
        sizes: Iterable[int],
        faster: Callable[[Shape, Choice, Choice], Generator[bool, None, bool]],
        timer: Timer,
    ):
        """`sizes`: numbers of rows that are met; `faster`: whether steps are, by the second, which is chosen then."""
        self._known, self._sizes, self._faster, self._timed = known, frozenset(sizes), faster, timer
        self._states = matrices(model)
        self.changed: set[int] = set()  # numbers of rows for which another kernel was chosen
        self._pieces = self._search()

    def proceed(self) -> bool:
        """Measure a little; whether there is more to do."""
        with torch.inference_mode():
            return next(self._pieces, None) is not None

    def _wanted(self) -> list[Shape]:
        """What is asked for and not known, small steps first, what has the gate behind what has not."""
        asked = {shape for shape in self._known.asked if shape[:3] in self._states}
        large = {shape for shape in asked if shape.rows in CHUNKS}  # the head is never asked for so many
        found = asked | {shape._replace(rows=size) for shape in large for size in CHUNKS}
        wanted = (shape for shape in found if shape.rows in self._sizes and shape not in self._known)
        return sorted(wanted, key=lambda shape: (shape.rows, shape.gated, shape))

    def _search(self) -> Iterator[bool]:
        wanted = self._wanted()
        for rows, shapes in groupby(wanted, key=attrgetter("rows")):
            better: list[tuple[Shape, Choice]] = []
            for shape in shapes:
                try:
                    yield from self._measure(shape, better)
                except (torch.OutOfMemoryError, cublas._Failed) as error:
                    log.debug("%s was not measured: %s", shape, error)
            for shape, choice in better:
                if (yield from self._faster(shape, products.usual(shape), choice)):
                    self.changed.add(rows)
                yield True
            self._known.save()
        if wanted:
            count = len(self.changed)
            log.info("measured %d products of this model; steps of %d sizes take other kernels", len(wanted), count)

    def _measure(self, shape: Shape, better: list[tuple[Shape, Choice]]) -> Iterator[bool]:
        """By the usual kernel, unless another is `better`, which remains to be tried."""
        usual = products.usual(shape)
        product = _Product(shape, self._states[shape[:3]], adds=self._known.asked.get(shape, False))
        quick: list[tuple[float, Choice]] = []
        for choice in [usual, *(each for each in product.candidates() if each != usual)]:
            yield from product.compiled(choice)
            try:
                quick.append((self._time(product, choice, 2), choice))
            except (RuntimeError, cublas._Failed) as error:  # not for this shape, or chip
                if choice == usual:
                    raise cublas._Failed from error
            yield True
        usual_us = quick[0][0]
        final = [choice for _, choice in sorted(quick, key=lambda each: each[0])[:FINALISTS] if choice != usual]
        final = [choice for choice in final if not product.wrong(choice, usual)]
        times: dict[Choice, list[float]] = {choice: [] for choice in [usual, *final]}
        for _ in range(ROUNDS):
            for choice, found in times.items():
                found.append(self._time(product, choice, max(1, min(LAUNCHES, int(PIECE_US / max(usual_us, 1.0))))))
                yield True
        before, best = median_low(times[usual]), min(times, key=lambda choice: median_low(times[choice]))
        log.debug("%s: %.1f us, %.1f by %s", tuple(shape), before, median_low(times[best]), best)
        self._known.put(shape, usual)
        if median_low(times[best]) < MAX_TIME_RATIO * before:
            better.append((shape, best))

    def _time(self, product: _Product, choice: Choice, launches: int) -> float:
        return self._timed(partial(product.run, choice), launches, product.shape.rows <= FIXED_ROWS)


class _Product:
    """One shape: inputs, and matrices of the model that have it."""

    def __init__(self, shape: Shape, states: list[State], *, adds: bool):
        self.shape = shape
        size = shape.element * shape.outputs * shape.width
        self._states = states[: max(2, -(-COLD_BYTES // size))]
        weight = self._states[0]["weight"]
        x = torch.randn(shape.rows, shape.width, device=weight.device).to(torch.bfloat16)
        self.scales = None
        if shape.element == 1:
            from quire.kernels.triton.activation import quantise_fp8

            x, self.scales = quantise_fp8(x)
        else:
            x = x.to(weight.dtype)
        self.x = x
        out = torch.bfloat16 if self.scales is not None else x.dtype
        self._residual = None
        if adds:
            self._residual = torch.zeros(shape.rows, shape.outputs, device=weight.device, dtype=out)

    def candidates(self) -> list[Choice]:
        element, _, _, rows, gated = self.shape
        if gated:
            return [LIBRARY, *configs.gated_matmuls(element)]
        few = configs.small_matmuls(element, rows) if rows <= 512 else []
        return [LIBRARY, *few, *cublas.offers(self.x, self._states[0]["weight"])]

    def run(self, choice: Choice, turn: int) -> torch.Tensor:
        """The product with one of the matrices, whichever's turn it is."""
        state = self._states[turn % len(self._states)]
        weight, scales = state["weight"], None if self.scales is None else (self.scales, state["scale"])
        if self.shape.gated:
            return self._gated(choice, weight, scales)
        out = products.multiply(choice, self.x, weight, self._residual, scales)
        if out is None:
            raise cublas._Failed
        if self._residual is not None and out is not self._residual:
            self._residual.add_(out)  # what the next norm then has to do
        return out

    def _gated(self, choice: Choice, weight: torch.Tensor, scales: products.Scales | None) -> torch.Tensor:
        from quire.kernels.triton import gemm, triton_ops

        if not isinstance(choice, Matmul):
            return triton_ops.act_and_mul(products.matmul(self.x, weight, scales=scales), "silu")
        if scales is None:
            return gemm.gated_matmul(self.x, weight, choice)
        x_scale, weight_scale = scales
        return gemm.gated_matmul(
            self.x, weight, choice, x_scale=x_scale, weight_scale=weight_scale, out_dtype=torch.bfloat16
        )

    def compiled(self, choice: Choice) -> Iterator[bool]:
        """Has a kernel of ours compiled in a thread beside: that takes a second, and requests may come."""
        if not isinstance(choice, Matmul) or self.x.device.type != "cuda":
            return
        from quire.kernels.triton.launch import compile_only

        def compile_it() -> None:
            with torch.inference_mode(), torch.cuda.device(self.x.device):
                compile_only(lambda: self.run(choice, 0))

        with ThreadPoolExecutor(1, thread_name_prefix="quire-compile") as thread:
            job = thread.submit(compile_it)
            while not wait([job], COMPILE_POLL_S).done:
                yield True

    def wrong(self, choice: Choice, usual: Choice) -> bool:
        results = []
        for each in (usual, choice):
            if self._residual is not None:
                self._residual.zero_()
            found = self.run(each, 0)
            found = found if self._residual is None else self._residual
            results.append(found[:: -(-self.shape.rows // CHECKED_ROWS)].float())
        return bool((results[0] - results[1]).norm() > MAX_ERROR * results[0].norm())


def timed(pool: Any, run: Run, launches: int, captured: bool) -> float:
    """Microseconds a launch. Small ones in a graph: a host takes longer over some than a GPU over the product."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    run(0)  # sizes workspaces outside of the capture
    if not captured:
        begin.record()
        for turn in range(launches):
            run(turn + 1)
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1000 / launches
    graph, here, beside = torch.cuda.CUDAGraph(), torch.cuda.current_stream(), torch.cuda.graph.default_capture_stream
    assert beside is not None, "steps were captured before"
    beside.wait_stream(here)
    with torch.cuda.stream(beside):  # as `torch.cuda.graph`, which gives memory back first that steps will want again
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            for turn in range(launches):
                run(turn + 1)
        finally:
            graph.capture_end()
    here.wait_stream(beside)
    graph.replay()
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1000 / launches
