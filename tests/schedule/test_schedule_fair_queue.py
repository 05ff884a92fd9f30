"""FairQueue without a server: round robin over tenants, slots, shares of the cache, priorities."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from verbatim.schedule.fair_queue import FairQueue, Waiting


def drain(queue: FairQueue) -> list[str]:
    out = []
    while (entry := queue.take()) is not None:
        out.append(entry.item)
        queue.release(entry)
    return out


def test_tenants_alternate_however_many_entries_one_has() -> None:
    queue = FairQueue(slots=1, tokens=100)
    for i in range(5):
        queue.add(f"a{i}", tenant="a")
    queue.add("b0", tenant="b")
    queue.add("c0", tenant="c")
    assert drain(queue) == ["a0", "b0", "c0", "a1", "a2", "a3", "a4"]


def test_within_a_tenant_a_smaller_priority_starts_first() -> None:
    queue = FairQueue(slots=1, tokens=100)
    for name, priority in (("late", 5), ("first", -1), ("second", 0), ("third", 0)):
        queue.add(name, priority=priority)
    assert drain(queue) == ["first", "second", "third", "late"]


def test_a_wide_entry_waits_for_slots_and_is_not_overtaken() -> None:
    queue = FairQueue(slots=4, tokens=100)
    running = queue.add("three", width=3)
    queue.add("two", width=2)
    queue.add("one", width=1)
    assert queue.take() is running
    assert queue.take() is None
    queue.release(running)
    assert drain(queue) == ["two", "one"]
    queue.add("wider than all", width=9)
    assert drain(queue) == ["wider than all"]


def test_a_tenant_claims_at_most_its_share_but_one_entry_always_runs() -> None:
    queue = FairQueue(slots=100, tokens=100, share=0.5)
    first = queue.add("a0", tenant="a", claim=80)
    queue.add("a1", tenant="a", claim=1)
    queue.add("b0", tenant="b", claim=30)
    queue.add("b1", tenant="b", claim=30)
    assert queue.take() is first
    assert [queue.take().item, queue.take()] == ["b0", None]  # type: ignore[union-attr]
    queue.release(first)
    assert queue.take().item == "a1"  # type: ignore[union-attr]


def test_a_wide_entry_over_its_share_blocks_no_other_tenant() -> None:
    """The entry waits for its tenant's tokens, not for slots."""
    queue = FairQueue(slots=10, tokens=1000, share=0.5)
    first = queue.add("a0", tenant="a", width=8, claim=450)
    assert queue.take() is first
    second = queue.add("a1", tenant="a", width=8, claim=450)
    other = queue.add("b0", tenant="b", width=1, claim=10)
    assert queue.take() is other
    assert queue.take() is None
    queue.release(first)
    assert queue.take() is second


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(1, 4), st.integers(0, 60), st.booleans()),
        max_size=60,
    ),
    st.integers(1, 6),
)
def test_every_entry_starts_once_and_the_counters_return_to_zero(
    rows: list[tuple[str, int, int, bool]], slots: int
) -> None:
    queue = FairQueue(slots, tokens=100, share=0.4)
    entries = [queue.add(i, tenant=t, width=w, claim=c) for i, (t, w, c, _) in enumerate(rows)]
    for entry, row in zip(entries, rows, strict=True):
        entry.gone = row[3]
    served: list[int] = []
    running: list[Waiting] = []
    while True:
        taken = queue.take()
        if taken is not None:
            assert queue.used <= slots or len(running) == 0
            running.append(taken)
            served.append(taken.item)
        elif running:
            queue.release(running.pop(0))
        else:
            break
    assert sorted(served) == [i for i, row in enumerate(rows) if not row[3]]
    assert queue.used == 0
    assert not queue.running
    assert not queue.claimed


def test_clear_returns_the_entries_that_have_not_started() -> None:
    queue = FairQueue(slots=1, tokens=100)
    for name in ("a0", "a1", "b0"):
        queue.add(name, tenant=name[0])
    running = queue.take()
    assert running is not None
    assert [entry.item for entry in queue.clear()] == ["b0", "a1"]
    queue.release(running)
    assert (queue.used, queue.take()) == (0, None)
