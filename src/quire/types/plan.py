"""The plan of one step, and its result.

There is no prefill phase and no decode phase. A row says "slot s: compute the KV of `count` tokens from position
`start`"; a sample says "from the last position of row r, sample the next token of slot s". Chunked prefill is a
row with many tokens and no sample, decode a row of one with one sample, `n` branches one row with n samples.

The worker keeps, per slot, all known tokens, the page table and the sampling state; a plan sends only what
changed. Token values sampled by an earlier step are read from the slot on the device, so a plan never needs
them: it can be made while that step still runs.

A row may carry a draft budget: the worker then drafts up to so many tokens that follow, computes them too, and samples
at each of their positions. The samples up to the first that differs from its draft token are accepted, and are what
steps without drafts would have sampled; the rest is discarded. Drafts never leave the worker.

Order inside a step: device pages that transfers read, frees, admits, writes, page deltas, page copies, rope shifts,
probes, forward over rows, samples (sampled tokens are stored into their slots). Samples under a grammar may come later,
when the tokens before them were read, but before any step that is submitted after that (`Capacity.late_draws`). A plan
with nothing to compute waits for a transfer, but not for long.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import msgspec

from quire.types.sampling_params import SamplingParams
from quire.types.transfer import Drop, TierSpec, Transfer, TransferDone


class Admit(msgspec.Struct):
    """Fill a slot: everything needed to rebuild its state, wherever the sequence was before."""

    slot: int
    key: str  # "request/branch", for logs and for the executor's own books
    tokens: list[int]  # prompt, then tokens generated so far
    prompt_len: int
    params: SamplingParams
    seed: int
    branch: int
    stop_ids: list[int]  # ids that end the sequence; masked while fewer than min_tokens are out
    salt: str = ""  # drafts learnt from this sequence serve none of another salt
    prediction: list[int] = []  # what the caller thinks the answer will be
    adapter: int = 0  # slot of its LoRA adapter; 0: none
    unread: int = 0  # of its tokens, those at the beginning that neither rows nor samples read


class Write(msgspec.Struct):
    """Tokens of a slot, from position `start`, that the device did not sample itself."""

    slot: int
    start: int
    tokens: list[int]


class PageDelta(msgspec.Struct):
    """Table of (slot, group): entries from `index` on become `pages`."""

    slot: int
    group: int
    index: int
    pages: list[int]


class RopeShift(msgspec.Struct):
    """KV entries at another position: copied from slots `sources` to `targets` (page * tokens_per_page + offset), the
    keys of every layer rotated by `by` positions. All sources of a plan's copies and shifts are read before any
    target is written."""

    group: int
    sources: list[int]
    targets: list[int]
    by: int


class Row(msgspec.Struct, gc=False):
    """Compute KV for positions start .. start + count - 1 of a slot.

    With `score`, the log-probability of the token after each of these positions is wanted too (the known token there:
    prompt logprobs). `pool` asks for the hidden states (after the final norm): "mean" for the sum over these
    positions, "cls" and "last" for that of the first and the last, "classify" for the scores of classes. `drafts`:
    how many tokens may be drafted after these; pages are there for all of them, and the row has one sample. `shift`:
    how many of the slot's tokens before these have no KV any more; what is left lies together, and the token at
    `start` takes KV position start - shift. `mass` asks how much attention these tokens pay to each page, `token_mass`
    to each token. Of models with recurrent layers: `state` is the cell whose state the row goes on from, `states` says
    after how many of its tokens which cell gets the state; the last pair is the row's end.
    """

    slot: int
    start: int
    count: int
    score: bool = False
    pool: str = ""
    drafts: int = 0
    shift: int = 0
    mass: bool = False
    token_mass: bool = False
    state: int = 0
    states: Sequence[tuple[int, int]] = ()


class Probe(msgspec.Struct):
    """How far the KV of positions start .. start + count - 1 of a slot is from what their context makes of them: the
    first layers are computed, their KV is written, and the result says how much it changed."""

    slot: int
    start: int
    count: int


class Sample(msgspec.Struct, gc=False):
    """Sample the token at `position` of `slot` from the last logits of rows[row]."""

    row: int
    slot: int
    position: int


class StepPlan(msgspec.Struct):
    step: int
    rows: list[Row] = []
    samples: list[Sample] = []
    frees: list[int] = []
    admits: list[Admit] = []
    writes: list[Write] = []
    deltas: list[PageDelta] = []
    copies: list[tuple[int, int]] = []  # (from page, to page): copy-on-write, before the forward pass
    rope_shifts: list[RopeShift] = []
    probes: list[Probe] = []
    transfers: list[Transfer] = []
    drops: list[Drop] = []
    rests: bool = False  # no proposer reads this step's hidden states: they need not be returned

    @property
    def tokens(self) -> int:
        return sum(row.count for row in self.rows)

    @property
    def computes(self) -> bool:
        return bool(self.rows or self.probes)


class TokenLogprobs(msgspec.Struct, array_like=True, gc=False):
    """Log-probabilities at one position: the token that is there, its rank (1 = most likely), and the top."""

    token: int
    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


class StepResult(msgspec.Struct):
    """`tokens[i]` belongs to `plan.samples[i]`: the accepted draft tokens, the token sampled after them, and those that
    a grammar forces after it. Those forced are not in the slot, unless a draft had them; a later plan writes them.
    Nothing is there if nothing was drawn: forced tokens turned out to come after the sample before."""

    step: int
    tokens: list[list[int]]
    drafts: dict[int, tuple[int, int]] = {}  # by sample index: tokens drafted, and how many were accepted
    forced: dict[int, list[int]] = {}  # by sample index: which of its tokens, by index, a grammar forced
    logprobs: dict[int, list[TokenLogprobs]] = {}  # by sample index, one entry per token that was not forced
    scores: dict[int, list[TokenLogprobs]] = {}  # by row index, one entry per computed position
    pooled: dict[int, list[float]] = {}  # by row index: what `pool` asked for
    deviations: list[list[float]] = []  # by probe, one for each position: squares, relative to the mean of the values
    mass: dict[int, list[float]] = {}  # by row index: attention paid to each page (or token), summed
    ended: list[int] = []  # samples after which a grammar allows nothing more
    errors: dict[int, str] = {}  # by sample index: why its sequence cannot go on
    deferred: list[int] = []  # samples that are not told of yet: their grammar takes long to say what follows
    late: list[StepResult] = []  # of earlier steps, samples that were deferred; all their others are `deferred`
    seconds: float = 0.0  # time the device was busy with it
    launch_seconds: float = 0.0  # of these, until the host had launched all of it
    padding: int = 0  # token rows computed only to fill a captured size
    attention_bytes: tuple[int, int] = (0, 0)  # that sparse attention read, and those of all pages
    exchanged_bytes: int = 0  # that a parallel rank sent to others
    transfers: list[TransferDone] = []  # that ended lately, whichever plan began them


class Capacity(msgspec.Struct, frozen=True):
    """What an executor can hold: the limits within which the scheduler plans."""

    pages: int  # page 0 is the null page and is not among those to hand out
    slots: int
    max_model_len: int  # tokens one sequence may have
    max_batch_tokens: int
    depth: int  # steps in flight
    late_draws: bool = False  # whether a step may be launched before what it may draw is known (under a grammar)
    drafts: int = 0  # longest draft for a row, in tokens
    predicted_only: bool = False  # ... and only for sequences whose answer their caller has predicted
    adapts: bool = True  # whether drafts are shorter, or none, where that pays better
    tiers: tuple[TierSpec, ...] = ()  # below the device, fastest first
    context: int = 0  # KV entries one sequence may have (what the model can attend to); 0: as many as tokens
    rope_shifts: bool = False  # whether cached keys can be moved to other positions
    step_target: float = 0.0  # seconds a step may take while answers are streamed; 0: any
    naming: bytes = b""  # key of the page hashes; empty: any, they are not shared
    states: int = 0  # cells for states of recurrent layers, the null cell among them
    whole: bool = False  # an encoder: sequences are computed in one row each, and draw no tokens
    snapshot_tokens: int = 0  # of a prompt, between one snapshot of its state and the next
    layerwise: bool = False  # whether pages are handed over as layers of the step that fills them are written
    captured: tuple[tuple[int, int], ...] = ()  # (tokens, rows) that steps with rows of several tokens are padded to

    @property
    def longest(self) -> int:
        return self.context or self.max_model_len


def captured_size(sizes: Sequence[tuple[int, int]], tokens: int, rows: int) -> tuple[int, int] | None:
    """The first of the `sizes`, in ascending order, that holds so many tokens in so many rows; padding takes a row."""
    for at in range(bisect_left(sizes, (tokens, rows)), len(sizes)):
        if sizes[at][1] > rows or sizes[at] == (tokens, rows):
            return sizes[at]
    return None
