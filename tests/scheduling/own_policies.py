"""Policies as an operator would write them, in a module of their own; `--scheduler own_policies:LongestPromptFirst`."""

from collections import Counter, defaultdict

from quire.scheduling import Policy
from quire.types.policy import EventKind


class LongestPromptFirst(Policy):
    """Displaces a running sequence whose prompt is less than half as long."""

    def key(self, seq):
        return (-seq.prompt,)

    def displaces(self, waiting, running):
        return waiting.prompt > 2 * running.prompt


class LongPromptsDisplace(Policy):
    """First come, first served, but any longer prompt displaces a shorter one: the order says otherwise."""

    def key(self, seq):
        return (seq.arrival,)

    def displaces(self, waiting, running):
        return waiting.prompt > running.prompt


class LeastServedTenantFirst(Policy):
    """By how many token rows were computed for a tenant: keys change as tenants are served."""

    observes = (EventKind.ARRIVED, EventKind.COMPUTED, EventKind.FINISHED)

    def __init__(self, options):
        super().__init__(options)
        self.served, self.live = {}, {}

    def key(self, seq):
        return self.served.get(seq.tenant, 0), seq.arrival

    def observe(self, event):
        changed = set()
        for seq, tokens in event.sequences:
            if event.kind is EventKind.ARRIVED:
                self.live.setdefault(seq.tenant, {})[seq.id] = None
            elif event.kind is EventKind.FINISHED:
                self.live.get(seq.tenant, {}).pop(seq.id, None)
            else:
                self.served[seq.tenant] = self.served.get(seq.tenant, 0) + tokens
                changed.add(seq.tenant)
        return [id for tenant in sorted(changed) for id in self.live[tenant]]


class LeastServedFirst(Policy):
    """By token rows computed for the sequence itself."""

    observes = (EventKind.COMPUTED,)

    def key(self, seq):
        return (seq.attained,)

    def observe(self, event):
        return [seq.id for seq, _ in event.sequences]


class Counting(Policy):
    """Of what it was told, by sequence."""

    observes = tuple(EventKind)

    def __init__(self, options):
        super().__init__(options)
        self.told = defaultdict(Counter)

    def key(self, seq):
        return (seq.arrival,)

    def observe(self, event):
        for seq, _ in event.sequences:
            self.told[seq.id][event.kind.name] += 1
        return ()


class RowsSeen(Policy):
    """As they come, and what every step computes."""

    observes = (EventKind.COMPUTED,)

    def __init__(self, options):
        super().__init__(options)
        self.seen = []

    def key(self, seq):
        return (seq.arrival,)

    def observe(self, event):
        rows = [(seq.request, tokens) for seq, tokens in event.sequences]
        assert len(event.sequences) == len(rows) and event.sequences[-1][0].request == rows[-1][0]
        self.seen.append(rows)
        return ()
