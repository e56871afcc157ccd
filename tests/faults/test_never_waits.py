"""Invariant 7: whatever the window is doing, nothing waits for a step that may never come."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bits import differing
from programs import PROGRAMS

import gockpt_jax as gockpt

from .injection import InjectedError
from .places import PLACES, at_place
from .processes import ENDS_WITHOUT_THREADS, run_child, said
from .states import abstract, bits_of, digest_of, stock_restore, stock_steps
from .trainer import DEVICES, PROGRAM, Trainer, chain_of, within_limit

ENDINGS: dict[str, Callable[[Trainer], None]] = {
    "wait_until_finished": lambda trainer: trainer.manager.wait_until_finished(),
    "close": lambda trainer: trainer.manager.close(),
    "restore": lambda trainer: _restore_latest(trainer),
}


def _restore_latest(trainer: Trainer) -> None:
    if trainer.given:
        label = min(trainer.given)
        restored = trainer.manager.restore(label, args=gockpt.GoCkptRestore(trainer.target))
        assert not differing(bits_of(restored), trainer.given[label])


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("ending", ENDINGS)
def test_ends_in_any_state_of_the_window(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, ending: str
) -> None:
    trainer = Trainer(tmp_path)
    with at_place(trainer, place, monkeypatch) as release:
        error = within_limit(lambda: ENDINGS[ending](trainer), meanwhile=release)
        if place in ("failed", "sealed_and_failed"):
            caused_by = [type(e) for e in chain_of(error)] if error else []
            assert not error or InjectedError in caused_by
        else:
            assert error is None, error
    within_limit(trainer.manager.close)
    assert stock_steps(tmp_path) == sorted(trainer.given)
    for label, bits in trainer.given.items():
        assert not differing(stock_restore(tmp_path, label, trainer.target), bits)


@pytest.mark.parametrize("place", ["opened", "behind", "reached", "draining"])
def test_training_goes_on_after_a_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    with Trainer(tmp_path) as trainer, at_place(trainer, place, monkeypatch) as release:
        assert within_limit(trainer.manager.wait_until_finished, meanwhile=release) is None
        trainer.save()
        trainer.run(8)
        trainer.run_past_next_window()
        trainer.assert_intact()


def test_exception_in_the_loop_leaves_the_with_block(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path)

    def loop() -> None:
        with trainer.manager:
            trainer.run(7)
            assert trainer.manager.window_status != "idle"
            raise LookupError("the loop failed")

    assert isinstance(within_limit(loop), LookupError)
    trainer.given = {label: trainer.given[label] for label in (0, 4)}
    assert stock_steps(tmp_path) == [0, 4]


# --- Interpreter exit ----------------------------------------------------------------------------

EXITS = [
    ("fresh", "return"),
    ("opened", "return"),
    ("opened", "exception"),
    ("behind", "return"),
    ("behind", "exit"),
    ("reached", "exception"),
    pytest.param(
        "just_saved",
        "return",
        marks=pytest.mark.skipif(
            ENDS_WITHOUT_THREADS,
            reason="no thread can make the directory, and Orbax waits 300 s for it",
        ),
    ),
    ("draining", "return"),
    ("draining", "exception"),
    ("failed", "exception"),
    ("sealed_and_failed", "exit"),
]


@pytest.mark.parametrize(("place", "how"), EXITS)
def test_interpreter_exits(tmp_path: Path, cache: Path, target: Any, place: str, how: str) -> None:
    directory = tmp_path / "run"
    child = run_child(directory, cache, ending=f"{place}:{how}")
    assert child.returncode == {"return": 0, "exception": 1, "exit": 3}[how], child.stderr
    assert ("LookupError: the loop failed" in child.stderr) == (how == "exception")
    assert said(child.stdout, "ending"), child.stderr
    given = {int(label): digest for label, digest in said(child.stdout, "given")}
    found = stock_steps(directory) if directory.exists() else []
    # A save that was draining is committed on the way out, or lost (docs/guarantees.md).
    assert set(found) | {8} == set(given) | {8}
    assert place != "draining" or ENDS_WITHOUT_THREADS or 8 in found
    assert set(found) <= set(given)
    for label in found:
        assert digest_of(stock_restore(directory, label, target)) == given[label]


@pytest.fixture(scope="module")
def target() -> Any:
    """What to restore into."""
    return abstract(PROGRAMS[PROGRAM].build(DEVICES).state)
