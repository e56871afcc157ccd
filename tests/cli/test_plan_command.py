"""`gockpt_jax plan`: the trade it prints is that of the cost model, and its errors help."""

from __future__ import annotations

import json
import shutil

import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
import pytest
from click.testing import CliRunner

from bench import scale
from gockpt_jax.cli.main import main
from gockpt_jax.cli.quantities import (
    BYTES,
    COUNT,
    RATE,
    SECS,
    say_count,
    say_number,
    say_percent,
    say_secs,
)
from gockpt_jax.cli.trade import (
    Machine,
    goodput,
    size_of_checkpoint,
    size_of_model,
    terms_of,
    trade,
)
from gockpt_jax.window.choice import best_per_steps, choose

EIGHT_B = ("plan", "--params", "8B", "--devices", 8, "--step", "1.2")
FP32 = {"param_bytes": 4, "moment_bytes": 4, "grad_bytes": 4}


@pytest.fixture
def ask():
    """Calls `gockpt_jax` with words; returns what it said, and fails unless it ended so."""

    def call(*words, code=0):
        done = CliRunner().invoke(main, [str(word) for word in words])
        assert done.exit_code == code, done.output
        return done.output

    return call


def machine(**changes):
    given = {"devices": 8, "link_bytes_per_sec": 25e9, "step_secs": 1.2, "budget_bytes": 8e9}
    return Machine(**(given | changes))


def test_a_row_for_stock_a_device_copy_and_every_k(ask):
    said = ask(*EIGHT_B, "--budget", "8GB")
    lines = [line.split() for line in said.splitlines()]
    ways = [line[0] if line[0] != "*" else line[1] for line in lines if line]
    assert ways.count("window") == 7
    for way in ("stock", "device", "snapshot"):
        assert ways.count(way) == 1
    assert sum(line[:2] == ["*", "window"] for line in lines) == 1
    assert "stock loses 0.398%" in said  # 0.48 s of 120.48 s
    (told,) = json.loads(ask(*EIGHT_B, "--budget", "8GB", "--json"))
    (loss,) = (way["loss"] for way in told["ways"] if way["is_chosen"])
    assert f"the planner {say_percent(loss)}." in " ".join(said.split())


def test_json_holds_what_the_cost_model_says(ask):
    (told,) = json.loads(ask(*EIGHT_B, "--budget", "8GB", "--json"))
    state = size_of_model(8e9, "adamw", **FP32)
    terms = terms_of(state, machine())
    assert terms.state_bytes == pytest.approx(12e9, rel=1e-6)
    assert told["state"] == {
        "early": 64e9, "late": 32e9, "followers": 32e9, "parameters": 8e9
    }  # fmt: skip
    stock, copy, *planned = told["ways"]
    assert stock["stall_secs"] == pytest.approx(0.48)
    assert (copy["fits"], copy["stall_secs"]) == (False, 0.0)
    costs = best_per_steps(terms)
    assert [w["stall_secs"] for w in planned] == [c.stall_secs for c in costs]
    assert [w["moved_bytes"] for w in planned] == [c.moved_bytes for c in costs]
    assert [w["device_bytes"] for w in planned] == [c.peak_bytes for c in costs]
    assert [w["host_bytes"] for w in planned] == [8 * c.host_bytes for c in costs]
    assert [w["steps"] for w in planned if w["is_chosen"]] == [choose(terms).cost.steps]


def test_all_that_is_given_is_asked_of_the_cost_model(ask):
    sizes = ("--param-dtype", "bfloat16", "--moment-dtype", "float32", "--grad-dtype", "float32")
    (told,) = json.loads(ask(
        "plan", "--params", "1B", *sizes, "--devices", 4, "--devices-per-host", 2,
        "--link", "10GB/s", "--step", 2, "--budget", "1GB", "--host-memory", "100GB",
        "--commit", 3, "--write", "2GB/s", "--overhead", 0.05, "--max-steps", 5, "--json",
    ))  # fmt: skip
    assert told["state"] == {"early": 8e9, "late": 2e9, "followers": 4e9, "parameters": 1e9}
    assert told["machine"] == {
        "devices": 4, "link_bytes_per_sec": 10e9, "step_secs": 2.0, "budget_bytes": 1e9,
        "devices_per_host": 2, "write_bytes_per_sec": 2e9, "commit_secs": 3.0, "host_bytes": 100e9,
        "overhead": 0.05, "max_steps": 5,
    }  # fmt: skip
    assert max(way["steps"] for way in told["ways"]) == 5


def test_a_step_is_reckoned_from_its_tokens(ask):
    words = ("plan", "--params", "1B", "--devices", 4, "--budget", "8GB", "--flops", "100T")
    for batch in (("--batch", "4M"), ("--device-batch", "1M")):
        (told,) = json.loads(ask(*words, *batch, "--json"))
        assert told["machine"]["step_secs"] == pytest.approx(6 * 1e9 * 1e6 / 100e12)


def test_a_host_that_holds_a_save_and_no_more_is_enough(ask):
    ask(*EIGHT_B, "--budget", "8GB", "--host-memory", "96GB")


def test_a_copy_that_fits_is_taken(ask):
    (told,) = json.loads(ask(*EIGHT_B, "--memory", "80GB", "--json"))
    assert told["machine"]["budget_bytes"] == pytest.approx((72e9 - 12e9) / 2)
    assert [w["way"] for w in told["ways"] if w["is_chosen"]] == ["device copy"]
    said = ask(*EIGHT_B, "--memory", "80GB")
    assert "2,432" in said  # saves/h of it
    assert "e+0" not in said
    (told,) = json.loads(ask(*EIGHT_B, "--memory", "80GB", "--budget", "3GB", "--json"))
    assert told["machine"]["budget_bytes"] == 3e9


def test_a_save_that_outlasts_the_interval_is_waited_for(ask):
    slow = ("plan", "--params", "1B", "--step", "0.12", "--memory", "80GB", "--write", "2GB/s")
    (told,) = json.loads(ask(*slow, "--interval", 10, "--json"))
    stock, copy, *_ = told["ways"]
    assert (stock["stall_secs"], copy["stall_secs"]) == (pytest.approx(0.48), 0.0)
    for way in (stock, copy):
        assert way["busy_secs"] == pytest.approx(7)
        assert way["loss"] == pytest.approx((7 - 1.2) / 7)
    said = ask(*slow, "--interval", 10)
    assert "Saves wait for each other: one takes 7 s, and 10 steps 1.2 s." in said
    assert "wait for each other" not in ask(*slow, "--interval", 100)


def test_what_a_save_stalls_is_no_wait_for_the_next(ask):
    """It stalls 0.48 s, as nothing may leave early, and is busy for a second more."""
    short = (*EIGHT_B[:-1], "0.1", "--budget", "1kB", "--commit", 1)
    for steps, is_said in ((9, True), (12, False)):
        assert ("wait for each other" in ask(*short, "--interval", steps)) is is_said


def test_no_line_of_a_wide_table_is_cut_off(ask):
    said = ask(*EIGHT_B, "--budget", "8GB", "--mtbf", "50k")
    assert "planner saves every" in said
    assert "to restarts" in said


def test_saves_per_hour_keep_the_overhead_and_wait_for_the_write():
    state = size_of_model(8e9, "adamw", **FP32)
    stock, copy, *_ = trade(state, machine(budget_bytes=20e9, overhead=0.01))
    assert stock.per_hour == pytest.approx(3600 / 48)
    assert copy.per_hour == pytest.approx(3600 / 0.48)
    slow = machine(budget_bytes=20e9, write_bytes_per_sec=1e9, commit_secs=4.0)
    for row in trade(state, slow):
        assert row.busy_secs == pytest.approx(100)  # 96 GB by one host
        assert row.per_hour == pytest.approx(36)


@pytest.mark.parametrize(
    ("optimizer", "dtypes", "early", "late", "followers"),
    [
        ("adamw", {}, 8, 4, 4),
        ("adamw", {"grad_bytes": 2}, 8, 4, 2),
        ("adamw", {"moment_bytes": 2}, 0, 8, 0),
        ("lion", {}, 8, 0, 4),
        ("momentum", {}, 8, 0, 4),
        ("rmsprop", {}, 0, 8, 0),
        ("sgd", {}, 0, 4, 0),
    ],
)
def test_sizes_of_optimizers(optimizer, dtypes, early, late, followers):
    state = size_of_model(10, optimizer, **(FP32 | dtypes))
    assert (state.early, state.late, state.followers) == (early * 10, late * 10, followers * 10)


def test_what_the_budgets_hold_and_no_more_fits():
    state = size_of_model(8e9, "adamw", **FP32)
    exact = machine(budget_bytes=12e9, host_bytes=96e9)
    assert [row.way for row in trade(state, exact) if row.is_chosen] == ["device copy"]
    assert terms_of(state, exact).host_budget_bytes == 12e9


def test_where_nothing_leaves_early_there_are_no_windows():
    ways = [row.way for row in trade(size_of_model(8e9, "sgd", **FP32), machine(budget_bytes=1e9))]
    assert ways == ["stock Orbax async", "device copy", "snapshot"]


def test_of_a_checkpoint_only_pairs_of_moments_leave_early():
    leaves = [{"name": f"opt.{name}.w", "bytes": 40, "shape": [10]} for name in ("mu", "nu")]
    for names, early, late in ((leaves, 80, 0), (leaves[:1], 0, 40)):
        state = size_of_checkpoint(names, grad_bytes=2)
        assert (state.early, state.late) == (early, late)


def save(directory, state):
    with ocp.CheckpointManager(directory) as manager:
        for step in (1, 2):
            manager.save(step, args=ocp.args.StandardSave(state))


def test_a_saved_checkpoint_in_place_of_a_number(ask, tmp_path):
    params = {"w": jnp.ones((8, 16)), "b": jnp.ones(16, jnp.bfloat16)}
    state = {"opt": optax.adam(1e-2).init(params), "params": params, "step": jnp.int32(1)}
    save(tmp_path / "run", state)
    words = ("--step", 1, "--budget", "1kB", "--json")
    for path in (tmp_path / "run", tmp_path / "run" / "2", tmp_path / "run" / "2" / "default"):
        (told,) = json.loads(ask("plan", "--checkpoint", path, *words))
        # bf16 moments gain nothing beside fp32 gradients; count and step are 4 bytes each.
        assert told["state"] == {
            "early": 128 * 8, "late": 128 * 4 + 16 * 2 + 16 * 4 + 8, "followers": 128 * 4,
            "parameters": 128 + 16,
        }  # fmt: skip


def test_one_row_for_each_of_several(ask):
    said = ask("plan", "--params", "8B", "--params", "70B", "--devices", 8, "--devices", 512,
               "--batch", "4M", "--memory", "80GB", "--markdown")  # fmt: skip
    head, _, *rows = [line.split("|")[1:-1] for line in said.strip().splitlines()]
    assert [(row[0].strip(), row[1].strip()) for row in rows] == [
        ("8 B", "8"), ("8 B", "512"), ("70 B", "8"), ("70 B", "512")
    ]  # fmt: skip
    assert {len(row) for row in rows} == {len(head)}
    two = ask("plan", "--params", "8B", "--params", "70B", "--step", 1, "--budget", "8GB")
    assert "planner takes" in two
    assert "does not fit" in said
    assert "under 0.1%" in said


def test_json_holds_the_goodput_that_was_asked_for(ask):
    words = (*EIGHT_B, "--budget", "8GB", "--json")
    (told,) = json.loads(ask(*words, "--mtbf", 50_000, "--restart", 600))
    best = goodput(
        trade(size_of_model(8e9, "adamw", **FP32), machine())[0],
        step_secs=1.2, between_failures_secs=50_000 * 3600 / 8, restart_secs=600,
    )  # fmt: skip
    stock = told["ways"][0]["goodput"]
    assert stock["interval_secs"] == pytest.approx(best.interval_secs)
    assert stock["ettr"] == pytest.approx(best.ettr)
    assert all("goodput" in way for way in told["ways"])
    (told,) = json.loads(ask(*words))
    assert not any("goodput" in way for way in told["ways"])


def test_goodput_is_youngs():
    row = trade(size_of_model(8e9, "adamw", **FP32), machine())[0]  # stalls 0.48 s
    best = goodput(row, step_secs=1.2, between_failures_secs=36_000, restart_secs=300)
    assert best.interval_secs == pytest.approx((2 * 0.48 * 36_000) ** 0.5)

    def lost(interval):
        return 0.48 / interval + interval / 2 / 36_000

    now = lost(best.interval_secs)
    assert now < lost(best.interval_secs * 1.1)
    assert now < lost(best.interval_secs / 1.1)
    assert best.restarts == pytest.approx(300 / 36_000)
    assert best.ettr == pytest.approx(1 / (1 + now + 0.48 / 36_000 + best.restarts))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--step", 1, "--budget", 1], "Give either --params, as in `--params 8B`, or"),
        (["--params", 1, "--checkpoint", ".", "--step", 1], "Give either --params"),
        (
            ["--params", "8X"],
            "`8X` is not understood: expected a number, then k, m, b, t or nothing",
        ),
        (["--params", "1.2.3"], "`1.2.3` is not understood: expected a number"),
        (["--params", "0"], "`0` must be above 0 and below 1e+30"),
        (["--params", "1e400"], "`1e400` must be above 0 and below 1e+30"),
        (["--params", "8B", "--max-steps", 101], "101 is not in the range 1<=x<=100"),
        (["--checkpoint", "http://x", "--step", 1, "--budget", 1], "not in what this names. Give"),
        (["--params", "8B", "--step", 1, "--budget", "8GB/s"], "`8GB/s` is not understood"),
        (["--params", "8B", "--budget", "8GB"], "How long is a step? Give --step in seconds"),
        (["--params", "8B", "--step", 1], "How much memory has a device for copies?"),
        (["--params", "8B", "--step", 1, "--memory", "80GB"], "Give more --devices or more"),
        (
            [
                "--params",
                "8B",
                "--step",
                1,
                "--devices",
                8,
                "--budget",
                "8GB",
                "--host-memory",
                "95GB",
            ],
            "The state, 96 GB on each host, is more than --host-memory holds",
        ),
        (["--checkpoint", "nowhere", "--step", 1, "--budget", 1], "there is no such directory"),
        (
            ["--checkpoint", ".", "--step", 1, "--budget", 1],
            "expected one tree, found nothing. Give the path of one.",
        ),
        (["--params", "8B", "--optimizer", "adam"], "'adam' is not one of"),
    ],
)
def test_errors_say_what_to_do(ask, tmp_path, monkeypatch, words, says):
    monkeypatch.chdir(tmp_path)
    said = " ".join(ask("plan", *words, code=2).split())
    assert says in said.replace("│ ", "")


def test_a_checkpoint_without_moments_tells_no_parameters(ask, tmp_path):
    save(tmp_path / "run", {"w": jnp.ones(4)})
    words = ("plan", "--checkpoint", tmp_path / "run", "--device-batch", 1, "--budget", 100)
    said = " ".join(ask(*words, code=2).replace("│", "").split())
    assert "does not tell the number of parameters (no `mu`); give --step" in said


def test_a_step_with_several_trees_is_not_guessed_at(ask, tmp_path):
    save(tmp_path / "run", {"w": jnp.ones(4)})
    step = tmp_path / "run" / "2"
    (step / "default").rename(step / "one")
    shutil.copytree(step / "one", step / "two")
    said = ask("plan", "--checkpoint", tmp_path / "run", "--step", 1, "--budget", 1, code=2)
    assert "expected one tree, found `one`, `two`" in " ".join(said.split())


@pytest.mark.parametrize(
    ("kind", "text", "number"),
    [
        (COUNT, "8B", 8e9), (COUNT, "1.5 t", 1.5e12), (COUNT, "2e9", 2e9), (COUNT, "7", 7.0),
        (BYTES, "80GB", 80e9), (BYTES, "16GiB", 16 * 2**30), (RATE, "25GB/s", 25e9),
        (RATE, "900 MB", 9e8), (SECS, "20ms", 0.02), (SECS, "0.8", 0.8),
    ],
)  # fmt: skip
def test_numbers_as_people_write_them(kind, text, number):
    assert kind.convert(text, None, None) == pytest.approx(number)


@pytest.mark.parametrize(
    ("say", "number", "said"),
    [
        (say_count, 2e12, "2 T"), (say_count, 70e9, "70 B"), (say_count, 1.5e6, "1.5 M"),
        (say_count, 2e3, "2 k"), (say_count, 999, "999"),
        (say_number, 0.1234, "0.123"), (say_number, 999.4, "999"), (say_number, 999.7, "1,000"),
        (say_secs, 0.0004, "0"), (say_secs, 0.0006, "0.001"), (say_secs, 0.48, "0.480"),
        (say_secs, 1.2, "1.2"), (say_secs, 1234, "1,234"),
        (say_percent, 4e-6, "0%"), (say_percent, 0.00398, "0.398%"), (say_percent, 0.0398, "3.98%"),
    ],
)  # fmt: skip
def test_numbers_as_people_read_them(say, number, said):
    assert say(number) == said


def test_the_tables_of_the_document_are_what_the_command_says():
    """`python -m bench.scale` makes them anew."""
    document = scale.DOCUMENT.read_text(encoding="utf-8")
    assert document.count("<!-- made by") == document.count("<!-- end -->") == 5
    assert scale.regenerate(document) == document


def test_the_papers_own_stalls_are_near():
    """Within a factor of two where gradients are waited for, and near where they are hidden."""
    for setting in scale.PAPER:
        if setting.unit == "s":
            steps = -(-setting.transfer // setting.step)
            waits, overlaps, ours = scale.predicted(setting, int(steps))
            assert setting.gockpt / 2 < waits < setting.gockpt * 2
            assert overlaps == pytest.approx(setting.gockpt_o, abs=0.05)
            assert ours <= overlaps < waits
