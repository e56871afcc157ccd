"""Runs last for weeks: what a manager holds after a thousand saves is what it held after ten.

`make soak` plays more rounds.
"""

from __future__ import annotations

import collections
import gc
import os
import sys
import threading
from itertools import pairwise
from pathlib import Path

import jax
import pytest
from campaigns import number
from window.training_loop import Loop, update

from gockpt_jax import GoCkptRestore, GoCkptSave

WARM_UP, LOOKS, ROUNDS = 2, 4, number("SOAK") or 1  # rounds between two looks
KEPT = {"SaveReport", "AuditFigures"}  # `manager.reports` is the whole run's

donating = jax.jit(update.__wrapped__, donate_argnums=0)


def held(loop: Loop) -> dict[str, int]:
    """What there is in the process on the library's behalf, once it has come to rest."""
    loop.manager.wait_until_finished()
    loop.settle()
    while gc.collect():
        pass
    found = collections.Counter(
        f"{module}.{getattr(x, '__qualname__', type(x).__qualname__)}"
        for x in gc.get_objects()
        if (module := str(getattr(x, "__module__", ""))).startswith("gockpt_jax")
        and type(x).__name__ not in KEPT
    )
    resources = loop.session.resources
    return {
        **found,
        "arrays alive": len(jax.live_arrays()),
        "bytes on the device": resources.device.used_bytes,
        "bytes on the host": resources.host.used_bytes,
        "threads": threading.active_count(),
        "files": len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0,
        "on disk": len(list(Path(loop.manager.directory).rglob("*"))),
    }


def play(loop: Loop) -> None:
    """Saves with windows, one that is forced, one by itself, one that is abandoned, a restore."""
    start = loop.label
    loop.train(start + 11)
    loop.update()
    loop.manager.save(loop.label, args=GoCkptSave(loop.state), force=True)
    loop.label += 1
    loop.manager.expect_save(in_steps=2)
    loop.train(loop.label + 3)
    loop.state = jax.tree.map(lambda x: x + 0, loop.state)  # inside a window, or not
    loop.train(start + 19)
    loop.manager.wait_until_finished()
    like = GoCkptRestore(loop.state)
    loop.state = loop.manager.restore(loop.manager.latest_step(), args=like)


@pytest.mark.usefixtures("its_own_garbage")
@pytest.mark.parametrize(("on_busy", "steps"), [("wait", 3), ("newest", 3), ("skip", None)])
def test_nothing_grows(tmp_path: Path, on_busy: str, steps: int | None) -> None:
    window = {"steps": steps, "on_busy": on_busy}
    loop = Loop(tmp_path, window=window, step=donating, max_to_keep=2)
    for _ in range(WARM_UP):
        play(loop)
    looks = []
    for _ in range(LOOKS):
        for _ in range(ROUNDS):
            play(loop)
        looks.append(held(loop))
    loop.manager.close()
    found = {what: [look.get(what, 0) for look in looks] for look in looks for what in look}
    # What the last restore has left behind, or threads that are about to end, comes and goes.
    grown = {what: n for what, n in found.items() if all(a < b for a, b in pairwise(n))}
    assert not grown


@pytest.mark.usefixtures("its_own_garbage")
def test_a_closed_manager_holds_no_state_and_no_threads(tmp_path: Path) -> None:
    """Manager and steps refer to each other: what they held would stay for a collection."""
    gc.collect()
    threads = set(threading.enumerate())
    loop = Loop(tmp_path, window={"steps": 3}, step=donating)
    before = {id(x) for x in jax.live_arrays()}  # the batch and the first state among them
    loop.train(8)
    loop.manager.close()
    loop.state = None
    started = {t.name for t in set(threading.enumerate()) - threads}
    assert not started & {"gockpt-worker", "gockpt-replayer", "gockpt-steps"}
    assert loop.step.last.whole is loop.step.last.new_state is None
    assert not [x.shape for x in jax.live_arrays() if id(x) not in before and x.size > 1]
