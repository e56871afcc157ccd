"""What a user may set, and what a wrong value says."""

from __future__ import annotations

import dataclasses
import fractions
import math
import re

import jax.numpy as jnp
import numpy as np
import pytest

from gockpt_jax import Audit, GoCkptManager, WindowOptions

REMEDIES = {
    "max_steps": "Use 1 for",
    "steps": "Use None to",
    "device_budget_bytes": "Use None for",
    "host_budget_bytes": "Use None for",
    "write_limit_bytes": "The default is",
    "replay_threads": "Use None for",
}


@pytest.mark.parametrize("name", REMEDIES)
@pytest.mark.parametrize(
    "value", [0, -3, True, 1.5, "8", 2.0, math.nan, np.bool_(True), np.float32(2), np.array([1, 2])]
)
def test_bad_number_names_the_field_what_came_and_what_to_do(name, value):
    with pytest.raises(ValueError) as error:
        WindowOptions(**{name: value})
    message = str(error.value)
    assert f"`{name}` must be" in message
    assert f"got {value!r}." in message
    assert REMEDIES[name] in message


@pytest.mark.parametrize("name", REMEDIES)
@pytest.mark.parametrize("value", [np.int64(3), np.uint8(3), np.array(3), jnp.int32(3)])
def test_integers_of_other_libraries_are_integers(name, value):
    found = getattr(WindowOptions(**{name: value}), name)
    assert (found, type(found)) == (3, int)


@pytest.mark.parametrize("name", ["steps", "max_steps"])
def test_a_window_has_an_end(name):
    """Plans of many steps take for ever to make, and cost more than all else."""
    assert getattr(WindowOptions(**{name: 100}), name) == 100
    for value in (101, 10**9, 2**80):
        with pytest.raises(ValueError, match=f"`{name}` must be .* at most 100, got {value}. Use"):
            WindowOptions(**{name: value})


@pytest.mark.parametrize("name", ["step_secs", "link_bytes_per_sec"])
def test_rates_and_times_are_finite_numbers_above_zero(name):
    for value in (0, -1, math.nan, math.inf, 10**400, True, "1", b"1", [1.0], np.array([1.0, 2.0])):
        with pytest.raises(ValueError) as error:
            WindowOptions(**{name: value})
        told = f"`{name}` must be a number above 0, got {value!r}. Use None to have it measured."
        assert str(error.value) == told
    for value in (0.5, np.float32(0.5), jnp.float32(0.5), fractions.Fraction(1, 2)):
        assert getattr(WindowOptions(**{name: value}), name) == 0.5


@pytest.mark.parametrize("name", ["max_steps", "write_limit_bytes"])
def test_none_is_refused_where_it_means_nothing(name):
    with pytest.raises(ValueError, match=f"`{name}`"):
        WindowOptions(**{name: None})


@pytest.mark.parametrize(
    "value", ["never", None, True, ("window",), ["window"], {}, np.array("window")]
)
def test_bad_choice_names_the_choices(value):
    expected = re.escape(f"`arm` must be one of ('window', 'always'), got {value!r}.")
    with pytest.raises(ValueError, match=expected):
        WindowOptions(arm=value)
    expected = re.escape(f"`on_busy` must be one of ('wait', 'skip', 'newest'), got {value!r}.")
    with pytest.raises(ValueError, match=expected):
        WindowOptions(on_busy=value)
    expected = re.escape(f"`on_save_error` must be one of ('raise', 'warn'), got {value!r}.")
    with pytest.raises(ValueError, match=expected):
        WindowOptions(on_save_error=value)


EXPECTED = {
    "fraction": " above 0 and at most 1, got",
    "max_ulps": " an integer of at least 0, got",
    "max_relative_error": " at least 0 and at most 1, got",
    "on_failure": " one of ('raise', 'demote'), got",
}


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        *(
            ("fraction", v, "Use `audit=None` for no audit.")
            for v in (0, -0.5, 1.5, True, "1", None, math.nan, math.inf)
        ),
        *(("max_ulps", v, "Use 0 for equality.") for v in (-1, 0.5, True, None)),
        *(
            ("max_relative_error", v, "Use 0 for equality.")
            for v in (-1e-9, 1.5, True, None, "0", math.nan, math.inf)
        ),
        *(("on_failure", v, "got") for v in ("ignore", None, True)),
    ],
)
def test_bad_audit_names_the_field_what_came_and_what_to_do(name, value, remedy):
    with pytest.raises(ValueError) as error:
        Audit(**{name: value})
    assert f"`{name}` must be{EXPECTED[name]}" in str(error.value)
    assert f"got {value!r}." in str(error.value)
    assert remedy in str(error.value)


@pytest.mark.parametrize("value", [True, 0, "demote", {"fraction": 1.0}])
def test_audit_is_options_or_none(value):
    with pytest.raises(ValueError, match="`audit` must be an `Audit` or None"):
        WindowOptions(audit=value)
    assert WindowOptions(audit=None).audit is None
    assert Audit(fraction=1, max_ulps=3, on_failure="demote").fraction == 1
    accepting = (Audit(max_ulps=1), Audit(max_relative_error=1e-6), None)
    assert not any(WindowOptions(audit=audit).must_be_exact for audit in accepting)
    assert all(WindowOptions(audit=audit, exact=True).must_be_exact for audit in accepting)
    assert WindowOptions().must_be_exact


@pytest.mark.parametrize("value", [0, "no", None])
def test_flags_are_flags(value):
    with pytest.raises(ValueError, match="`exact`"):
        WindowOptions(exact=value)
    assert WindowOptions(exact=np.bool_(True)).exact is True


def test_least_values_and_defaults_are_accepted():
    least = WindowOptions(
        max_steps=1,
        steps=1,
        device_budget_bytes=1,
        host_budget_bytes=1,
        write_limit_bytes=1,
        replay_threads=1,
    )
    assert least.steps == 1
    assert WindowOptions() == WindowOptions(
        max_steps=8, steps=None, device_budget_bytes=None, host_budget_bytes=None,
        step_secs=None, link_bytes_per_sec=None, write_limit_bytes=256 * 2**20,
        replay_threads=None, arm="window", exact=False, on_busy="wait", on_save_error="raise",
        audit=Audit(fraction=1 / 64, max_ulps=0, max_relative_error=0, on_failure="raise"),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value", "may_differ"),
    [
        ("max_steps", 4, False), ("steps", 3, False), ("device_budget_bytes", 9, False),
        ("arm", "always", False), ("on_busy", "skip", False), ("audit", None, False),
        ("step_secs", 1.0, True), ("link_bytes_per_sec", 1.0, True), ("host_budget_bytes", 9, True),
        ("write_limit_bytes", 9, True), ("replay_threads", 9, True), ("exact", True, True),
        ("audit", Audit(fraction=1.0), True), ("on_save_error", "warn", True),
    ],
)  # fmt: skip
def test_what_the_processes_of_a_job_must_be_given_alike(name, value, may_differ):
    """All that they plan, and exchange, by; a default that is given in words is the same."""
    other = WindowOptions(**{name: value})
    assert (other.of_the_job == WindowOptions().of_the_job) is may_differ


def test_frozen_and_keyword_only():
    options = WindowOptions(steps=3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.steps = 4
    with pytest.raises(TypeError, match="positional"):
        WindowOptions(3)
    with pytest.raises(TypeError, match="no_such"):
        WindowOptions(no_such=1)
    assert dataclasses.replace(options, max_steps=4).steps == 3
    with pytest.raises(ValueError, match="`steps`"):
        dataclasses.replace(options, steps=0)


@pytest.mark.parametrize("window", [4, {"steps": 4}, "8"])
def test_manager_wants_options(tmp_path, window):
    with pytest.raises(TypeError, match=r"`window` must be a `WindowOptions`, got .*steps=K"):
        GoCkptManager(tmp_path / "run", window=window)
    assert not (tmp_path / "run").exists()
