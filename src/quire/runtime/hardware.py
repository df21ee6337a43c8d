"""What this machine has, and what an engine on it should therefore be: facts, then decisions with reasons."""

from __future__ import annotations

import platform
from dataclasses import dataclass

import torch

from quire.model.loading.load import Quantize
from quire.types.config import EngineOptions
from quire.types.errors import ConfigError
from quire.types.kv import KINDS
from quire.types.memory_use import available_bytes, command_output, usable_cores

STEP_TARGET_S = 0.3  # as long as a full prefill step takes an 8B model on one of today's GPUs, and a half
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Hardware:
    """Facts about the machine."""

    device: str  # cpu or cuda:N
    name: str
    memory: int  # bytes free for weights and KV when asked
    cores: int

    @property
    def gpu(self) -> bool:
        return self.device != "cpu"


@dataclass(frozen=True)
class Resolved:
    """Decisions; `reasons` says why, a line each."""

    device: str
    dtype: str  # of activations, and of weights unless they are quantised
    quantize: Quantize  # what becomes of plain weights on load
    fp8: bool  # whether the layers' matrices are kept and multiplied in 8-bit floats
    kv_dtype: str | None  # what KV pages keep, a name in types.kv.KINDS; None: what the model prefers
    kivi: bool  # whether keys are scaled by channel as well as by token
    threads: int
    depth: int
    max_seqs: int
    max_batch_tokens: int
    step_target: float  # seconds; 0: no limit
    reasons: tuple[str, ...]
    idle: tuple[str, ...] = ()  # options that were given and change nothing here

    @property
    def kv_residual(self) -> bool:
        """Whether the latest tokens lie in pages of their own."""
        return self.kv_dtype is not None and KINDS[self.kv_dtype].residual


def probe(device: str) -> Hardware:
    """Look at the machine. `auto` takes a GPU if there is one."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    cores = usable_cores()
    if device == "cpu":
        return Hardware("cpu", _cpu_name(), available_bytes(), cores)
    if not torch.cuda.is_available():
        raise ConfigError("no CUDA device is visible to torch; use --device cpu or install a CUDA build of torch")
    index = int(device.partition(":")[2] or 0)
    if index >= torch.cuda.device_count():
        raise ConfigError(f"there is no {device}; this machine has {torch.cuda.device_count()} CUDA device(s)")
    free, _ = torch.cuda.mem_get_info(index)
    return Hardware(f"cuda:{index}", torch.cuda.get_device_name(index), free, cores)


def resolve(options: EngineOptions, hardware: Hardware) -> Resolved:
    """Options and facts → decisions. Pure."""
    gpu, scheduler = hardware.gpu, options.scheduler
    reasons = [f"device {hardware.device}: {hardware.name}, {hardware.memory / 2**30:.1f} GiB free"]
    dtype = options.model.dtype
    if dtype == "auto":
        dtype = "bfloat16" if gpu else "float32"
        reasons.append(f"dtype {dtype}: " + ("made for tensor cores" if gpu else "what CPUs compute best"))
    elif dtype == "fp8":
        if not gpu:
            raise ConfigError("dtype fp8 needs a GPU with 8-bit matrix units; on a CPU use auto or float32")
        dtype = "bfloat16"
        reasons.append("dtype fp8: 8-bit matrices with a scale per output, activations quantised per token, rest bf16")
    fp8 = "fp8" in (options.model.dtype, options.model.quantize)
    quantize = _quantize(options, gpu)
    kv_dtype, kivi = _kv_dtype(options, gpu)
    if kv_dtype is not None:
        why = "as the matrices are" if options.cache.kv_dtype == "auto" else "as asked"
        reasons.append(f"KV pages {kv_dtype}: {why}")
    depth = options.device.depth or (2 if gpu else 1)
    overlap = "host work overlaps the device's" if depth > 1 else "host and compute share the cores"
    reasons.append(f"depth {depth}: {overlap}")
    seqs = scheduler.max_seqs or (1024 if gpu else 64)
    tokens = scheduler.max_batch_tokens or (8192 if gpu else 512)
    target = scheduler.step_target
    if target is None:
        target = STEP_TARGET_S
    if target > 0:
        reasons.append(f"steps of about {target:g} s while answers are streamed: prompts are cut to fit")
    threads = options.device.threads or hardware.cores
    most = max(tokens, seqs)
    idle = _without_effect(options, gpu, tokens, most)
    return Resolved(
        hardware.device, dtype, quantize, fp8, kv_dtype, kivi, threads, depth, seqs, most, target, tuple(reasons),
        tuple(idle),
    )  # fmt: skip


def _without_effect(options: EngineOptions, gpu: bool, tokens: int, most: int) -> list[str]:
    """What was said and changes nothing on this machine, a line each."""
    device, chunk, found = options.device, options.scheduler.prefill_chunk, []
    if gpu and device.threads:
        found.append(f"threads {device.threads}: no effect on a GPU")
    if not gpu and not device.graphs:
        found.append("graphs off: no effect on a CPU, which has none")
    if options.scheduler.max_batch_tokens and most > tokens:
        found.append(f"max_batch_tokens {tokens}: raised to {most}, one for each of max_seqs")
    if chunk and chunk > most:
        found.append(f"prefill_chunk {chunk}: no effect, a step takes {most} tokens (max_batch_tokens)")
    return found


def _quantize(options: EngineOptions, gpu: bool) -> Quantize:
    """What the loader is told; fp8 is a scheme of the layers, not of the loader."""
    asked, dtype = options.model.quantize, options.model.dtype
    if asked == "int8" and gpu:
        raise ConfigError("quantize int8 is for a CPU with dtype auto; on a GPU use quantize fp8 or int4")
    if asked in ("int8", "int4") and dtype not in (("auto", "bfloat16", "float16") if gpu else ("auto", "float32")):
        raise ConfigError(f"quantize {asked} goes with dtype auto, not {dtype}")
    if asked == "fp8" and not gpu:
        raise ConfigError("quantize fp8 needs a GPU with 8-bit matrix units; on a CPU use int8 or int4")
    if asked == "fp8" and dtype not in ("auto", "bfloat16", "fp8"):
        raise ConfigError(f"quantize fp8 computes the rest in bfloat16, not in dtype {dtype}")
    return "none" if asked == "fp8" else asked  # type: ignore[return-value]


def _kv_dtype(options: EngineOptions, gpu: bool) -> tuple[str | None, bool]:
    """The kind of KV pages asked for, None where the model may choose; and whether keys are scaled by channel too."""
    asked = options.cache.kv_dtype
    if asked == "auto":
        return ("float8_e4m3fn" if "fp8" in (options.model.dtype, options.model.quantize) else None), False
    if gpu and asked == "fp8":
        return "float8_e4m3fn", False  # without scales, which cost reads of their own
    return asked.removesuffix("-kivi"), asked.endswith("-kivi")


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as info:
            for line in info:
                if line.startswith(("model name", "CPU part")):
                    return f"CPU ({line.partition(':')[2].strip()})"
    except OSError:  # no Linux
        return f"CPU ({command_output('sysctl', '-n', 'machdep.cpu.brand_string').strip() or platform.machine()})"
    return "CPU"
