"""Slots: what the writer is promised, it finds once, or hears why not."""

from __future__ import annotations

import numpy as np
import pytest

from gockpt_jax.transfer.budget import ByteBudget
from gockpt_jax.transfer.pull import HostChunk
from gockpt_jax.window.slots import fail, fill, give_back, make_slots

INDICES = [(slice(n, n + 1),) for n in range(3)]
CHUNKS = [HostChunk(index, np.full(1, n)) for n, index in enumerate(INDICES)]


def test_what_is_final_stays_so_where_its_neighbour_is_lost():
    """And the first error is the one that is told: the writer waits for each of them."""
    slots, first = make_slots(INDICES), MemoryError("first")
    fill(slots[:1], CHUNKS[:1])
    fail(slots, first)
    fail(slots, MemoryError("of what followed"))
    assert slots[0].data.result() is CHUNKS[0].data
    assert [slot.data.exception() for slot in slots[1:]] == [first] * 2


def test_only_what_has_come_is_given_back_and_once(caplog):
    """Whoever has it given back need not know what will become of it."""
    slots, host = make_slots(INDICES), ByteBudget(None)
    host.add(16)
    fill(slots[:1], CHUNKS[:1])
    give_back(slots, host)
    assert host.used_bytes == 8
    fill(slots[1:2], CHUNKS[1:2])
    fail(slots, MemoryError())
    give_back(slots, host)
    assert host.used_bytes == 0
    assert caplog.records == []  # of no callback that has failed


@pytest.mark.parametrize("chunks", [[CHUNKS[0], CHUNKS[2], CHUNKS[1]], CHUNKS[:2]])
def test_chunks_that_are_not_those_of_their_slots_fill_none(chunks):
    slots = make_slots(INDICES)
    with pytest.raises((AssertionError, ValueError)):
        fill(slots, chunks)
    assert not any(slot.data.done() for slot in slots)
