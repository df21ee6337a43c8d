"""How much fits: the KV pages that memory has room for beside weights and work, and which context they allow.

Refuses to know: workers, plans.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import NamedTuple

from msgspec.structs import replace

from quire.generation.sampling.sampler import SLICE_ROWS
from quire.model import DecoderSpec, Runnable
from quire.runtime.drafters import PREDICTED_DRAFT_TOKENS, Drafter, draft_limit
from quire.runtime.hardware import DTYPES, Hardware, Resolved, probe
from quire.types.config import EngineOptions
from quire.types.errors import ConfigError
from quire.types.kv import KVLayout
from quire.types.option_checks import parse_size
from quire.types.plan import Capacity

log = logging.getLogger(__name__)

GIB = 1 << 30
COMPILING = 4 * GIB  # a first start runs a step of each kind at once, each in a thread with workspaces of its own


def kv_layout(
    options: EngineOptions, resolved: Resolved, spec: DecoderSpec, own: str, kinds: Collection[str]
) -> KVLayout:
    """Pages of the kind asked for, else of the model's `own`, if it is one of the `kinds` that can be run."""
    dtype = resolved.kv_dtype or own
    if refusal := spec.kv_refusal(dtype, kinds):
        raise ConfigError(f"KV pages cannot be {dtype}: {refusal}; choose another --kv-dtype")
    ranks = options.device.context_parallel
    layout = replace(spec.kv_layout(page_size=ranks * options.cache.page_size, dtype=dtype, own=own), ranks=ranks)
    if options.scheduler.scheduler == "static":  # reserves all that a sequence may come to, at once
        return layout
    return replace(layout, step_tokens=resolved.max_batch_tokens + draft_limit(options.speculation))


def working_memory(options: EngineOptions, resolved: Resolved, spec: DecoderSpec, layout: KVLayout, left: int) -> int:
    """About how many bytes of a GPU steps take at most, beside weights and pages; they and pages have what is `left`.
    Workers run their largest step at warm-up, so that one for which this is too little does not start."""
    element, slots = DTYPES[resolved.dtype].itemsize, resolved.max_seqs
    rows = min(resolved.max_batch_tokens, slots * (1 + draft_limit(options.speculation)))  # a draft token is a row too
    length = min(options.model.max_model_len or spec.max_position, left * layout.ranks // max(1, layout.token_bytes))
    drawn = min(rows, SLICE_ROWS)
    forward = (resolved.max_batch_tokens + slots) * spec.token_width * element
    logits = spec.vocab_size * (2 * rows * element + 6 * 4 * drawn)  # as they come, and drawn from
    known = length * (5 * slots + 40 * drawn)  # slots' tokens and pages; what penalties make of them
    # Freed pieces seldom fit the next step; libraries have some of their own
    return max(2 * forward + logits + known + GIB, min(COMPILING, left // 8))


class StateRoom(NamedTuple):
    """Room for the states of recurrent layers: a cell for each sequence and each draft token, one more for each while a
    snapshot is taken, and snapshots."""

    slots: int  # sequences that run at once: fewer than wished for, where their states would take most of memory
    cells: int  # for states and snapshots, the null cell among them; 0: there are no such layers
    bytes: int


def state_room(options: EngineOptions, layout: KVLayout, slots: int, size: int) -> StateRoom:
    """Half of the `size` bytes of KV memory, unless more is asked for."""
    if not layout.states:
        return StateRoom(slots, 0, 0)
    drafts, asked = draft_limit(options.speculation), options.cache.kv_snapshots
    cell = layout.state_pages * layout.page_bytes
    cells = size // 2 // cell
    if asked is not None:
        cells = slots * (2 + drafts) + asked
    elif options.scheduler.max_seqs is None:
        slots = max(1, min(slots, cells // (3 + drafts)))
    cells = max(cells - slots * drafts, slots * (3 if asked is None else 2))
    return StateRoom(slots, cells + 1, (cells + slots * drafts) * cell)


def kv_capacity(
    options: EngineOptions,
    hardware: Hardware,
    layout: KVLayout,
    *,
    slots: int,
    working: int,
    taken: int = 0,
    beside: int = 0,
) -> tuple[int, str]:
    """Pages (the null page included) and why so many. Of free memory, `taken` bytes are spoken for and, on a GPU,
    `working` needed by steps; `beside` each page a draft model needs so many. States of recurrent layers come first,
    for as many of the `slots` as `state_room` says."""
    if options.cache.kv_pages:
        return options.cache.kv_pages + 1, f"{options.cache.kv_pages} KV pages: as asked"
    size, why = kv_bytes(options, hardware, layout, working=working, taken=taken)
    room = max(0, size - state_room(options, layout, slots, size).bytes)
    return room // (layout.page_bytes + beside), f"KV memory {size / GIB:.2f} GiB: {why}"


def kv_bytes(
    options: EngineOptions, hardware: Hardware, layout: KVLayout, *, working: int, taken: int = 0
) -> tuple[int, str]:
    """Bytes for pages and states, and why so many."""
    left = max(0, hardware.memory - taken)
    if options.cache.kv_pages:
        return 2 * options.cache.kv_pages * layout.page_bytes, "as asked"
    if options.cache.kv_memory:
        return parse_size(options.cache.kv_memory), "as asked"
    if hardware.gpu:
        return max(0, left - working), f"what is free on the GPU but for {working / GIB:.1f} GiB to work in"
    ranks = options.device.ranks
    shared = "" if ranks == 1 else f", shared by {ranks} ranks"
    return min(left // 4, 4 * GIB) // ranks, f"a quarter of free memory, at most 4 GiB{shared}"


def capacity_for(
    options: EngineOptions, resolved: Resolved, layout: KVLayout, model: Runnable, drafter: Drafter | None
) -> tuple[Capacity, str]:
    """How many pages and which longest context, now that the weights are in; says why. What is asked for beyond the
    context the model was trained for is there for requests with a KV budget."""
    hardware = probe(resolved.device)
    if options.cache.kv_memory and parse_size(options.cache.kv_memory) > hardware.memory:
        free = f"the {hardware.memory / GIB:.1f} GiB of memory that are free"
        raise ConfigError(f"kv_memory {options.cache.kv_memory} is more than {free}; lower it")
    working, beside = working_memory(options, resolved, model.spec, layout, hardware.memory), 0
    if drafter is not None:
        beside = drafter.layout.page_bytes
        working += working_memory(options, resolved, drafter.model.spec, drafter.layout, hardware.memory)
    states = state_room(options, layout, resolved.max_seqs, kv_bytes(options, hardware, layout, working=working)[0])
    pages, why = kv_capacity(options, hardware, layout, slots=resolved.max_seqs, working=working, beside=beside)
    if states.cells:
        snapshots, size = states.cells - 1 - 2 * states.slots, layout.state_bytes / (1 << 20)
        why += f"; states of {states.slots} sequences and {snapshots} snapshots, {size:.2f} MiB each"
    asked = options.model.max_model_len or model.spec.max_position
    ropes = [layer.mixer.rope for layer in model.spec.layers]
    stretched = any(rope is not None and rope.kind == "dynamic" for rope in ropes)  # made to fit whatever is asked for
    longest = asked if stretched else min(asked, model.spec.max_position)
    if model.spec.encoder:
        pages, why = 1 + resolved.max_seqs * layout.pages_for(longest), "an encoder keeps no KV"
    fits = layout.tokens_in(pages - 1)
    if fits < 2:
        raise ConfigError(
            f"no room for KV pages: {pages} of {layout.page_bytes:,} bytes ({why}); "
            "raise kv_memory, or lower max_seqs, max_batch_tokens or max_model_len"
        )
    why += f"; {fits:,} tokens in {pages - 1:,} pages of {layout.dtype}"
    if fits < longest:
        if options.model.max_model_len and asked == longest:
            raise ConfigError(
                f"max_model_len {longest} needs more KV memory than there is ({fits} tokens fit); "
                "raise kv_memory or lower max_model_len"
            )
        cut = f"context cut from {longest} to the {fits} tokens that fit"
        if asking := next((name for name in ("kv_pages", "kv_memory") if getattr(options.cache, name)), None):
            log.warning("%s %s: %s", asking, getattr(options.cache, asking), cut)
        why += f"; {cut}"
        longest = fits
    most = asked if options.model.max_model_len else longest
    shifts = not (model.spec.learned_positions or model.spec.recurrent or layout.ranks > 1)
    if longest < most and shifts:
        why += f"; a request of more than {longest} tokens, up to {most}, needs a kv_budget"
    drafts = draft_limit(options.speculation)
    # On a GPU steps with drafts are captured, and have room, only where they are asked for at start; so have the states
    # of recurrent layers behind draft tokens.
    predicted_only = not drafts and resolved.device == "cpu" and not model.spec.recurrent
    capacity = Capacity(
        pages=pages,
        slots=states.slots,
        states=states.cells,
        snapshot_tokens=options.cache.snapshot_tokens,
        max_model_len=most,
        context=longest,
        rope_shifts=shifts,
        max_batch_tokens=max(resolved.max_batch_tokens, longest if model.spec.encoder else 0),
        whole=model.spec.encoder,
        step_target=resolved.step_target,
        depth=resolved.depth,
        late_draws=resolved.device != "cpu" and options.device.ranks == 1,
        drafts=PREDICTED_DRAFT_TOKENS if predicted_only else drafts,
        predicted_only=predicted_only,
        adapts=options.speculation.draft_adapt,
    )
    return capacity, why
