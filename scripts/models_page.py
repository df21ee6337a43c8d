"""What loads, as a page: docs/models.md, from the families themselves.

python scripts/models_page.py docs/models.md
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from quire.kernels.reference.dequant import FORMATS
from quire.model.families import registry
from quire.model.loading.formats.published_source import METHODS

ROOT = Path(__file__).parents[1]
HEAD = """# Models

What loads, from safetensors in the layout of transformers and, where a name is given, from GGUF as llama.cpp converts
it. Of multimodal checkpoints (`text_config`) the text part loads. Another family is one file:
[adding-a-model.md](adding-a-model.md). This page is written by `scripts/models_page.py`.

| architectures | GGUF | what they are |
| --- | --- | --- |
"""
FORMAT_NOTES = {
    "gptq": "2, 3, 4 and 8 bits, act-order too",
    "awq": "4 bits, GEMM layout",
    "compressed-tensors": "packed integers, int8, FP8, NVFP4",
    "fp8": "with scales by tensor, output or block",
    "mxfp4": "experts of gpt-oss",
    "bitsandbytes": "nf4, fp4 and int8",
}
TESTED = """
## What was tested

Tiny random models in the layout of the real ones, made by transformers {version}, which is what logits (fp32, within
1e-4) and greedy answers are compared with. `scripts/model_table.py` runs the tests and writes `docs/models.json`, of
which this table is made; a number says how many configurations of an architecture have such a test. *CPU* says what
runs the architecture there: the compiled decoder, from GGUF or quantised on load where its sizes allow, or plain torch.

| architecture | {names} | CPU |
| --- |{lines} --- |
{rows}
"""
COLUMNS = {
    "logits": "logits",
    "alone": "alone",
    "batched": "batched",
    "chunked": "chunked",
    "preempted": "preempted",
    "prefix_hit": "prefix hit",
    "two_engines": "own process",
    "speculation": "speculation",
    "gguf": "GGUF",
    "gpu": "GPU",
}
TAIL = """
## Quantised checkpoints

On a CPU, integers of 4 and 8 bits in groups of whole blocks of 32, and MXFP4, stay such in the compiled decoder (as
GGUF blocks: 4 bits take 5, MXFP4 4.25); it rounds activations to 8 bits in blocks of 32. On a GPU 4-bit integers stay
such ([gpu.md](gpu.md#4-bit-weights)). Everywhere else matrices are unpacked to the model's type as they are loaded, and
activations keep their bits.

| `quant_method` | what of it |
| --- | --- |
{formats}

GGUF files may hold {kinds}, and plain floats.
Which of them the compiled CPU decoder keeps at their own size:
[performance.md](performance.md#k-quants-at-their-own-size).

Plain checkpoints are quantised on load with `--quantize`: int8 (the default on a CPU where the compiled decoder runs
the family), int4, or fp8 on a GPU; `none` leaves layers to torch as they are, where any of their matrices is plain. On
a GPU int4 is rounded to groups of 128.

## Quantising a checkpoint once

`quire quantize MODEL --scheme SCHEME --out DIR` runs a text through a plain safetensors checkpoint, layer by layer
(beside the text's hidden states one layer is in memory), and writes compressed-tensors safetensors that this engine,
vLLM and transformers load. The text is a file (`--text`), or written by the model itself: half of its samples go on
from a random token, half answer a chat message. It reports the perplexity of another text (`--eval-text`; else the last
fifth of the file, or more that the model writes) before, after, and as served here.

- `awq`: 4 bits with zeros in groups of 128. Scales of input channels are searched by the error of the outputs and
  folded into norms, values and up-projections; ranges are clipped but for queries and keys.
- `gptq`: 4 bits with zeros in groups of 128, column by column, what rounding costs made up for by later columns: those
  that matter most first (`--no-act-order`: in order), groups staying where they are, in ranges that cost least. A
  matrix is rounded by what it sees once those before it are rounded.
- `smoothquant`: int8 by output channel, activations int8 by token (W8A8); outliers are migrated behind norms
  (`--alpha`).
- `fp8`: e4m3 by output channel, activations e4m3 by token. A channel's scale is that by which its errors, weighed by
  the inputs they meet, are least; `--dtype fp8` keeps these numbers as they are.

Groups are 64 or 32 columns where 128 do not divide a matrix. `--keep PATTERN` leaves modules as they are; embeddings
and the head always stay. The compiled CPU decoder multiplies int8 activations, in blocks of 32 inputs, by 4- and 8-bit
integers (FP8 becomes int8 there); elsewhere weights are unpacked and activations keep their bits. Decoders whose layers
are attention and an MLP or experts are calibrated; latent attention and recurrent layers are not yet. Experts, a tensor
each in the checkpoint, are rounded by what the text sends to each, those that it sends nothing to the nearest; what
chooses them stays as it is.
"""


def tested_table(found: dict[str, Any]) -> str:
    """A row an architecture; a column nothing was tested for is left out."""
    by_class: dict[str, list[dict[str, str]]] = {}
    for row in found["models"].values():
        by_class.setdefault(row["architecture"], []).append(row)
    columns = [column for column in COLUMNS if any(column in row for row in found["models"].values())]
    rows = []
    for architecture, models in sorted(by_class.items()):
        cells = " | ".join(_cell([model[column] for model in models if column in model]) for column in columns)
        paths = " or ".join(sorted({model["cpu"] for model in models if "cpu" in model}))
        rows.append(f"| `{architecture}` | {cells} | {paths} |")
    return TESTED.format(
        version=found["transformers"],
        names=" | ".join(COLUMNS[column] for column in columns),
        lines=" --- |" * len(columns),
        rows="\n".join(rows),
    )


def _cell(outcomes: list[str]) -> str:
    if "failed" in outcomes:
        return f"**{outcomes.count('failed')} of {len(outcomes)} failed**"
    return "" if not outcomes else "yes" if len(outcomes) == 1 else f"yes, {len(outcomes)}"


def page() -> str:
    rows = []
    for module, family in zip(registry.FAMILY_MODULES, registry.families(), strict=True):
        classes = [f"`{name}`" for name in family.names if name[0].isupper()]
        doc = sys.modules[f"quire.model.families.{module}"].__doc__ or ""
        said = " ".join(doc.split("\n\n")[0].split())
        gguf = ", ".join(f"`{name}`" for name in family.gguf_names)
        rows.append(f"| {', '.join(classes)} | {gguf} | {said} |")
    tested = tested_table(json.loads((ROOT / "docs/models.json").read_text()))
    formats = "\n".join(f"| `{method}` | {FORMAT_NOTES[method]} |" for method in METHODS)
    return HEAD + "\n".join(rows) + "\n" + tested + TAIL.format(formats=formats, kinds=", ".join(FORMATS))


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page())
