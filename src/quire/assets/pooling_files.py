"""How a model's files say that its hidden states are pooled and what its classes are called: `modules.json` and
`*_Pooling/config.json` of sentence-transformers, labels and activations in `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.assets.json_files import MAX_JSON, parse_json, read_json
from quire.assets.local import LocalModel
from quire.types.errors import ModelFileError
from quire.types.pooling import Activation, PoolingInfo

_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
    "lasttoken": "last",
}
_ACTIVATIONS: dict[str, Activation] = {"Identity": "identity", "Sigmoid": "sigmoid", "Softmax": "softmax"}


def pooling_info(
    model: LocalModel, config: Mapping[str, Any], *, encoder: bool, labels: int, types: int
) -> PoolingInfo:
    """`config`: the model's; `labels` and `types`: how many classes and segments it has."""
    pooling, normalized = _modules(model)
    return PoolingInfo(
        encoder=encoder,
        pooling=pooling or "mean",
        normalized=normalized,
        token_types=types,
        labels=_labels(config, labels),
        activation=_activation(config, labels),
    )


def _modules(model: LocalModel) -> tuple[str | None, bool]:
    """Which pooling, and whether vectors are scaled to length one: where files do not say, they are."""
    path = model.file("modules.json")
    if path is None:
        return None, True
    modules = parse_json(b'{"modules": %s}' % path.read_bytes()[:MAX_JSON], str(path))["modules"]
    entries = [each for each in modules if isinstance(each, dict)] if isinstance(modules, list) else []
    kinds = {str(each.get("type", "")).rsplit(".", 1)[-1]: each for each in entries}
    strange = [kind for kind in kinds if kind not in ("Transformer", "Pooling", "Normalize")]
    if strange:
        raise ModelFileError(f"{path} has modules that are not supported: {', '.join(strange)}")
    folder = str(kinds.get("Pooling", {}).get("path", "1_Pooling"))
    said = model.path / Path(folder).name / "config.json"
    return (_mode(read_json(said), said) if said.is_file() else None), "Normalize" in kinds


def _mode(config: Mapping[str, Any], path: Path) -> str:
    modes = [name for name, value in config.items() if name.startswith("pooling_mode_") and value is True]
    modes = modes or [str(config.get("pooling_mode", "mean"))]
    known = {**_MODES, "mean": "mean", "cls": "cls"}
    if len(modes) != 1 or modes[0] not in known:
        raise ModelFileError(f"{path}: pooling {', '.join(modes)} is not supported; mean, cls and lasttoken are")
    return known[modes[0]]


def _labels(config: Mapping[str, Any], count: int) -> list[str]:
    named = config.get("id2label")
    names = named if isinstance(named, Mapping) else {}
    return [str(names.get(str(i), f"LABEL_{i}")) for i in range(count)]


def _activation(config: Mapping[str, Any], count: int) -> Activation:
    """As vLLM reads it: what cross-encoders name, then the kind of problem, then the number of labels."""
    said = config.get("sentence_transformers")
    named = said.get("activation_fn") if isinstance(said, Mapping) else None
    named = named or config.get("sbert_ce_default_activation_function")
    if isinstance(named, str):
        kind = named.rsplit(".", 1)[-1]
        if kind not in _ACTIVATIONS:
            raise ModelFileError(f"model config: activation {named!r} is not supported; {', '.join(_ACTIVATIONS)} are")
        return _ACTIVATIONS[kind]
    problem = config.get("problem_type")
    if problem == "regression":
        return "identity"
    return "sigmoid" if problem == "multi_label_classification" or count < 2 else "softmax"
