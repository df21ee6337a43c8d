"""Numbers of sequences, the least first."""

import random
from math import inf

from quire.scheduling.policies.sequence_heap import MOST_STALE, SequenceHeap


def test_it_is_what_a_dict_with_a_search_would_be_and_does_not_grow():
    rng, heap, numbers = random.Random(3), SequenceHeap(), {}
    for _ in range(20_000):
        id, number = rng.randrange(40), rng.choice([rng.random(), 5.0, 1e6 + rng.random()])
        match rng.randrange(4):
            case 0 | 1:
                heap.put(id, number)
                numbers[id] = number
            case 2:
                assert heap.drop(id) == (numbers.pop(id, None) is not None)
            case 3:
                bound = rng.choice([0.1, 0.5, 6.0])
                below = sorted((number, id) for id, number in numbers.items() if number < bound)
                assert heap.take_below(bound) == [id for _, id in below]
                for _, id in below:
                    del numbers[id]
        assert heap.least == min(numbers.values(), default=inf)
        assert heap.get(id) == numbers.get(id, inf) and (id in heap) == (id in numbers)
        assert len(heap._heap) <= 2 * 40 + MOST_STALE + 1
