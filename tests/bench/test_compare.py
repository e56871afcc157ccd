"""The regression guard: what it flags, what it does not judge, and what it refuses."""

from __future__ import annotations

import json

import pytest

from bench.compare import IncomparableError, compare, main, ratio_interval
from bench.record import ROOT

RESULTS = sorted((ROOT / "bench" / "results").rglob("*.json"))
HARDWARE = {"cpu": "one", "cores": 4, "memory_gib": 16.0, "devices": ["cpu"], "load_average": [1]}
NOISY = [1.0, 1.02, 0.98, 1.01, 0.99, 1.03, 0.97]


def record(samples, name="replay", **hardware):
    return {
        "name": name,
        "commit": "c0ffee",
        "command": "python -m bench replay --out a.json",
        "versions": {"jax": "1"},
        "hardware": HARDWARE | hardware,
        "samples": samples,
    }


def times(factor, samples=NOISY):
    return [factor * x for x in samples]


def verdict(figure, a, b, threshold=0.05, **hardware):
    (change,) = compare(record({figure: a}), record({figure: b}, **hardware), threshold)
    return change.verdict


@pytest.mark.parametrize(
    ("figure", "factor", "expected"),
    [
        ("secs/replay", 1.2, "worse"),
        ("secs/replay", 0.8, "better"),
        ("fused_speedup_vs_torch", 0.8, "worse"),
        ("copy_bandwidth_ratio", 1.2, "better"),
        ("copy_gb_per_sec", 0.8, "worse"),
        ("gockpt/50/throughput_ratio", 0.8, "worse"),
        ("gockpt/50/inflation_secs_per_save", 1.2, "worse"),
        ("gockpt/50/device_memory_ratio", 1.2, "worse"),
        ("gockpt/50/hook_secs_per_save", 0.8, "better"),
        ("inflation/same/threads_1", 1.2, "worse"),
        ("48 leaves/analysis_over_jit", 1.2, "worse"),
        ("48 leaves/analysis_us_per_leaf", 1.2, "worse"),
        ("save_call_ratio", 1.2, "worse"),
        ("host_budget_ratio", 1.2, "worse"),
        ("processes/read_bytes_ratio/ours/sharded", 1.2, "worse"),
        ("gockpt_k4/extra_over_accounted_ratio", 1.2, "worse"),
        ("verify_raw_ratio", 0.8, "worse"),
        ("pull_gbps/library/1024MiB/warm", 0.8, "worse"),
        ("pull_gbps/asarray/1024MiB/warm", 0.8, "moved"),
        ("write_gbps/memory", 0.8, "moved"),
        ("same_memory/pinned_to_numpy", 1.2, "moved"),
        ("gockpt/50/early_bytes_ratio", 0.8, "moved"),
        ("colour", 1.2, "moved"),
    ],
)
def test_a_figure_beyond_its_spread_has_moved(figure, factor, expected):
    assert verdict(figure, NOISY, times(factor)) == expected


def test_within_its_spread_or_the_threshold_nothing_has_moved():
    assert verdict("secs", NOISY, times(1.001)) == "same"
    wide = [0.5, 1.0, 1.5, 0.7, 1.3]
    assert verdict("secs", wide, times(1.2, wide)) == "same"  # far, but inside the spread
    narrow = times(1.0, [1.0, 1.001, 0.999, 1.0, 1.001])
    assert verdict("secs", narrow, times(1.04, narrow)) == "same"  # outside it, but not far
    assert verdict("secs", narrow, times(1.04, narrow), threshold=0.02) == "worse"


def test_the_interval_holds_the_ratio_and_repeats_itself():
    low, high = ratio_interval(NOISY, times(2.0))
    assert 1.9 < low < 2.0 < high < 2.1
    assert (low, high) == ratio_interval(NOISY, times(2.0))


def test_what_has_no_spread_or_no_ratio_is_not_judged():
    assert verdict("secs", [1.0] * 4, [2.0] * 4) == "not judged"
    assert verdict("extra_memory_ratio", [1.0], [2.0]) == "not judged"
    assert verdict("inflation_secs_per_save", [-0.1, *NOISY], times(3.0)) == "not judged"
    # Counts and compiled sizes would be the same in another run.
    assert verdict("v5e:2x4/1B/fsdp/armed/copies", [200.0], [400.0]) == "worse"
    assert verdict("v5e:2x4/1B/fsdp/k4/compiled_gib", [2.0], [1.0]) == "better"
    assert verdict("staging/collectives", [0.0], [0.0]) == "same"
    assert verdict("staging/collectives", [0.0], [2.0]) == "worse"
    assert verdict("mlp/adam/fma/torn", [4198], [0]) == "better"
    assert verdict("mlp/adam/fenced", [0], [1]) == "worse"
    assert verdict("exact/adamw/moments/max_ulps", [0.0], [1.0]) == "worse"
    assert verdict("gockpt/50/audit_max_ulps", [0.0] * 2, [1.0] * 2) == "worse"
    # Memory that was measured would not, nor what a mean is made of.
    assert verdict("gockpt_k4/kept_bytes", [0.0], [4096.0]) == "not judged"
    assert verdict("gockpt_k4/host_peak_extra_bytes", [1e9] * 4, [2e9] * 4) == "not judged"
    assert verdict("peak_host_bytes", [1e9], [2e9]) == "not judged"


def test_a_count_of_collections_is_no_time():
    """`collections_per_save` has the letters of nanoseconds per something."""
    yardstick = {"secs/copy": (NOISY, times(2.0)), "full_collections_per_save": (NOISY, NOISY)}
    a, b = (record({name: both[n] for name, both in yardstick.items()}) for n in (0, 1))
    b["samples"]["full_collections_per_save"] = times(1.0001)
    assert [change.verdict for change in compare(a, b)] == ["moved", "same"]


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.name)
def test_a_kept_result_has_not_moved_from_itself(path):
    kept = json.loads(path.read_text(encoding="utf-8"))
    assert {change.verdict for change in compare(kept, kept)} == {"same"}


def test_early_records_of_counts_have_figures_alone():
    a, b = (record({}, name="cut") | {"figures": {"mlp/adam/fma/torn": n}} for n in (0, 7))
    assert [change.verdict for change in compare(a, b)] == ["worse"]


def test_absolute_figures_of_other_hardware_are_not_compared():
    for figure in ("secs/replay", "copy_gb_per_sec", "rate/x", "hook_window_ms", "colour"):
        assert verdict(figure, NOISY, times(2.0), cpu="another") == "not judged"
    assert verdict("extra_rss_ratio", NOISY, times(2.0), cpu="another") == "worse"
    assert verdict("secs/replay", NOISY, times(2.0), load_average=[9]) == "worse"


def test_absolute_figures_of_another_command_are_not_compared():
    a, b = record({"secs": NOISY, "x_ratio": NOISY}), record({"secs": NOISY, "x_ratio": NOISY})
    b["command"] = "python -m bench replay --out b.json"
    assert [c.verdict for c in compare(a, b)] == ["same", "same"]
    b["command"] = "python -m bench replay --quick"
    assert [(c.verdict, c.reason) for c in compare(a, b)] == [
        ("not judged", "absolute, and other command"),
        ("same", ""),
    ]


@pytest.mark.parametrize(
    "figure", ["save_secs/raw", "ideal/10/step_median_secs", "orbax_async/10/hook_secs_per_save"]
)
def test_a_yardstick_is_nobodys_regression(figure, tmp_path, capsys):
    assert verdict(figure, NOISY, times(1.5)) == "moved"
    before, after = tmp_path / "a.json", tmp_path / "b.json"
    before.write_text(json.dumps(record({figure: NOISY})))
    after.write_text(json.dumps(record({figure: times(1.5)}, cores=4)))
    assert main([str(before), str(after)]) == 0
    assert "ANOTHER STATE" in capsys.readouterr().out
    assert verdict("gockpt/10/inflation_vs_stock_async", NOISY, times(1.5)) == "worse"


@pytest.mark.parametrize(
    ("figure", "factor", "expected"),
    [
        ("hook_window_ms", 2.0, "same"),
        ("hook_window_ms", 3.0, "worse"),
        ("hook_window_ms", 1.01, "better"),
        ("gockpt/10/link_gb_per_sec", 0.5, "same"),
        ("gockpt/10/link_gb_per_sec", 0.3, "worse"),
        ("gockpt/10/throughput_ratio", 0.5, "worse"),
    ],
)
def test_times_and_rates_are_judged_over_the_pace_of_the_machine(
    figure, factor, expected, tmp_path, capsys
):
    # A median and a middle half: one yardstick among them that went another way says little.
    paces = {
        "step_call_ms": 1.9,
        "save_call_stock_ms": 2.0,
        "ideal/10/wall_secs": 2.0,
        "raw/gb_per_sec": 1 / 2.05,
        "orbax_async/10/drain_secs": 2.1,
        "secs/copy": 9.0,
    }
    told = {"gockpt/10/predicted_stall_secs": [0.5] * 5}  # by no clock: the same again
    a = record({name: NOISY for name in (*paces, figure)} | told)
    slower = {name: times(pace) for name, pace in paces.items()}
    b = record(slower | {figure: times(factor)} | told)
    found = {change.figure: change.verdict for change in compare(a, b)}
    assert found.pop(figure) == expected
    assert found.pop("gockpt/10/predicted_stall_secs") == "same"
    assert set(found.values()) == {"moved"}
    files = tmp_path / "a.json", tmp_path / "b.json"
    for path, content in zip(files, (a, b), strict=True):
        path.write_text(json.dumps(content))
    assert main([*map(str, files)]) == (expected == "worse")
    assert "2.025 times as long" in capsys.readouterr().out


def test_a_yardstick_that_could_be_anything_says_little_of_the_machine():
    """Raw writes were faster on the other day; what little they wait for one cannot tell."""
    wide = [0.2, 1.0, 3.0, 0.5, 2.0]
    small = ("tail_secs/raw", "sync_secs/raw", "rename_secs/raw", "first_write_secs/raw")
    a = record({"save_secs/raw": NOISY, "save_secs/files": NOISY} | dict.fromkeys(small, wide))
    b = record({name: times(0.75, x) for name, x in a["samples"].items()})
    b["samples"] |= {name: times(1.2, wide) for name in small}
    found = {change.figure: change.verdict for change in compare(a, b)}
    assert found["save_secs/raw"] == "moved"
    assert found["save_secs/files"] == "same"


def test_what_differs_is_said_first(tmp_path, capsys):
    before, after = tmp_path / "a.json", tmp_path / "b.json"
    before.write_text(json.dumps(record({"x_ratio": NOISY})))
    after.write_text(json.dumps(record({"x_ratio": NOISY}, cores=64) | {"commit": "decaf"}))
    assert main([str(before), str(after)]) == 0
    printed = capsys.readouterr().out
    assert printed.index("commit: c0ffee before, decaf after") < printed.index("verdict")
    assert "OTHER HARDWARE, cores: 4 before, 64 after" in printed


def test_unrelated_files_are_refused():
    with pytest.raises(IncomparableError, match=r"`replay` and `cut` are different benchmarks"):
        compare(record({"a": [1.0]}), record({"a": [1.0]}, name="cut"))
    with pytest.raises(IncomparableError, match="no figure with samples in common"):
        compare(record({"a": [1.0]}), record({"b": [1.0]}))


@pytest.mark.parametrize(
    ("b", "status"),
    [
        (record({"secs": times(1.0)}), 0),
        (record({"secs": times(0.5)}), 0),
        (record({"secs": times(1.5)}), 1),
        (record({"secs": times(1.5)}, cores=64), 2),
        (record({"secs": times(1.5)}, name="cut"), 2),
        ({"no": "record"}, 2),
        (["no", "record"], 2),
    ],
)
def test_the_exit_status_says_it(b, status, tmp_path, capsys):
    before, after = tmp_path / "a.json", tmp_path / "b.json"
    before.write_text(json.dumps(record({"secs": NOISY})))
    after.write_text(json.dumps(b))
    assert main([str(before), str(after)]) == status
    assert capsys.readouterr().err.count("\n") == (status == 2)


def test_as_json(tmp_path, capsys):
    path = tmp_path / "a.json"
    path.write_text(json.dumps(record({"secs": NOISY})))
    assert main([str(path), str(path), "--json"]) == 0
    (change,) = json.loads(capsys.readouterr().out)["changes"]
    assert change["figure"] == "secs"
    assert (change["ratio"], change["spread"], change["verdict"]) == (1.0, [1.0, 1.0], "same")
