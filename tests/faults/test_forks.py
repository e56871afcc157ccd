"""Processes that are forked in the middle of a run: data loaders."""

from __future__ import annotations

import os
import threading

import jax.numpy as jnp
import pytest

import gockpt_jax as gockpt
from gockpt_jax.storage.writing import leaf_writer


@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_child_that_ends_writes_nothing(tmp_path, monkeypatch):
    """It holds the manager as it was, with a save that waits, and ends as any process does."""
    at_end, go_on, real = [], threading.Event(), leaf_writer._check_data
    monkeypatch.setattr(threading, "_register_atexit", at_end.append)
    monkeypatch.setattr(leaf_writer, "_check_data", lambda *a: go_on.wait(60) and real(*a))
    window = gockpt.WindowOptions(on_busy="newest")
    with gockpt.GoCkptManager(tmp_path, window=window) as manager:
        for step in range(2):
            assert manager.save(step, args=gockpt.GoCkptSave({"w": jnp.full(4, step)}))
        child = os.fork()
        if not child:
            for callback in at_end:
                monkeypatch.setattr(manager, "wait_until_finished", lambda: os._exit(3))
                callback()
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        go_on.set()
        manager.wait_until_finished()
        assert manager.all_steps(read=True) == [0, 1]
