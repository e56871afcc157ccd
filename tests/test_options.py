"""What a user may set, and what a wrong value says."""

from __future__ import annotations

import dataclasses
import re

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
@pytest.mark.parametrize("value", [0, -3, True, 1.5, "8", 2.0])
def test_bad_number_names_the_field_what_came_and_what_to_do(name, value):
    with pytest.raises(ValueError) as error:
        WindowOptions(**{name: value})
    message = str(error.value)
    assert f"`{name}` must be" in message
    assert f"got {value!r}." in message
    assert REMEDIES[name] in message


@pytest.mark.parametrize("name", ["max_steps", "write_limit_bytes"])
def test_none_is_refused_where_it_means_nothing(name):
    with pytest.raises(ValueError, match=f"`{name}`"):
        WindowOptions(**{name: None})


@pytest.mark.parametrize("value", ["never", None, True, ("window",)])
def test_bad_choice_names_the_choices(value):
    expected = re.escape(f"`arm` must be one of ('window', 'always'), got {value!r}.")
    with pytest.raises(ValueError, match=expected):
        WindowOptions(arm=value)
    expected = re.escape(f"`on_busy` must be one of ('wait', 'skip', 'newest'), got {value!r}.")
    with pytest.raises(ValueError, match=expected):
        WindowOptions(on_busy=value)


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        *(
            ("fraction", v, "Use `audit=None` for no audit.")
            for v in (0, -0.5, 1.5, True, "1", None)
        ),
        *(("max_ulps", v, "Use 0 for equality.") for v in (-1, 0.5, True, None)),
        *(("on_failure", v, "got") for v in ("ignore", None, True)),
    ],
)
def test_bad_audit_names_the_field_what_came_and_what_to_do(name, value, remedy):
    with pytest.raises(ValueError) as error:
        Audit(**{name: value})
    assert f"`{name}` must be" in str(error.value)
    assert f"got {value!r}." in str(error.value)
    assert remedy in str(error.value)


@pytest.mark.parametrize("value", [True, 0, "demote", {"fraction": 1.0}])
def test_audit_is_options_or_none(value):
    with pytest.raises(ValueError, match="`audit` must be an `Audit` or None"):
        WindowOptions(audit=value)
    assert WindowOptions(audit=None).audit is None
    assert Audit(fraction=1, max_ulps=3, on_failure="demote").fraction == 1


@pytest.mark.parametrize("value", [0, "no", None])
def test_flags_are_flags(value):
    with pytest.raises(ValueError, match="`exact`"):
        WindowOptions(exact=value)


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
        write_limit_bytes=256 * 2**20, replay_threads=None, arm="window", exact=False,
        audit=Audit(fraction=1 / 64, max_ulps=0, on_failure="raise"),
    )  # fmt: skip


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
