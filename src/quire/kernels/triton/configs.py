"""Launch shapes as data. Values are chosen for an H200 by reasoning and checked to fit it; `scripts/gpu_kernels.py`
measures candidates, and what it finds best belongs here. Of products, an engine measures those here, and the library's
kernels, for its own shapes when it is idle (`runtime/product_search.py`).

In a table the first row whose bounds hold is taken. Refuses to know: tensors, devices.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tile:
    """One attention launch: queries (tokens x heads of a KV head) by keys."""

    block_m: int
    block_n: int
    warps: int
    stages: int
    phases: int = 1  # 2: keys that every query sees are walked first, without asking which sees which
    pieces: int = 4  # programs that a processor holds at once; keys are cut into whole rounds of them


@dataclass(frozen=True)
class Matmul:
    """One matrix multiplication launch: outputs by reduction."""

    block_n: int
    block_k: int
    warps: int
    stages: int
    splits: int = 1  # of the reduction
    rows: int = 0  # tile of x's rows, the tall side of it; 0: weights are the tall side, x's rows all in one tile
    persistent: bool = False  # programs take tile after tile (`gemm.py`), of any number of rows


# (kernel, bytes of a stored key's element, largest head_dim) → tile; "few" rows have at most 16 // group query tokens,
# "prefix" queries come from rows that share their first keys
ATTENTION: dict[tuple[str, int, int], Tile] = {
    ("few", 1, 64): Tile(16, 128, 4, 2, 2),
    ("few", 1, 128): Tile(16, 64, 4, 3),
    ("few", 1, 256): Tile(16, 64, 4, 2, 2),
    ("few", 2, 64): Tile(16, 128, 4, 3),
    ("few", 2, 128): Tile(16, 128, 4, 3, pieces=2),
    ("few", 2, 256): Tile(16, 32, 4, 3),
    ("few", 4, 128): Tile(16, 32, 8, 2),
    ("few", 4, 256): Tile(16, 16, 8, 2),
    ("prefix", 1, 128): Tile(64, 128, 4, 2, 2),
    ("prefix", 2, 128): Tile(64, 128, 4, 2, 2),
    ("many", 1, 128): Tile(128, 32, 4, 3, 2, pieces=2),
    ("many", 1, 256): Tile(64, 32, 8, 2, 2),
    ("many", 2, 64): Tile(64, 64, 4, 3, 2),
    ("many", 2, 128): Tile(128, 32, 4, 3, 2, pieces=2),
    ("many", 2, 256): Tile(64, 32, 8, 2, 2),
    ("many", 4, 128): Tile(32, 32, 8, 2),
    ("many", 4, 256): Tile(32, 16, 8, 2),
}
# The same for more of them, by (least programs a processor, tile)
CROWD: dict[tuple[int, int], list[tuple[int, Tile]]] = {
    (1, 128): [
        (8, Tile(16, 64, 2, 2, pieces=6)),
        (1, Tile(16, 64, 2, 2, 2, pieces=6)),
    ],
    (2, 128): [
        (8, Tile(16, 64, 4, 2, 2, pieces=5)),
        (7, Tile(16, 32, 2, 2, pieces=6)),
        (2, Tile(16, 64, 4, 3)),
    ],
}
# One tiling for every row, by bytes of a stored key's element
INVARIANT: dict[int, Tile] = {1: Tile(64, 64, 4, 3), 2: Tile(64, 64, 4, 3), 4: Tile(32, 32, 8, 2)}
INVARIANT_SPLIT = 8192  # keys summed by one program in invariant mode, whatever else is in the batch

SPLIT_KEYS = 256  # fewer keys than this are not worth a program of their own
BLOCK_SPLIT_KEYS = 1024  # ... of rows with many queries, where results of pieces are larger
ROUNDS = 4  # of pieces that the chip holds: so many numbers of them are tried for rows with many queries

ROW_MATMUL_ROWS = 1  # up to so many rows `row_matmul` is the fastest
# Whether x is normed → (greatest width, rows of 8-bit weights that a program reads); wider ones two. All steps of a
# program are unrolled, and with more of them registers spill.
ROW_FP8: dict[bool, list[tuple[int, int]]] = {False: [(18944, 8), (32768, 4)], True: [(6144, 8), (8192, 4)]}
# Products of few rows: (bytes of a weight, most rows) → by (least outputs, least reduction, config). Tiles and splits
# are such that all programs are on the chip at once and read alike: 4096 to 4224 outputs are a tile of 32 a processor,
# and a short reduction need not be split. Shapes that are missing belong to the library.
SMALL_MATMUL: dict[tuple[int, int], list[tuple[int, int, Matmul | None]]] = {
    (2, 32): [
        (16384, 0, Matmul(64, 128, 4, 4)),
        (6144, 0, Matmul(64, 128, 4, 4, splits=2)),
        (0, 0, Matmul(64, 128, 4, 4, splits=4)),
    ],
    (2, 64): [(16384, 0, Matmul(128, 128, 4, 4))],
    (1, 32): [
        (16384, 0, Matmul(64, 256, 4, 4)),
        (6144, 0, Matmul(64, 256, 4, 4, splits=2)),
        (0, 8192, Matmul(64, 256, 4, 4, splits=4)),
        (4225, 0, Matmul(64, 256, 4, 4, splits=2)),
        (4096, 0, Matmul(32, 256, 4, 5, rows=64)),
        (0, 0, Matmul(64, 256, 4, 4, splits=4)),
    ],
    (1, 64): [
        (16384, 0, Matmul(128, 256, 4, 4)),
        (4225, 0, Matmul(64, 256, 4, 4)),
        (4096, 0, Matmul(32, 256, 4, 5, rows=64)),
        (0, 0, Matmul(64, 256, 4, 4, splits=2)),
    ],
    (1, 128): [
        (16384, 0, None),
        (6144, 0, Matmul(64, 256, 4, 4)),
        (0, 0, Matmul(64, 256, 4, 4, splits=2)),
    ],
    (4, 64): [(0, 0, Matmul(32, 64, 4, 3))],
}
# Tiled 8-bit products that beat the library's where rows fill the tiles: (most rows, most outputs, config)
FP8_MATMUL = [(256, 4096, Matmul(64, 128, 4, 5, rows=128, persistent=True))]
# Gate, up and what follows in one launch: bytes of an element → (most rows, config; None: apart), for matrices as wide
# as those of an 8B model at least. With more rows the library is ahead, though not in a loop of products alone.
GATED_OUTPUTS = 16384
GATED_MATMUL: dict[int, list[tuple[int, Matmul | None]]] = {
    2: [
        (56, None),
        (64, Matmul(128, 128, 4, 3, rows=64)),
        (96, None),
        (128, Matmul(256, 64, 8, 4, rows=128)),
        (224, None),
        (256, Matmul(256, 64, 8, 4, rows=128)),
        (960, None),
        (1536, Matmul(256, 64, 8, 4, rows=128)),
    ],
    1: [
        (56, None),
        (64, Matmul(128, 256, 4, 3, rows=64)),
        (176, None),
        (192, Matmul(256, 128, 4, 4, rows=64)),
        (240, None),
        (256, Matmul(256, 128, 8, 3, rows=128)),
        (320, Matmul(256, 128, 4, 4, rows=64)),
        (384, Matmul(256, 128, 8, 3, rows=128)),
        (512, Matmul(256, 128, 4, 4, rows=64)),
    ],
}
# One tiling for any number of rows: bytes of an element → config
INVARIANT_MATMUL = {
    1: Matmul(128, 128, 4, 4, rows=64),
    2: Matmul(128, 64, 4, 4, rows=64),
    4: Matmul(64, 32, 4, 2, rows=64),
}


def attention(kernel: str, element: int, head_dim: int) -> Tile | None:
    """None: no tile of this head size fits the chip."""
    sizes = sorted(dim for name, size, dim in ATTENTION if (name, size) == (kernel, element) and dim >= head_dim)
    return ATTENTION[kernel, element, sizes[0]] if sizes else None


def crowd(programs: float, element: int, head_dim: int) -> Tile | None:
    """`programs` a processor. None: the tile for few does."""
    sizes = sorted(dim for size, dim in CROWD if size == element and dim >= head_dim)
    return next((tile for least, tile in CROWD[element, sizes[0]] if programs >= least), None) if sizes else None


def row_matmul(outputs: int, width: int, element: int, normed: bool = False, gated: bool = False) -> Matmul | None:
    """Whole rows of the weight a program, half of them of the gate if it is gated. None: they do not divide into
    blocks."""
    block = min(width & -width, 4096)
    if block < 512 or outputs % (8 if element == 1 and not gated else 4):
        return None
    if element == 1:
        rows = next((rows for widest, rows in ROW_FP8[normed] if width <= widest), 2)
        return Matmul(rows // 2 if gated else rows, block if block == width else min(block, 2048), 4, 1)
    return Matmul(4, 4096, 4, 1) if block == 4096 else Matmul(2, min(block, 2048), 4, 1)


def small_matmul(element: int, rows: int, outputs: int, width: int) -> Matmul | None:
    """None: the library is as fast."""
    most = sorted(limit for size, limit in SMALL_MATMUL if size == element and limit >= rows)
    table = SMALL_MATMUL[element, most[0]] if most else []
    return next((c for least, long, c in table if outputs >= least and width >= long), None)


def gated_matmul(element: int, rows: int, outputs: int, width: int) -> Matmul | None:
    """None: the product first, then the gate, is as fast; or descriptors cannot describe it."""
    if outputs < GATED_OUTPUTS or outputs % 16 or width % 16:
        return None
    return next((config for most, config in GATED_MATMUL.get(element, []) if rows <= most), None)


def fp8_matmul(rows: int, outputs: int) -> Matmul | None:
    """None: the library is as fast."""
    fits = (c for most, widest, c in FP8_MATMUL if rows <= most and outputs <= widest and rows % c.rows == 0)
    return next(fits, None)


def small_matmuls(element: int, rows: int) -> list[Matmul]:
    """All that may be the fastest for so few rows."""
    tables = [table for (size, most), table in SMALL_MATMUL.items() if size == element and rows <= most]
    few = [config for table in tables for *_, config in table if config is not None and rows <= (config.rows or rows)]
    tall = [config for *_, config in FP8_MATMUL if element == 1 and rows >= config.rows // 2]
    return list(dict.fromkeys([*few, *tall]))


def gated_matmuls(element: int) -> list[Matmul]:
    """All that may be the fastest with the gate."""
    return list(dict.fromkeys(config for _, config in GATED_MATMUL.get(element, []) if config is not None))
