"""Find the fastest kernel of cuBLAS for each product of a model, on a CUDA machine:
`src/quire/kernels/library/cublas.json`.

    PYTHONPATH=src python3 scripts/gpu_products.py [--model src/quire/bench/data/llama-3.1-8b] [--out FILE]

For each number of rows that steps are captured for, and for full chunks of a prompt: what the engine does without a
table against all kernels that the library offers for any of these shapes, or that the table names already. Small ones
are timed in short bursts over weights that are not in the cache, large ones for long enough that the card's power limit
counts. A kernel is written down if it saves 1.5%.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from operator import itemgetter
from pathlib import Path
from statistics import median_low

import torch
import torch.nn.functional as F

from quire.kernels.library import cublas
from quire.kernels.library.cublas import Algorithm
from quire.kernels.triton import configs
from quire.kernels.triton.activation import quantise_fp8
from quire.kernels.triton.gemv import small_matmul
from quire.model.quantization.fp8 import Fp8Scheme
from quire.runtime.capture import row_buckets

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
CHUNKS = (2048, 4096, 8192)
OWN_KERNEL_ROWS = 32  # up to which our own kernels are ahead
FINALISTS = 8
LARGE_PRODUCT_US = 1e5  # microseconds that a large product is repeated for
MAX_TIME_RATIO = 0.985  # of a kernel worth writing down

State = dict[str, torch.Tensor]
Table = dict[str, dict[str, dict[str, list[int]]]]  # bytes of an element → shape → rows → an algorithm


class Offers(cublas._Product):
    """What the library would take itself."""

    def _find(self, wanted: Algorithm) -> cublas._Candidate:
        attributes = (cublas.TILE, cublas.CLUSTER, cublas.CUSTOM)
        self.algorithms = [Algorithm(*(self._read(one, a) for a in attributes)) for one in self._offered()]
        return cublas._Candidate()


class Product:
    """One matrix of the model, in copies enough that none is in the cache when its turn comes."""

    def __init__(self, name: str, outputs: int, width: int, adds: bool, dtype: torch.dtype):
        self.name, self.outputs, self.width, self.adds, self.dtype = name, outputs, width, adds, dtype
        self._scheme = Fp8Scheme()
        size = outputs * width * (1 if dtype == FP8 else 2)
        self.copies = [self._weight() for _ in range(max(2, -(-250_000_000 // size)))]

    def _weight(self) -> State:
        rows = torch.randn(self.outputs, self.width, device="cuda").mul_(self.width**-0.5).to(BF16)
        if self.dtype == BF16:
            return {"weight": rows}
        state = self._scheme.create(self.outputs, self.width, rows.device, BF16)
        self._scheme.put(state, 0, rows)
        return state

    def inputs(self, rows: int) -> None:
        x = torch.randn(rows, self.width, device="cuda").to(BF16)
        self.x, self.scales = (x, None) if self.dtype == BF16 else quantise_fp8(x)
        self.out = torch.zeros(rows, self.outputs, device="cuda", dtype=BF16)

    def shape(self, rows: int) -> cublas._Shape:
        return cublas._Shape(torch.device("cuda", 0), self.dtype, BF16, rows, self.outputs, self.width)

    def usual(self, state: State) -> torch.Tensor:
        into, weight = self.out if self.adds else None, state["weight"]
        if self.scales is not None:
            return self._scheme.multiply(state, self.x, self.scales, None, into)
        if configs.small_matmul(2, self.x.shape[0], *weight.shape):
            return small_matmul(self.x, weight, residual=into, out=into)
        return F.linear(self.x, weight) if into is None else into.addmm_(self.x, weight.t())

    def by(self, product: cublas._Product) -> Callable[[State], None]:
        def run(state: State) -> None:
            scales = [] if self.scales is None else [self.scales, state["scale"]]
            product.run(self.x, state["weight"], self.out, self.adds, scales)

        return run

    def wrong(self, product: cublas._Product) -> bool:
        results = []
        for run in (self.usual, self.by(product)):
            self.out.zero_()
            found = run(self.copies[0])
            results.append((self.out if found is None else found).float().clone())
        return bool((results[0] - results[1]).norm() > 0.01 * results[0].norm())


def timed(run: Callable[[State], object], copies: list[State], launches: int) -> float:
    """Microseconds a launch, in a graph: hosts take longer over some than a GPU over the product."""
    run(copies[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(launches):
            run(copies[(i + 1) % len(copies)])
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1000 / launches


def fastest(product: Product, rows: int, algorithms: set[Algorithm]) -> Algorithm | None:
    product.inputs(rows)
    made = {one: found for one in algorithms if (found := cublas._product(product.shape(rows), one)) is not None}
    quick = []
    for one, found in made.items():
        try:
            quick.append((timed(product.by(found), product.copies, 3), one))
        except cublas._Failed:
            continue
    large = rows > 1024
    quick.sort(key=itemgetter(0))
    final = [one for _, one in quick[: FINALISTS // 2 if large else FINALISTS] if not product.wrong(made[one])]
    if not final:
        return None
    launches, usual = int(LARGE_PRODUCT_US / quick[0][0]) if large else 12, []
    times: dict[Algorithm, list[float]] = {one: [] for one in final}
    for _ in range(2 if large else 4):
        usual.append(timed(product.usual, product.copies, launches))
        for one in final:
            times[one].append(timed(product.by(made[one]), product.copies, launches))
    before = median_low(usual)
    after, best = min(((median_low(each), one) for one, each in times.items()), key=itemgetter(0))
    print(f"{product.dtype} {product.name} {rows}: {before:.1f} us, {after:.1f} by {tuple(best)}", flush=True)
    return best if after < MAX_TIME_RATIO * before else None


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, default=Path("src/quire/bench/data/llama-3.1-8b"))
    parser.add_argument("--out", type=Path, default=Path(cublas.__file__).with_suffix(".json"))
    given = parser.parse_args()
    config = json.loads((given.model / "config.json").read_text())
    hidden, ffn = config["hidden_size"], config["intermediate_size"]
    heads, kv = config["num_attention_heads"], config["num_key_value_heads"]
    dim = config.get("head_dim") or hidden // heads
    layers = {"qkv": ((heads + 2 * kv) * dim, hidden), "o": (hidden, heads * dim)}
    layers |= {"gate_up": (2 * ffn, hidden), "down": (hidden, ffn)}
    named = set(cublas._table().values())
    cublas._table = dict  # what is measured is without
    table: Table = json.loads(given.out.read_text())["kernels"] if given.out.exists() else {}
    for dtype in (BF16, FP8):
        sizes = [rows for rows in row_buckets(1024) if rows > OWN_KERNEL_ROWS] + list(CHUNKS)
        products = [Product(name, *shape, name in ("o", "down"), dtype) for name, shape in layers.items()]
        try:
            offers = [Offers(product.shape(rows), Algorithm(0, 0, 0)) for product in products for rows in sizes]
        except cublas._Failed:
            print(f"{dtype}: the library offers nothing")
            continue
        candidates = named.union(*(one.algorithms for one in offers))
        print(f"{dtype}: {len(candidates)} kernels", flush=True)
        element = 2 if dtype == BF16 else 1
        for product in products:
            entries = table.setdefault(str(element), {})[f"{product.outputs}x{product.width}"] = {}
            for rows in sizes:
                if product.name == "gate_up" and configs.gated_matmul(element, rows, product.outputs, product.width):
                    continue
                best = fastest(product, rows, candidates)
                if best is not None:
                    entries[str(rows)] = [number for number in best if number is not None]
    about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    given.out.write_text(written(about, table))


def written(about: dict[str, str], table: Table) -> str:
    """JSON, a line a shape."""
    lines = {e: [f'   "{name}": {json.dumps(sizes)}' for name, sizes in shapes.items()] for e, shapes in table.items()}
    kinds = [f'  "{element}": {{\n' + ",\n".join(shapes) + "\n  }" for element, shapes in lines.items()]
    head = "".join(f' "{key}": {json.dumps(value)},\n' for key, value in about.items())
    return "{\n" + head + ' "kernels": {\n' + ",\n".join(kinds) + "\n }\n}\n"


if __name__ == "__main__":
    main()
