"""What loads, as a page: docs/models.md, from the families themselves.

python scripts/models_page.py docs/models.md
"""

from __future__ import annotations

import sys
from pathlib import Path

from quire.kernels.reference.dequant import FORMATS
from quire.model.families import registry
from quire.model.loading.formats.published_source import METHODS

HEAD = """# Models

What loads, from safetensors in the layout of transformers and, where a name is given, from GGUF as llama.cpp converts
it. Of multimodal checkpoints (`text_config`) the text part loads. Every family is compared with transformers by
`tests/model/test_families.py`. Another is one file: [adding-a-model.md](adding-a-model.md). This page is written by
`scripts/models_page.py`.

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
TAIL = """
## Quantised checkpoints

Weights are kept or unpacked; activations keep their bits. On a CPU, integers of 4 and 8 bits in groups of whole blocks
of 32 stay such in the compiled decoder, where it runs the family (as GGUF blocks: 4 bits take 5); everywhere else
matrices are unpacked to the model's type as they are loaded.

| `quant_method` | what of it |
| --- | --- |
{formats}

GGUF files may hold {kinds}, and plain floats.

Plain checkpoints are quantised on load with `--quantize`: int8 (the default on a CPU where the compiled decoder runs
the family), int4, or fp8 on a GPU; `none` leaves them as they are.
"""


def page() -> str:
    rows = []
    for module, family in zip(registry.FAMILY_MODULES, registry.families(), strict=True):
        classes = [f"`{name}`" for name in family.names if name[0].isupper()]
        doc = sys.modules[f"quire.model.families.{module}"].__doc__ or ""
        said = " ".join(doc.split("\n\n")[0].split())
        gguf = ", ".join(f"`{name}`" for name in family.gguf_names)
        rows.append(f"| {', '.join(classes)} | {gguf} | {said} |")
    formats = "\n".join(f"| `{method}` | {FORMAT_NOTES[method]} |" for method in METHODS)
    return HEAD + "\n".join(rows) + "\n" + TAIL.format(formats=formats, kinds=", ".join(FORMATS))


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page())
