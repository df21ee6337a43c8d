"""Compile the Triton kernels for a GPU that need not be here, at the shapes of an 8B model; see test_triton_compiles.

Every launch ends after its kernel was compiled, so nothing is computed; what comes out is the list of kernels met.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from quire.kernels.attention_backend import AttentionSpec, Batch, GroupBatch
from quire.kernels.kv_views import LayerKV
from quire.kernels.triton import (
    activation,
    adjust_kernels,
    cascade,
    expert_kernels,
    fp8_scales,
    gated_delta_kernel,
    gemm,
    gemv,
    int4_matmul,
    launch,
    logprob_kernels,
    lora_kernels,
    norm,
    page_gather,
)
from quire.kernels.triton import batch_gather as batch
from quire.kernels.triton import draw_kernels as drawing
from quire.kernels.triton import embedding_gather as gather
from quire.kernels.triton import rope_kernel as rope
from quire.kernels.triton import sampling_kernels as sampling
from quire.kernels.triton.configs import GATED_MATMUL, INVARIANT_MATMUL, small_matmul
from quire.kernels.triton.latent_attention import LatentAttention
from quire.kernels.triton.paged_attention import TritonAttention

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
HEADS, KV, DIM, HIDDEN, FFN, PAGE = 32, 8, 128, 4096, 14336, 16
DUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
SHARED = 227 * 1024  # bytes that a program may have there
SPILLED = 64  # bytes of registers that a thread of attention may keep in memory
made = []  # (kernel's name, it)


class Absent:
    """A GPU by description: what the compiler asks of a driver."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=None):
        return 0


def compiled_only(self, *args, grid, warmup, **kwargs):
    made.append((self.fn.__name__, run(self, *args, grid=grid, warmup=True, **kwargs)))


run, JITFunction.run = JITFunction.run, compiled_only
triton.runtime.driver.set_active(Absent())
launch.overlaps = lambda device: True


def random(*shape, dtype=BF16):
    return torch.zeros(*shape, dtype=torch.uint8 if dtype == FP8 else dtype).view(dtype)


def pages(dtype):
    k, v = (random(9, PAGE, KV, DIM, dtype=dtype) for _ in range(2))
    scales = torch.ones(9, PAGE, KV, 1, dtype=torch.float16) if dtype == torch.int8 else None
    return LayerKV(k, v, 0, scales, scales)


def attention(dtype, rows, shared=0, softcap=None, **options):
    counts, lens = [c for c, _ in rows], [n for _, n in rows]
    table = torch.ones(len(rows), 8, dtype=torch.int32)
    positions = torch.cat([torch.arange(n - c, n) for c, n in rows])
    group = GroupBatch(PAGE, table, positions)
    start = torch.tensor([0, *counts]).cumsum(0).int()
    made = Batch(positions, start, torch.tensor(lens).int(), counts, lens, (group,))
    spec = AttentionSpec(HEADS, KV, DIM, 0.1, kv_itemsize=dtype.itemsize, softcap=softcap)
    backend, prefix = TritonAttention(**options), None
    if shared:
        found = cascade.find_groups(table.tolist(), [n - c for c, n in rows], PAGE)
        prefix = cascade.prefix_lists(found, counts, PAGE, HEADS // KV, torch.device("cpu"))
    plan = backend.plan(made, group, spec, prefix=prefix)
    backend.forward(spec, random(len(positions), HEADS, DIM), pages(dtype), made, group, plan)


def elementwise():
    x, wide, weight = random(8, HIDDEN), random(8, 2 * FFN), random(HIDDEN)
    norm.rms_norm(x, weight, 1e-5)
    norm.add_rms_norm(x, x, weight, 1e-5)
    norm.rms_norm_fp8(x, x, weight, 1e-5)
    activation.silu_and_mul(wide)
    activation.quantise_fp8(x)
    activation.quantise_fp8(wide, gated=True)
    fp8_scales.row_scales(wide)
    gather.gather_rows(random(1000, HIDDEN), torch.zeros(8, dtype=torch.int64))
    slots = torch.arange(8) + PAGE
    page_gather.gather_tokens(pages(BF16).sides, slots, PAGE, BF16)
    cos, sin = rope.rope_tables(slots, torch.ones(DIM // 2), 1.0, BF16)
    for dtype in (BF16, FP8, torch.int8):
        rope.rope_and_write(random(8, (HEADS + 2 * KV) * DIM), HEADS, cos, sin, pages(dtype), slots)
    tokens, table = torch.zeros(4, 64, dtype=torch.int32), torch.zeros(4, 4, dtype=torch.int32)
    batch.assemble(torch.zeros(5, 3, dtype=torch.int64), tokens, table, PAGE, 3, 4)


def products():
    for dtype in (BF16, FP8):
        weight, scale = random(2 * FFN, HIDDEN, dtype=dtype), torch.ones(2 * FFN) if dtype == FP8 else None
        gemv.row_matmul(random(1, HIDDEN), weight, norm=random(HIDDEN), eps=1e-5, gated=True, weight_scale=scale)
        for width in (HIDDEN, FFN):
            down, residual = random(HIDDEN, width, dtype=dtype), random(1, HIDDEN)
            gemv.row_matmul(random(1, width), down, residual=residual, weight_scale=scale)
        for rows in (8, 64):
            x = random(rows, HIDDEN, dtype=dtype)
            scales = {"x_scale": torch.ones(rows), "weight_scale": scale, "out_dtype": BF16} if dtype == FP8 else {}
            gemm.matmul(x, weight, INVARIANT_MATMUL[x.element_size()], **scales)
        for config in {config for _, config in GATED_MATMUL[dtype.itemsize]} - {None}:
            gemm.gated_matmul(x, weight, config, **scales)
    wide_rows()
    small_products()
    four_bits()


def wide_rows():
    """Single rows with 8-bit weights at the widths of other models, where more steps are unrolled."""
    for width in (5120, 8192):
        up = random(64, width, dtype=FP8)
        gemv.row_matmul(random(1, width), up, norm=random(width), gated=True, weight_scale=torch.ones(64))
    for width in (18944, 28672):
        gemv.row_matmul(random(1, width), random(64, width, dtype=FP8), weight_scale=torch.ones(64))


def four_bits():
    """Every tiling of the layers, zeros that are whole numbers and not, and groups within a chunk."""
    for outputs, width, group, whole in (
        (6144, HIDDEN, 128, True),
        (2 * FFN, HIDDEN, 128, False),
        (HIDDEN, FFN, 32, True),
    ):
        words = torch.zeros(width // 128, outputs, 32, dtype=torch.int16)
        scale = torch.ones(width // group, outputs, dtype=torch.float16)
        zero = torch.ones_like(scale, dtype=torch.uint8 if whole else torch.float16)
        for rows in (1, 32, 64, 128):
            tile = int4_matmul.choose_tile(rows, outputs, len(words))
            int4_matmul.int4_matmul(random(rows, width), words, scale, zero, tile=tile)
        int4_matmul.unpack(words, scale, zero, BF16)


def small_products():
    """Every tiling that the layers may take, with tiles of x's rows that are full and not."""
    layers = ((6144, HIDDEN), (HIDDEN, HIDDEN), (2 * FFN, HIDDEN), (HIDDEN, FFN), (8192, FFN), (576, 576))
    for dtype in (BF16, FP8, torch.float32):
        weight, scale = random(HIDDEN, HIDDEN, dtype=dtype), torch.ones(HIDDEN)
        for rows in (1, 16, 32, 63, 64, 127, 128):
            x, out = random(rows, HIDDEN, dtype=dtype), random(rows, HIDDEN, dtype=BF16 if dtype == FP8 else dtype)
            options = {"x_scale": torch.ones(rows), "weight_scale": scale} if dtype == FP8 else {"residual": out}
            for config in {small_matmul(dtype.itemsize, rows, *layer) for layer in layers} - {None}:
                gemv.small_matmul(x, weight, out=out, config=config, **options)


def draws():
    logits, ids = torch.zeros(4, 32000), torch.zeros(4, dtype=torch.int64)
    numbers = torch.zeros(5, 11, dtype=torch.int64)
    sampling.argmax(logits)
    for dtype in (torch.float32, BF16):
        drawing.draw(logits.to(dtype), numbers, ids, ids)
        logprob_kernels.logprobs(logits.to(dtype), ids, 5)
    adjust_kernels.mask(logits, ids, torch.zeros(4, 4000, dtype=torch.uint8))
    adjust_kernels.adjust(
        logits, ids.expand(4, 4).contiguous(), numbers, numbers[:, :2], numbers[:, :2].float(), numbers[:, :1],
        torch.zeros(5, 99, dtype=torch.int32), adjust_kernels.counting_memory(32000, logits.device),
    )  # fmt: skip


def recurrent():
    """Of the sizes of a hybrid of 9B."""
    qkv, share = random(8, 2 * 16 * 128 + 32 * 128), torch.ones(8, 32)
    states, cells = torch.zeros(3, 32, 128, 128), torch.zeros(8, dtype=torch.int64)
    gated_delta_kernel.gated_delta_step(qkv, share, share, states, cells, cells, 16)


def adapters():
    """LoRA of 32 adapters on queries, keys and values of an 8B, for decode and for a prompt."""
    for tokens in (32, 512):
        found = lora_kernels.segments(torch.zeros(tokens, dtype=torch.int64), 33)
        a, b = random(33, 3 * 16, 4096), random(33, 6144, 16)
        lora_kernels.add_lora(random(tokens, 6144), random(tokens, 4096), a, b, (4096, 1024, 1024), found)


def experts():
    """Of the sizes of a 30B with 3B at a time, few rows to an expert and many."""
    for tokens in (1, 64, 4096):
        chosen, weights = expert_kernels.choose_experts(random(tokens, 128), 8)
        lists = expert_kernels.list_rows(chosen, 128, expert_kernels.block_rows(chosen.numel(), 128))
        up = expert_kernels.expert_matmul(
            random(tokens, 2048), random(1, 1536, 2048).expand(128, -1, -1), lists, chosen.numel(), gate="silu"
        )
        down = random(1, 2048, 768).expand(128, -1, -1)
        expert_kernels.expert_matmul(up, down, lists, chosen.numel(), scale=weights.view(-1))


def latent():
    for tokens in (1, 512):
        group = GroupBatch(PAGE, torch.ones(tokens, 8, dtype=torch.int32), torch.arange(tokens))
        start, lens = torch.arange(tokens + 1).int(), torch.full((tokens,), 100).int()
        step = Batch(torch.full((tokens,), 99), start, lens, [1] * tokens, [100] * tokens, (group,))
        keys = random(9, PAGE, 1, 576)
        kv, spec = LayerKV(keys, keys[..., 64:], shared=True), AttentionSpec(16, 1, 576, 0.1, values_from=64)
        backend = LatentAttention()
        backend.forward(spec, random(tokens, 16, 576), kv, step, group, backend.plan(step, group, spec))


def attending():
    for dtype in (BF16, FP8, torch.int8):
        for rows in (1, 8, 40, 120, 200):
            attention(dtype, [(1, 600)] * rows)
        attention(dtype, [(1, 100), (100, 100)])
    attention(BF16, [(1, 100)] * 64, shared=64)
    attention(BF16, [(1, 100), (5, 100)], invariant=True)
    attention(BF16, [(1, 600)] * 8 + [(100, 100)], softcap=50.0)


def spilled(cubin):
    """Bytes that a thread keeps in memory for want of registers."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        found = subprocess.run([DUMP, "-res-usage", file.name], capture_output=True, text=True, check=True)
    return int(re.search(r"STACK:(\d+)", found.stdout + found.stderr)[1])


launch.compile_together((elementwise, products, draws, recurrent, experts, adapters, latent, attending), None)
for name, kernel in made:
    kernel = getattr(kernel, "result", lambda kernel=kernel: kernel)()
    assert kernel.metadata.shared <= SHARED, (name, kernel.metadata.shared)
    assert name != "attend_kernel" or spilled(kernel.asm["cubin"]) <= SPILLED, name
    assert name not in ("row_matmul_kernel", "row_fp8_kernel") or not spilled(kernel.asm["cubin"]), name
print(" ".join(sorted({name for name, _ in made})))
sys.exit(0)
