"""What managers, steps and their arguments are not made of: told where it is written."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from etils import epath
from flax import linen as nn
from window.training_loop import BATCH, Options, fresh, update

import gockpt_jax as gockpt
from gockpt_jax.storage.files import bucket
from gockpt_jax.storage.managing.arguments import as_they_are
from gockpt_jax.storage.managing.places import root_of


async def coroutine(state):
    return state


def generator(state):
    yield state


NO_STEPS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a coroutine": (lambda m: m.wrap(coroutine), "`coroutine`, a coroutine or a generator: what"),
    "a generator": (lambda m: m.wrap(generator), "`generator`, a coroutine or a generator: what"),
    "a class": (lambda m: m.wrap(dict), "got a `type`. Give it the function that `jax.jit` ret"),
    "wrapped": (lambda m: m.wrap(m.wrap(update)), "wrap the one inside: `train_step.step`."),
    "a place of bytes": (lambda m: m.wrap(update, state=b"s"), "must be a position.*got b's'"),
    "a flag": (lambda m: m.wrap(update, state=(0, True)), r"be a position.*got \(0, True\)"),
    "no optimizer": (lambda m: gockpt.retain(optax.adam), "got <function .*>. Make it first, as"),
    "a model": (lambda m: gockpt.retain(nn.Dense(3)), "takes an optax transformation, got Dense"),
    "no function": (lambda m: gockpt.jit(None), "`jit` needs a function, got None. As a decor"),
}


@pytest.mark.parametrize("name", NO_STEPS)
def test_what_is_no_step(tmp_path, name):
    """Nothing is saved here: it is told where it is written."""
    misuse, message = NO_STEPS[name]
    with gockpt.GoCkptManager(tmp_path) as manager, pytest.raises(TypeError, match=message):
        misuse(manager)


@pytest.mark.parametrize("on_busy", ["skip", "newest"])
def test_a_stock_manager_waits_for_the_previous_save(on_busy):
    with pytest.raises(ValueError, match=f"must be 'wait' beside stock's manager.*got '{on_busy}'"):
        gockpt.GoCkptHandler(window=gockpt.WindowOptions(on_busy=on_busy))


def test_places_of_numpy_are_places(tmp_path):
    with gockpt.GoCkptManager(tmp_path) as manager:
        step = manager.wrap(update, state=np.int64(0))
        assert jax.tree.leaves(step(fresh(), BATCH))


LEGACY = r"the directory alone by position, got .* after it. Write `GoCkptManager\(dir"
NO_OPTIONS = (
    r"`options` must be a `CheckpointManagerOptions`, got .*; `WindowOptions` come as `window`"
)


def named(prefix, length=None):
    return ocp.path.step.standard_name_format(step_prefix=prefix, step_format_fixed_length=length)


def either(prefix):
    plain = named(None)
    return ocp.path.step.composite_name_format(named(prefix), [named(prefix), plain])


MANAGERS: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "Orbax's old form": (("run", ocp.PyTreeCheckpointHandler(), Options()), {}, LEGACY),
    "options by position": (("run", Options()), {}, LEGACY),
    "None": ((None,), {}, "`directory` must be a path, got None. Pass the directory of the ch"),
    "bytes": ((b"run",), {}, "`directory` must be a path, got b'run'"),
    "an unset variable": (("",), {}, "`directory` is empty.*`.` is the working one"),
    "the web": (("http://run",), {}, "http://run: checkpoints are kept in directories, `gs://` a"),
    "a file": (("file",), {}, "`directory` is .*/file, but .*/file is a file. Pass a directory"),
    "a backslash": (("a\\b",), {}, r"`directory` is .*/a\\b: .* Give it a name without one"),
    "in a file": (("file/run",), {}, "`directory` is .*/file/run, but .*/file is a file. Pass"),
    "a dictionary of options": (("run",), {"options": {"max_to_keep": 1}}, NO_OPTIONS),
    "options in each other's place": (("run",), {"options": gockpt.WindowOptions()}, NO_OPTIONS),
    "a number of steps": (("run",), {"window": 8}, r"`window=gockpt.WindowOptions\(steps=K\)`"),
    "no metadata": (("run",), {"metadata": "x"}, "`metadata` must be a `Mapping`, got 'x'"),
    "no JSON": (("run",), {"metadata": {"x": object()}}, "`metadata` must be JSON.*Convert what"),
    "no logger": (("run",), {"logger": "x"}, "`logger` must have a method `log_entry`.*got 'x'"),
    "a class": (("run",), {"item_handlers": {"x": ocp.JsonCheckpointHandler}}, "item `x` needs a "),
    "no options": (("run",), {"pytree_options": True}, "`pytree_options` must be a `Mapping`, got"),
    "misspelt": (("run",), {"pytree_options": {"zarr": 3}}, "`pytree_options`.*'zarr'. They are"),
    **{
        f"a prefix, {prefix}": (
            ("run",), {"options": Options(step_prefix=prefix)},
            rf"`step_prefix` is {re.escape(repr(prefix))}: Orbax would save .* Pass a prefix with",
        )
        for prefix in ("a[b]*", "a+", "a|b", "a(b", "(a)", "a/b", "a\\b")
    },
    "a name that is a pattern": (
        ("run",), {"options": Options(step_name_format=named("a?", length=6))}, "`step_prefix` is",
    ),
    "names, of which one is a pattern": (
        ("run",), {"options": Options(step_name_format=either("a+"))}, r"`step_prefix` is 'a\+'",
    ),
    "no size": (
        ("run",), {"pytree_options": {"chunk_byte_size": "1"}}, "`chunk_byte_size` must be an int",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MANAGERS)
def test_what_no_manager_is_made_of(tmp_path, monkeypatch, name):
    positional, named, message = MANAGERS[name]
    (tmp_path / "file").write_text("not a directory")
    monkeypatch.chdir(tmp_path)
    with pytest.raises((TypeError, ValueError, OSError), match=message):
        gockpt.GoCkptManager(*positional, **named)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_directory_below_the_users_own(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with gockpt.GoCkptManager("~/run") as manager:
        manager.save(0, args=gockpt.GoCkptSave({"w": jnp.ones(2)}))
    assert (tmp_path / "run" / "0").is_dir()
    assert not (tmp_path / "~").exists()


def test_an_address_in_a_bucket_is_taken_as_it_is(monkeypatch):
    """Nobody is asked whether it is there: no directory above it is."""
    monkeypatch.setattr(bucket, "prepare", lambda directory: None)
    monkeypatch.setattr(type(epath.Path("gs://bucket")), "exists", lambda path: 1 / 0)
    assert str(root_of("gs://bucket/run")) == "gs://bucket/run"


@pytest.mark.parametrize(
    "prefix", ["lr=1e-3, v1.2", "{lr}]", "%d #1 ~!@&;'\"<>`", "ěšč_7", "", "_"]
)
@pytest.mark.parametrize("length", [None, 6])
def test_other_prefixes_are_found_again(tmp_path, prefix, length):
    for options in (
        Options(step_prefix=prefix, step_format_fixed_length=length),
        Options(step_name_format=named(prefix, length)),
    ):
        with gockpt.GoCkptManager(tmp_path / "run", options=options) as manager:
            manager.save(3, args=gockpt.GoCkptSave({"w": jnp.ones(2)}), force=True)
        with gockpt.GoCkptManager(tmp_path / "run", options=options) as manager:
            assert manager.all_steps() == [3]
            assert manager.restore(None)["w"].tolist() == [1, 1]
        shutil.rmtree(tmp_path / "run")


class Metrics(dict[str, Any]):
    """Of a class that a user's `best_fn` knows."""


class Pair(NamedTuple):
    """Likewise."""

    first: Any
    second: Any


def test_what_is_written_later_is_copied_with_all_that_is_in_it():
    inner = [1]
    written = Metrics(a=inner, b=(inner, Pair(inner, [{"c": inner}])))
    state, message = gockpt.GoCkptSave({"w": inner}), SimpleNamespace(field=inner)
    items = {"json": ocp.args.JsonSave(written), "proto": ocp.args.ProtoSave(message)}
    given = {"args": ocp.args.Composite(state=state, **items), "metrics": written, "force": True}
    copied = as_they_are(given | {"custom_metadata": [{"m": inner}]})
    inner.append(2)
    written["d"] = 3
    expected = Metrics(a=[1], b=([1], Pair([1], [{"c": [1]}])))
    for found in (copied["metrics"], copied["args"]["json"].item):
        assert repr(found) == repr(expected)
        assert type(found) is Metrics
    assert copied["args"]["proto"].item.field == [1]
    assert copied["args"]["state"] is state  # is taken when `save` returns
    assert (copied["custom_metadata"], copied["force"]) == ([{"m": [1]}], True)
