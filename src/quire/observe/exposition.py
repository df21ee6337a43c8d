"""Metrics as Prometheus text: every number under our own name and, where vLLM has the like, under its name too.

Labels are vLLM's (model_name, engine), so dashboards made for it load. Refuses to know: how numbers are gathered.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from quire.observe.metrics import Metrics
from quire.types.events import EngineStats
from quire.types.histogram import Histogram
from quire.types.memory_use import resident_bytes

_Plain = type[GaugeMetricFamily] | type[CounterMetricFamily]

LABELS = ("model_name", "engine")


def render(*metrics: Metrics) -> bytes:
    """Of one model or of several, told apart by their label."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Together([_Exposition(each, process=not at) for at, each in enumerate(metrics)]))
    return generate_latest(registry)


class _Together(Collector):
    """A metric has one heading, however many models have samples of it."""

    def __init__(self, parts: list[_Exposition]):
        self.parts = parts

    def collect(self) -> Iterator[Metric]:
        found: dict[str, Metric] = {}
        for part in self.parts:
            for metric in part.collect():
                if (known := found.setdefault(metric.name, metric)) is not metric:
                    known.samples += metric.samples
        yield from found.values()


class _Exposition(Collector):
    """`process`: with what is the whole process's, which is told once."""

    def __init__(self, metrics: Metrics, process: bool):
        self.metrics = metrics
        self.process = process
        self.labels = (metrics.model, "0")

    def collect(self) -> Iterator[Metric]:
        metrics = self.metrics
        yield from self._felt()
        yield from self._counter("prompt_tokens", "Prompt tokens of accepted requests.", metrics.prompt_tokens)
        yield from self._counter("generation_tokens", "Tokens generated.", metrics.output_tokens)
        yield from self._counter("prompt_tokens_cached", "Prompt tokens found in a cache.", metrics.cached_tokens)
        sources = {"local_compute": metrics.computed_tokens, "local_cache_hit": metrics.cached_tokens}
        for name in ("quire_prompt_tokens_by_source", "vllm:prompt_tokens_by_source"):
            yield from self._by(name, "Prompt tokens computed, and found in a cache.", "source", sources)
        help = "Sequences ended, by reason."
        yield from self._by("quire_request_finished", help, "reason", metrics.finished)
        yield from self._by("vllm:request_success", help, "finished_reason", metrics.finished)
        if metrics.engine_up is not None:
            help = "Whether the engine answered last time."
            yield from self._gauge("engine_up", help, metrics.engine_up, shared=False)
        memory = {"api": resident_bytes() + metrics.workers_memory} if self.process else {}
        if metrics.stats is not None:
            yield from self._engine(metrics.stats)
            memory["engine"] = metrics.stats.memory
        family = GaugeMetricFamily(
            "quire_process_memory_bytes", "Resident memory, by process.", labels=(*LABELS, "process")
        )
        for name, size in memory.items():
            family.add_metric((*self.labels, name), size)
        yield family
        if metrics.energy is not None and metrics.energy.available:
            yield from self._energy(metrics.energy.read(), metrics.output_tokens)

    def _felt(self) -> Iterator[Metric]:
        metrics = self.metrics
        yield from self._histogram("time_to_first_token_seconds", "Arrival to first token.", metrics.ttft)
        yield from self._histogram("inter_token_latency_seconds", "Gap between tokens of a sequence.", metrics.gap)
        yield from self._histogram(
            "time_per_output_token_seconds",
            "Per sequence: time after the first token, by further token.",
            metrics.tpot,
            theirs="request_time_per_output_token_seconds",
        )
        yield from self._histogram("e2e_request_latency_seconds", "Arrival to last token.", metrics.e2e)
        yield from self._histogram("request_prompt_tokens", "Prompt length.", metrics.prompt_size)
        yield from self._histogram("request_generation_tokens", "Tokens generated per sequence.", metrics.output_size)
        yield from self._histogram(
            "request_max_num_generation_tokens", "Longest sequence of each request.", metrics.longest_output
        )
        yield from self._histogram("request_params_n", "Sequences asked for by a request.", metrics.branches)
        yield from self._histogram("request_params_max_tokens", "Tokens a request may draw.", metrics.max_tokens)
        computed = "Prompt tokens of a request that were not cached."
        yield from self._histogram("request_prefill_kv_computed_tokens", computed, metrics.prefill_size)
        yield from self._cache_config()

    def _cache_config(self) -> Iterator[Metric]:
        info = self.metrics.info
        if info is None:
            return
        facts = {
            "block_size": info.page_size,
            "cache_dtype": info.kv_dtype,
            "enable_prefix_caching": info.prefix_cache,
            "num_gpu_blocks": info.pages,
        }
        for prefix in ("quire_", "vllm:"):
            family = GaugeMetricFamily(
                f"{prefix}cache_config_info", "How KV memory is set up.", labels=(*LABELS, *facts)
            )
            family.add_metric((*self.labels, *map(str, facts.values())), 1)
            yield family

    def _engine(self, stats: EngineStats) -> Iterator[Metric]:
        used = stats.pages_used / stats.pages_total if stats.pages_total else 0.0
        yield from self._gauge("num_requests_running", "Sequences in the running batch.", stats.running)
        yield from self._gauge("num_requests_waiting", "Sequences waiting to run.", stats.waiting)
        waits = {"capacity": stats.waiting - stats.deferred, "deferred": stats.deferred}
        yield from self._parts("num_requests_waiting_by_reason", "Sequences waiting, by why.", "reason", waits)
        level = stats.sleep_level
        sleep = {"awake": level == 0, "weights_offloaded": level == 1, "discard_all": level == 2}
        yield from self._parts("engine_sleep_state", "Whether the engine lends its memory.", "sleep_state", sleep)
        yield from self._gauge("kv_cache_usage_perc", "Share of KV pages in use, 0 to 1.", used)
        yield from self._gauge("kv_waste_ratio", "Share of KV slots given back unfilled.", stats.kv_waste, shared=False)
        yield from self._gauge("kv_pages_cached", "Free pages holding a prefix.", stats.pages_cached, shared=False)
        if stats.states_total:
            yield from self._gauge(
                "state_cells", "Cells for states of recurrent layers.", stats.states_total, shared=False
            )
            yield from self._gauge("state_cells_used", "Of them, held by sequences.", stats.states_used, shared=False)
            yield from self._gauge(
                "state_snapshots", "Of them, snapshots for prefix hits.", stats.snapshots, shared=False
            )
        yield from self._gauge("kv_bytes", "Bytes of the KV page pool.", stats.kv_bytes, shared=False)
        yield from self._counter("prefix_cache_queries", "Prompt tokens looked up.", stats.prompt_tokens)
        yield from self._counter("prefix_cache_hits", "Prompt tokens found in the cache.", stats.cached_tokens)
        moved = "Prompt tokens of chunks copied from another place."
        yield from self._counter("blended_tokens", moved, stats.blended_tokens, shared=False)
        again = "Tokens of chunks computed again because their place changes them."
        yield from self._counter("recomputed_tokens", again, stats.recomputed_tokens, shared=False)
        yield from self._counter("num_preemptions", "Sequences that lost their pages.", stats.preemptions)
        if stats.lengths_predicted:
            within = {
                "any": stats.lengths_predicted,
                "likely": stats.lengths_below_likely,
                "high": stats.lengths_below_high,
            }
            help = "Answers whose length was predicted, and those not longer than the median and the 90% quantile."
            yield from self._by("quire_length_predictions", help, "within", within)
        good = "Answers that ended well and met their targets for the first token and for each, where they had any."
        yield from self._counter("goodput_requests", good, stats.met_slo, shared=False)
        missed = {"ttft": stats.missed_ttft, "tpot": stats.missed_tpot}
        help = "Answers that ended well, but missed the target for their first token or for each."
        yield from self._by("quire_slo_missed", help, "target", missed)
        given_up = "Requests that the scheduler ended because their target could not be met."
        yield from self._counter("requests_given_up", given_up, stats.gave_up, shared=False)
        yield from self._counter("spec_decode_num_drafts", "Drafts of one token or several.", stats.drafts)
        yield from self._counter("spec_decode_num_draft_tokens", "Tokens drafted.", stats.drafted_tokens)
        yield from self._counter("spec_decode_num_accepted_tokens", "Drafted tokens accepted.", stats.accepted_tokens)
        at = {str(place): count for place, count in enumerate(stats.accepted_at)}
        for name in ("quire_spec_decode_num_accepted_tokens_per_pos", "vllm:spec_decode_num_accepted_tokens_per_pos"):
            yield from self._by(name, "Drafted tokens accepted, by their place in the draft.", "position", at)
        evicted = "Tokens whose KV was dropped to keep a request's budget."
        yield from self._counter("evicted_tokens", evicted, stats.evicted_tokens, shared=False)
        yield from self._counter("steps", "Engine steps.", stats.steps, shared=False)
        saved = "Tokens that a grammar forced: steps saved."
        yield from self._counter("forced_tokens", saved, stats.forced_tokens, shared=False)
        yield from self._counter("step_seconds", "Time the device was busy.", stats.step_seconds, shared=False)
        yield from self._counter("token_rows", "Token rows computed, padding included.", stats.rows, shared=False)
        yield from self._by("quire_token_rows_wasted", "Token rows computed in vain, by cause.", "cause", stats.waste)
        if stats.exchanged_bytes:
            sent = "Bytes that a parallel rank sent to the others."
            yield from self._counter("exchanged_bytes", sent, stats.exchanged_bytes, shared=False)
        yield from self._tiers(stats)
        ratio = "Waits for a first token, over those predicted when the request was queued."
        yield from self._histogram("admission_wait_ratio", ratio, stats.wait_ratios, theirs="")
        yield from self._handovers(stats)
        yield from self._histogram("request_queue_time_seconds", "Arrival to admission.", stats.queue_time)
        yield from self._histogram("request_prefill_time_seconds", "Admission to first token.", stats.prefill_time)
        yield from self._histogram("request_decode_time_seconds", "First token to last.", stats.decode_time)
        yield from self._histogram("request_inference_time_seconds", "Admission to last token.", stats.inference_time)
        lost = "Times a sequence lost its pages."
        yield from self._histogram("request_num_preemptions", lost, stats.request_preemptions)
        # Without _total as in vLLM: the name of a histogram, however it ends.
        yield from self._histogram(
            "step_tokens", "Tokens computed in a step.", stats.step_tokens, theirs="iteration_tokens_total"
        )

    def _tiers(self, stats: EngineStats) -> Iterator[Metric]:
        if not stats.tiers:
            return
        pages = GaugeMetricFamily("quire_kv_tier_pages", "KV pages in a tier.", labels=(*LABELS, "tier"))
        for tier in stats.tiers:
            pages.add_metric((*self.labels, tier.name), tier.pages)
        yield pages
        for field, help in (
            ("hit_tokens", "Prompt tokens a tier delivered."),
            ("bytes_in", "Bytes saved to a tier."),
            ("bytes_out", "Bytes loaded from a tier."),
            ("load_seconds", "Time loads from a tier took."),
            ("missed", "Pages gone, damaged or foreign when asked for."),
            ("skipped", "Pages not saved, too many were on their way."),
            ("failed", "Pages a tier could not store."),
        ):
            values = {tier.name: getattr(tier, field) for tier in stats.tiers}
            yield from self._by(f"quire_kv_tier_{field}", help, "tier", values)
        delivered = sum(tier.hit_tokens for tier in stats.tiers)
        asked = "Prompt tokens looked up in tiers: those the device did not hold."
        yield from self._counter("external_prefix_cache_queries", asked, stats.tier_queries)
        found = "Prompt tokens found in tiers."
        yield from self._counter("external_prefix_cache_hits", found, delivered)
        waits = "Time in which only loads were under way."
        yield from self._counter("kv_tier_wait_seconds", waits, stats.tier_waits, shared=False)
        saved = "Estimated computing saved by tiers, loading subtracted."
        yield from self._gauge("kv_tier_saved_seconds", saved, stats.tier_saved, shared=False)
        yield from self._counter("kv_swaps", "Preemptions whose pages were kept.", stats.swaps, shared=False)

    def _handovers(self, stats: EngineStats) -> Iterator[Metric]:
        if (found := stats.handovers) is None:
            return
        elsewhere = "Prompts computed by a prefill replica, whose pages came."
        yield from self._counter("remote_prefills", elsewhere, found.remote_prefills, shared=False)
        for field, help in (
            ("started", "Hand-overs of KV pages that engines asked others for."),
            ("completed", "... of them, those whose pages all came."),
            ("timed_out", "... those that waited in vain for some."),
            ("peers_lost", "... those whose source was lost."),
            ("failed", "Times that KV pages could not be sent to another engine."),
            ("pages_sent", "KV pages sent to other engines."),
            ("bytes_sent", "Bytes of them."),
            ("pages_received", "KV pages received from other engines."),
            ("bytes_received", "Bytes of them."),
            ("seconds", "Time from asking to the last page."),
            ("refused", "Connections without the replicas' key."),
            ("dropped", "Frames that were malformed, forged, replayed or late."),
        ):
            yield from self._counter(f"kv_handover_{field}", help, getattr(found, field), shared=False)

    def _energy(self, joules: Mapping[str, float], tokens: int) -> Iterator[Metric]:
        yield from self._by("quire_energy_joules", "Energy used since the server started, by meter.", "meter", joules)
        if tokens:
            help = "Joules per generated token since the server started."
            yield from self._gauge("energy_joules_per_token", help, sum(joules.values()) / tokens, shared=False)

    def _histogram(self, ours: str, help: str, histogram: Histogram, theirs: str | None = None) -> Iterator[Metric]:
        """`theirs`: what vLLM calls it, if that is another name; empty: it has no such thing."""
        buckets = histogram.cumulative()
        names = [f"quire_{ours}"] if theirs == "" else [f"quire_{ours}", f"vllm:{theirs or ours}"]
        for name in names:
            family = HistogramMetricFamily(name, help, labels=LABELS)
            family.add_metric(self.labels, buckets, histogram.total)
            yield family

    def _parts(self, name: str, help: str, label: str, values: Mapping[str, float]) -> Iterator[Metric]:
        """A gauge in parts, one per value of a label of its own."""
        for prefix in ("quire_", "vllm:"):
            family = GaugeMetricFamily(prefix + name, help, labels=(*LABELS, label))
            for key, value in values.items():
                family.add_metric((*self.labels, key), value)
            yield family

    def _by(self, name: str, help: str, label: str, values: Mapping[str, float]) -> Iterator[Metric]:
        """A counter in parts, one per value of a label of its own."""
        family = CounterMetricFamily(name, help, labels=(*LABELS, label))
        for key, value in values.items():
            family.add_metric((*self.labels, key), value)
        yield family

    def _gauge(self, name: str, help: str, value: float, shared: bool = True) -> Iterator[Metric]:
        return self._plain(GaugeMetricFamily, name, help, value, shared)

    def _counter(self, name: str, help: str, value: float, shared: bool = True) -> Iterator[Metric]:
        return self._plain(CounterMetricFamily, name, help, value, shared)

    def _plain(self, kind: _Plain, name: str, help: str, value: float, shared: bool) -> Iterator[Metric]:
        """One number, under our name and, where vLLM has the like (`shared`), under its name too."""
        for prefix in ("quire_", "vllm:") if shared else ("quire_",):
            family = kind(prefix + name, help, labels=LABELS)
            family.add_metric(self.labels, value)
            yield family
