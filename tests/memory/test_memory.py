"""Pages, tables and prefixes: sharing, copying, sliding, promising, evicting."""

import re
from pathlib import Path
from random import Random

import pytest

import quire
from quire.memory import ContiguousPool, KVManager, PagePool, PageTable, PrefixIndex
from quire.types.hashing import RUN_PAGES, PageHasher
from quire.types.kv import NULL_PAGE, KVGroup, KVLayout, TokenShape, layout_for


def manager(*windows, pages=32, size=4, **options):
    groups = tuple(
        KVGroup(layers=(i,), tokens_per_page=size, kv_heads=1, head_dim=1, window=w)
        for i, w in enumerate(windows or (None,))
    )
    return KVManager(KVLayout(groups=groups, dtype="float32"), pages, **options)


def start(memory, tokens, salt=""):
    """A sequence that looks up its prefix, takes pages for the rest and publishes its prompt."""
    table = PageTable(len(memory.layout.groups))
    memory.hash_pages(table, tokens, salt)
    hit = memory.lookup(table, len(tokens))
    memory.adopt(table, hit)
    assert memory.extend(table, hit.tokens, len(tokens)) is not None
    memory.publish(table, len(tokens), tokens, salt)
    return table, hit


def test_second_sequence_shares_full_pages_of_the_first():
    memory = manager()
    first, miss = start(memory, list(range(10)))
    second, hit = start(memory, [*range(9), 99, 100])
    assert (miss.tokens, hit.tokens) == (0, 8)
    assert first.pages[0][:2] == second.pages[0][:2] and first.pages[0][2] != second.pages[0][2]
    memory.check([first, second])


def test_a_whole_prompt_in_the_cache_still_computes_its_last_token():
    memory = manager()
    start(memory, list(range(8)))
    _, hit = start(memory, list(range(8)))
    assert hit.tokens == 4


def test_salts_and_keys_separate_tenants():
    memory = manager()
    start(memory, list(range(8)), salt="a")
    _, hit = start(memory, [*range(8), 1], salt="b")
    assert hit.tokens == 0
    one, other = PageHasher(b"k" * 32, 4), PageHasher(b"j" * 32, 4)
    assert one.root("") != other.root("") and one.root("a") != one.root("b")
    assert one.chain(one.root(""), [1, 2, 3, 4]) != other.chain(other.root(""), [1, 2, 3, 4])


def test_hash_covers_everything_before():
    hasher = PageHasher(b"k" * 32, 2)
    a = hasher.chain(hasher.root(""), [1, 2, 3, 4])
    b = hasher.chain(hasher.root(""), [9, 2, 3, 4])
    assert a[1] != b[1]


def test_remembered_runs_name_pages_as_hashing_does():
    hasher, fresh = (PageHasher(b"k" * 32, 2) for _ in range(2))
    rng = Random(5)
    prompt = [rng.randrange(1 << 30) for _ in range(2 * RUN_PAGES * 5 + 3)]
    for length in (3, 2 * RUN_PAGES, 2 * RUN_PAGES * 3 + 1, len(prompt), len(prompt)):
        whole = hasher.chain(hasher.root("t"), prompt[:length])
        one_by_one, parent = [], fresh.root("t")
        for page in range(length // 2):
            (parent,) = fresh.chain(parent, prompt[2 * page : 2 * page + 2])
            one_by_one.append(parent)
        assert whole == one_by_one
        assert hasher.chain(whole[0], prompt[:length], first=1) == whole[1:] if whole else True
    changed = [*prompt[:40], prompt[40] + 1, *prompt[41:]]
    assert hasher.chain(hasher.root("t"), changed)[:20] == whole[:20]
    assert hasher.chain(hasher.root("t"), changed)[20] != whole[20]


@pytest.mark.parametrize("hole", [0, 1, 63, 64, 65, 127, 128, 129, 130])
def test_a_run_of_pages_ends_at_the_first_that_is_not_held(hole):
    index, names = PrefixIndex(), [bytes([i]) for i in range(130)]
    for page, name in enumerate(names, 1):
        if page - 1 != hole:
            index.publish((0, name), page)
    assert index.run(0, iter(names)) == list(range(1, hole + 1))
    assert index.run(1, names) == index.run(0, []) == []


def test_remembered_runs_are_bounded(monkeypatch):
    monkeypatch.setattr("quire.types.hashing.MAX_RUNS", 3)
    hasher = PageHasher(b"k" * 32, 1)
    for token in range(50):
        hasher.chain(hasher.root(""), [token] * RUN_PAGES)
    assert len(hasher._runs) == 3


def test_released_pages_stay_findable_until_taken_least_recently_used_first():
    memory = manager(pages=1 + 4)
    old, _ = start(memory, [1] * 8)
    memory.release(old, 8)
    new, _ = start(memory, [2] * 8)
    memory.release(new, 8)
    probe = PageTable(1)
    memory.hash_pages(probe, [1] * 9, "")
    assert memory.lookup(probe, 9).tokens == 8
    taken = memory.pool.take(2)
    assert memory.lookup(probe, 9).tokens == 0, "the oldest pages went first"
    probe = PageTable(1)
    memory.hash_pages(probe, [2] * 9, "")
    assert memory.lookup(probe, 9).tokens == 8
    memory.pool.release(taken)


def test_fork_shares_and_the_first_writer_copies():
    memory = manager()
    parent, _ = start(memory, list(range(6)))
    child = memory.fork(parent)
    assert memory.pool.used == 2
    change = memory.extend(child, 6, 7)
    assert change.copies == [(parent.pages[0][1], child.pages[0][1])]
    assert memory.extend(parent, 6, 7).copies == [], "the last holder writes in place"
    memory.check([parent, child])
    memory.release(child, 7)
    memory.release(parent, 7)
    assert memory.pool.used == 0


def test_fork_at_a_page_boundary_copies_nothing():
    memory = manager()
    parent, _ = start(memory, list(range(8)))
    child = memory.fork(parent)
    assert memory.extend(child, 8, 9).copies == []


def test_windows_give_back_what_no_query_sees():
    memory = manager(6)
    table, _ = start(memory, list(range(16)))
    memory.extend(table, 16, 17)
    assert table.pages[0][:2] == [NULL_PAGE] * 2 and NULL_PAGE not in table.pages[0][2:]
    assert memory.pool.used == 3
    memory.check([table])


def test_a_hit_is_what_every_group_can_serve():
    memory = manager(None, 6)
    table, _ = start(memory, list(range(16)))
    memory.extend(table, 16, 17)  # the window group lets go of its first pages
    memory.pool.take(memory.pool.available - 2 + 2 - memory.pool.cached)  # blanks only
    probe = PageTable(2)
    memory.hash_pages(probe, list(range(17)), "")
    hit = memory.lookup(probe, 17)
    assert hit.tokens == 16, "the window needs its last pages only"
    assert hit.pages[1][:2] == [NULL_PAGE] * 2


def test_promised_pages_make_others_wait_and_broken_promises_do_not():
    memory = manager()
    table = PageTable(1)
    memory.hash_pages(table, list(range(12)), "")
    memory.promise(table, 12)
    waiter = PageTable(1)
    memory.hash_pages(waiter, list(range(13)), "")
    assert memory.lookup(waiter, 13).waits
    memory.extend(table, 0, 8)
    memory.publish(table, 8, list(range(12)), "")
    hit = memory.lookup(waiter, 13)
    assert hit.tokens == 8 and hit.waits
    memory.release(table, 8)
    assert not memory.lookup(waiter, 13).waits


def test_extend_without_pages_changes_nothing():
    memory = manager(pages=1 + 2)
    table, _ = start(memory, list(range(8)))
    before = [list(p) for p in table.pages]
    assert memory.extend(table, 8, 9) is None
    assert table.pages == before
    memory.check([table])


def test_pool_refuses_double_release():
    pool = PagePool(4, PrefixIndex())
    (page,) = pool.take(1)
    assert pool.release([page]) == [page]
    with pytest.raises(AssertionError):
        pool.release([page])


def test_contiguous_pool_hands_out_unbroken_runs():
    pool = ContiguousPool(1 + 8, PrefixIndex())
    a, b, c = pool.take(3), pool.take(2), pool.take(3)
    assert [a, b, c] == [[1, 2, 3], [4, 5], [6, 7, 8]]
    pool.release([*a, *c])
    assert pool.available == 6 and pool.take(4) is None, "six are free, but not four in a row"
    assert pool.take(3) == [1, 2, 3]
    pool.check()


def test_layout_groups_layers_by_window_in_equal_bytes():
    layout = layout_for(
        [TokenShape(2, 4, window) for window in [None, 8, None, 8, None, None]], page_size=16, dtype="float16"
    )
    full, window = layout.groups
    assert full.layers == (0, 2, 4, 5) and window.layers == (1, 3)
    assert (full.tokens_per_page, window.tokens_per_page) == (16, 32)
    assert layout.page_bytes == 16 * 4 * 2 * 2 * 4 * 2 and layout.alignment == 32
    assert layout.token_bytes == 6 * 2 * 2 * 4 * 2


def test_waste_counts_slots_never_filled():
    memory = manager()
    table, _ = start(memory, list(range(6)))
    memory.release(table, 6)
    assert (memory.slots_allocated, memory.slots_filled) == (8, 6)


def test_only_this_room_changes_the_pool_and_the_index():
    """Others ask the manager: what they may do to pages is one list, in one place."""
    source = Path(quire.__file__).parent
    changing = re.compile(
        r"\b(pool|index)\.(share|release|take|forget\w*|leaving|peak|publish|promise|withdraw|clear)\b(?!\s*[<>=]=)"
    )
    found = [
        f"{path.relative_to(source)}: {line.strip()}"
        for path in source.rglob("*.py")
        if path.parent.name != "memory"
        for line in path.read_text(encoding="utf-8").splitlines()
        if changing.search(line) and "pages_peak=" not in line
    ]
    assert not found
