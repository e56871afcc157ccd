"""Slots: what the writer is promised, it finds once, or hears why not."""

from __future__ import annotations

import numpy as np
import pytest

from gockpt_jax.transfer.budget import ByteBudget, Loan
from gockpt_jax.transfer.pull import HostChunk
from gockpt_jax.window.slots import fail, fill, give_back, make_slots

INDICES = [(slice(n, n + 1),) for n in range(3)]
CHUNKS = [HostChunk(index, np.full(1, n)) for n, index in enumerate(INDICES)]  # of 8 bytes


def landed() -> tuple[ByteBudget, Loan]:
    """All chunks, on the host."""
    host, loan = ByteBudget(None), Loan()
    host.add(24, loan)
    return host, loan


def test_what_is_final_stays_so_where_its_neighbour_is_lost():
    """And the first error is the one that is told: the writer waits for each of them."""
    slots, first, (host, loan) = make_slots(INDICES), MemoryError("first"), landed()
    fill(slots[:1], CHUNKS[:1], host, loan)
    fail(slots, first)
    fail(slots, MemoryError("of what followed"))
    assert slots[0].data.result() is CHUNKS[0].data
    assert [slot.data.exception() for slot in slots[1:]] == [first] * 2


def test_only_what_has_come_is_given_back_and_once(caplog):
    """Whoever has it given back need not know what will become of it."""
    slots, (host, loan) = make_slots(INDICES), landed()
    fill(slots[:1], CHUNKS[:1], host, loan)
    give_back(slots, host)
    assert (host.used_bytes, loan.num_bytes) == (16, 16)
    fill(slots[1:2], CHUNKS[1:2], host, loan)
    fail(slots, MemoryError())
    give_back(slots, host)
    assert (host.used_bytes, loan.num_bytes) == (8, 8)  # whoever has the loan gives them back
    assert caplog.records == []  # of no callback that has failed


@pytest.mark.parametrize("chunks", [[CHUNKS[0], CHUNKS[2], CHUNKS[1]], CHUNKS[:2]])
def test_chunks_that_are_not_those_of_their_slots_fill_none(chunks):
    slots, (host, loan) = make_slots(INDICES), landed()
    with pytest.raises((AssertionError, ValueError)):
        fill(slots, chunks, host, loan)
    assert not any(slot.data.done() for slot in slots)
    assert loan.num_bytes == host.used_bytes == 24


def test_what_is_in_a_slot_is_off_the_loan_whatever_its_reader_raises():
    slots, (host, loan) = make_slots(INDICES), landed()

    def reader(done):
        raise MemoryError

    slots[1].data.add_done_callback(reader)
    with pytest.raises(MemoryError):
        fill(slots, CHUNKS, host, loan)
    assert [slot.data.done() for slot in slots] == [True, True, False]
    give_back(slots, host)
    fail(slots, MemoryError())
    host.repay(loan)
    assert host.used_bytes == 0
