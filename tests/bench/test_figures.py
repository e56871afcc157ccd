"""Figures and tables come from result files, name them, and are the same each time.

The records here are made up; none of them is kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import xml.etree.ElementTree as ElementTree

import jax
import jax.numpy as jnp
import pytest

from bench.figures import accelerator, make, tables, timeline, train
from bench.record import ROOT
from bench.timeline.spans import LANES, ORIGIN, Span, read_spans
from gockpt_jax.storage.writing.write_budget import WriteBudget, WriteStats
from gockpt_jax.telemetry import events
from gockpt_jax.transfer.pull import Pull

SOURCE = "{http://purl.org/dc/elements/1.1/}source"
Figure = pytest.importorskip("matplotlib.figure").Figure


def record(name, samples, devices=("cpu",), **more):
    return {
        "name": name, "commit": "c0ffee", "hardware": {"devices": list(devices)},
        "figures": {n: values[0] for n, values in samples.items()}, "samples": samples,
        "notes": [], **more,
    }  # fmt: skip


def training(**more):
    samples = {}
    for mode, cost in (("ideal", 0.0), ("orbax_async", 0.5), ("gockpt", 0.01)):
        for interval in (10, 50):
            samples |= {
                f"{mode}/{interval}/throughput_ratio": [1 - cost / interval] * 5,
                f"{mode}/{interval}/inflation_secs_per_save": [cost, 2 * cost, 3 * cost],
                f"{mode}/{interval}/hook_secs_per_save": [cost / 2],
            }
    return record("train", samples, **more)


PERCENTS = (15, 30, 50, 60, 75, 90)


def predicted():
    """One mode each for some budgets, as the planner expected and as it came."""
    samples = {"ideal/20/step_median_secs": [0.25, 0.5, 0.25]}
    for n, percent in enumerate(PERCENTS):
        samples |= {
            f"gockpt_b{percent}/20/predicted_stall_secs": [0.5 - 0.1 * n] * 2,
            f"gockpt_b{percent}/20/inflation_secs_per_save": [0.7 - 0.1 * n, 0.6 - 0.1 * n],
            f"gockpt_b{percent}/20/hook_secs_per_save": [0.125],
            f"gockpt_b{percent}/20/window_steps": [1.0 + n],
        }
    return record("train", samples)


def window():
    spans = [
        {"lane": lane, "name": name, "start_secs": n + 0.1 * m, "end_secs": n + 0.1 * m + 0.05}
        for n, (lane, names) in enumerate(LANES.items())
        for m, name in enumerate(names.values())
    ]
    series = {"resident_bytes": [(0.0, 2**20), (1.0, 3 * 2**20), (4.0, 2**20)]}
    return record("timeline", {"state_bytes": [2.0**20]}, spans=spans, series=series)


def aot():
    samples = {
        f"v5e:2x4/1B/fsdp/k{k}/{what}_gib": [2.0 / k]
        for k in range(2, 9)
        for what in ("planned", "compiled")
    }
    for name in ("state_gib", "device_copy_gib", "unarmed/total_gib", "retained_gib"):
        samples[f"v5e:2x4/1B/fsdp/{name}"] = [1.5]
    for name in ("copies", "collectives"):
        samples |= {f"v5e:2x4/1B/fsdp/{which}/{name}": [7.0] for which in ("armed", "unarmed")}
    for name in ("computing_instructions", "joins", "collectives", "most_new_over_copied"):
        samples[f"v5e:2x4/1B/fsdp/staging/{name}"] = [0.0]
    samples["v5e:2x4/1B/fsdp/armed_extra_gib"] = [0.75]
    samples["v5e:2x4/1B/fsdp/snapshot/parts"] = [17.0]
    samples |= {f"v5e:2x4/1B/fsdp/snapshot/{w}_gib": [1.5] for w in ("planned", "compiled")}
    return record("aot", samples)


def write(directory, **records):
    for name, content in records.items():
        path = directory / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content))
    return make.load_results(directory)


def root_with_marks(path):
    """Documents with room for their tables, as the repository's are."""
    begin, end = tables.marks()
    for page in {place.partition("#")[0] for place in tables.TABLES}:
        (path / page).parent.mkdir(exist_ok=True)
        (path / page).write_text(f"before\n{begin}\n\n{end}\n")
    return path


def source(path):
    """What an SVG says that it was made from."""
    return ElementTree.parse(path).getroot().find(f".//{SOURCE}").text


def test_every_figure_is_made_names_its_result_and_repeats_itself(tmp_path):
    records = {"train": training(), "predicted": predicted(), "timeline": window()}
    results = write(tmp_path / "results", **records)
    for out in ("one", "two"):
        lines = [*make.make(results, tmp_path / out, root_with_marks(tmp_path))]
        assert not [line for line in lines if "skipped" in line]
    for name in make.PLOTS:
        one, two = (tmp_path / out / f"{name}.svg" for out in ("one", "two"))
        assert one.read_bytes() == two.read_bytes()
        assert source(one).split(".json")[0] in records
        assert "commit c0ffee, cpu" in source(one)


def test_what_has_no_result_is_skipped_and_said_so(tmp_path):
    results = write(tmp_path / "results", other=record("other", {"x": [1.0]}), broken=[1])
    lines = list(make.make(results, tmp_path / "out", tmp_path))
    assert len(lines) == len(make.PLOTS)
    assert all("skipped" in line and "bench" in line for line in lines)
    assert not (tmp_path / "out").exists()


def test_an_accelerator_comes_before_a_cpu(tmp_path):
    results = write(tmp_path, **{"a-h100/train": training(devices=["H100"]), "train": training()})
    list(make.make(results, tmp_path / "out", root_with_marks(tmp_path)))
    assert source(tmp_path / "out" / "stall.svg").startswith("a-h100/train.json")


def on_a_gpu(**more):
    """Training at one interval, with what a save costs without drift."""
    samples = {"state_gb": [2.0]}
    for mode, cost in (("ideal", 0.0), ("orbax_async", 0.5), ("gockpt", 0.01)):
        of = {"throughput_ratio": [1.0, 0.99], "step_median_secs": [0.2], "visible_secs": [3.0],
              "device_memory_ratio": [1.25], "hook_secs_per_save": [0.1]}  # fmt: skip
        if mode != "ideal":
            of |= {"inflation_secs_per_save": [cost, 0.0], "around_save_secs": [cost, cost / 2]}
        samples |= {f"{mode}/50/{name}": values for name, values in of.items()}
    notes = ["GPT 2b: 2000.4 M parameters, much else.", "Checkpoints went to disk, in haste."]
    versions = {"jax": "1", "orbax-checkpoint": "2"}
    hardware = {"devices": ["H100"], "cores": 4}
    return record("train", samples) | {"notes": notes, "versions": versions, "hardware": hardware}


def test_what_a_save_costs_on_a_gpu_is_told_with_its_drift():
    content = on_a_gpu()
    assert accelerator.is_training(content)
    lines = accelerator.training_table(content)
    assert lines[2].startswith("| stock Orbax, asynchronous (`orbax_async`) | 500, 250 | 500, 0 |")
    assert lines[3].startswith("| gockpt_jax, as it plans (`gockpt`) | 10, 5 | 10, 0 | 0.995 |")
    said = " ".join(lines[4:])
    assert "On one H100 (4 cores, jax 1), Orbax 2: a GPT of 2000 M parameters" in said
    # How many a record tells, and it has been few of them.
    assert "the median of the phase's other steps, some of which ran beside its writing." in said
    assert "gave 0.990 to 1.000, which is 100 ms of an interval." in said
    assert said.endswith("Checkpoints went to disk, in haste.")


def saves_on_a_gpu(**more):
    """Single saves, by each way; gockpt_k4 with its graphs, and as it was without."""
    samples = {}
    for mode, cost in (
        ("ideal", 1.0), ("orbax_async", 300.0), ("orbax_async_background", -0.4),
        ("device_copy", 5.0), ("gockpt_k1", 6.0), ("gockpt_k4", 70.0), ("gockpt_k4+graphs", 40.0),
        ("gockpt_b30", 150.0),
    ):  # fmt: skip
        samples |= {f"800m/{mode}/step_ms": [200.0 + cost / 100],
                    f"800m/{mode}/around_save_ms": [cost, cost - 2, cost + 2],
                    f"800m/{mode}/save_call_ms": [abs(cost) / 2]}  # fmt: skip
    samples["800m/gockpt_b30/predicted_stall_ms"] = [120.0, 120.0, 120.0]
    notes = ["800m: 9.70 GB of state in 147 arrays.", "Checkpoints went to memory (/dev/shm)."]
    of = {"notes": notes, "devices": ["H100"],
          "versions": {"jax": "1", "orbax-checkpoint": "2"}} | more  # fmt: skip
    content = record("around", samples, **of)
    content["hardware"]["cores"] = 4
    return content


def test_what_single_saves_cost_on_a_gpu_is_told_beside_what_is_chance():
    content = saves_on_a_gpu()
    assert accelerator.is_around(content)
    lines = accelerator.around_table(content)
    assert lines[2] == "| no checkpoints: chance alone (`ideal`) | 1 (-1 to 3) | 0 |"
    assert lines[4].endswith("(`orbax_async_background`) | 0 (-2 to 2) | 0 |")
    assert "| gockpt_jax, a window of 4 steps (`gockpt_k4`) | 40 (38 to 42) | 20 |" in lines
    said = " ".join(lines)
    assert "a GPT with 9.70 GB of state in 147 arrays, steps of 200 ms; medians of 3 saves" in said
    assert "took 200.0 ms without checkpoints, which ran first, and 200.0 to 203.0 ms by" in said
    assert "Checkpoints went to memory (/dev/shm). `gockpt_k4` is the record's" in said
    for name in ("800m/gockpt_k4+graphs", "800m/gockpt_k4"):
        del content["samples"][f"{name}/around_save_ms"]
    assert not accelerator.is_around(content)
    assert not accelerator.is_around(saves_on_a_gpu(devices=["cpu"]))
    content = saves_on_a_gpu()
    content["samples"]["toy/ideal/around_save_ms"] = [1.0]
    assert not accelerator.is_around(content)  # of two sizes


def test_the_link_is_told_from_a_record_that_has_all_of_it():
    samples = {"pull_gbps/library/1024MiB/warm": [50.0], "raw_link_gbps/1MiB": [9.0]}
    content = record("gpu transfer", samples, devices=["H100"], versions={"jax": "1"})
    content["hardware"]["cores"] = 4
    assert accelerator.is_link(content)
    assert accelerator.link_table(content)[3].endswith("| - | - | - | - | - | 50 |")
    del content["samples"]["pull_gbps/library/1024MiB/warm"]  # asked for a minute, of pinning alone
    assert not accelerator.is_link(content)


def test_replay_is_told_from_a_record_of_all_optimizers():
    samples = {"perturbed/adam": [0.0], "exact/tried": [33.0], "exact/failures": [0.0]}
    content = record("gpu exact", samples, devices=["H100"], versions={"jax": "1"})
    content["hardware"]["cores"] = 4
    content["notes"] = ["tried: optimizers, of 33; failures: of measurements, told in `failures`."]
    assert accelerator.is_replay(content)
    assert "33 optimizers; 0 measurements failed." in accelerator.replay_table(content)[-1]
    content["figures"]["exact/tried"] = 3.0  # the time was over
    assert not accelerator.is_replay(content)
    assert not accelerator.is_replay(record("gpu exact", samples))


def test_what_was_predicted_of_single_saves_is_beside_what_they_cost():
    content = saves_on_a_gpu()
    assert accelerator.has_predictions(content)
    lines = accelerator.predicted_table(content)
    assert lines[2:3] == ["| 0.30 | 120 | 150 (148 to 152) |"]
    assert lines[-1] == "On one H100 (4 cores, jax 1); medians (least to most) of 3 saves."
    content["samples"]["800m/gockpt_k1/predicted_stall_ms"] = [1.0]
    assert accelerator.predicted_table(content) == lines
    del content["samples"]["800m/gockpt_b30/predicted_stall_ms"]
    assert not accelerator.has_predictions(content)  # the table is of budgets


@pytest.mark.parametrize("left_out", ["gockpt", "orbax_async"])
def test_a_record_without_what_the_table_needs_is_not_its_own(left_out):
    content = on_a_gpu()
    del content["samples"][f"{left_out}/50/around_save_secs"]
    assert not accelerator.is_training(content)
    content = on_a_gpu()
    content["samples"]["gockpt/10/around_save_secs"] = [0.1]
    assert not accelerator.is_training(content)
    content = on_a_gpu() | {"hardware": {"devices": ["cpu"]}}
    assert not accelerator.is_training(content)


def drawn(draw, content):
    figure = Figure()
    draw(figure, content)
    return figure.axes[0]


def test_the_timeline_has_a_lane_for_each_place_and_a_look_for_each_kind():
    axes = drawn(timeline.draw_lanes, window())
    assert len(axes.get_yticks()) == len(LANES)
    kinds = [label for names in LANES.values() for label in names.values()]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == kinds
    assert {text.get_text() for text in axes.texts} == {"opens", "save"}
    for names in LANES.values():
        looks = [json.dumps(timeline._LOOKS[label]) for label in names.values()]
        assert len(set(looks)) == len(looks)


def test_throughput_is_by_mode_against_the_interval():
    axes = drawn(train.draw_throughput, training())
    lines = {c.get_label(): c.lines[0] for c in axes.containers}
    assert lines.keys() == {"orbax_async", "gockpt"}
    assert lines["orbax_async"].get_xydata().tolist() == [[10, 0.95], [50, 0.99]]


def test_stall_is_never_shown_alone():
    assert not train.has_stall(record("train", {"gockpt/1/hook_secs_per_save": [1.0]}))
    assert not train.has_stall(predicted())  # nor without stock's
    assert not train.has_throughput(predicted())
    axes = drawn(train.draw_stall, training())
    rows = [text.get_text() for text in axes.get_yticklabels()]
    assert rows == [f"{mode}, every {i}" for mode in ("orbax_async", "gockpt") for i in (10, 50)]
    medians = [tuple(line.get_xydata()[0]) for line in axes.lines if line.get_marker() == "o"]
    assert (1.0, 0.0) in medians  # inflation
    assert (0.25, 0.0) in medians  # hooks


def test_a_prediction_is_drawn_beside_what_was_measured():
    assert not train.has_prediction(training())
    axes = drawn(train.draw_prediction, predicted())
    points = [tuple(line.get_xydata()[0]) for line in axes.lines if line.get_marker() == "o"]
    assert points[:2] == [(0.5, pytest.approx(0.65)), (0.5, 0.125)]
    assert len(points) == 2 * len(PERCENTS)
    assert axes.texts[0].get_text() == "b15, K = 1"


def test_a_prediction_is_in_the_table_with_its_spread():
    lines = tables.prediction_table(predicted())
    assert "| gockpt_b15, 20 steps | 1 | 0.500 | 0.650 | 0.600 to 0.700 | 0.125 |" in lines
    assert lines[-1] == "Medians of 2 phases each, per save; an undisturbed step took 0.250 s."


def test_the_readme_says_what_the_figure_shows():
    text = " ".join(tables.throughput_lines(training()))
    assert "docs/figures/throughput.svg" in text
    assert "every 10 steps: `orbax_async` 0.950, `gockpt` 0.999 (medians" in text
    assert "simulated" in text
    assert "last save" not in text
    waiting = training()
    for mode, part, late in (("orbax_async", 0.5, 0.6), ("gockpt", 0.7, 1.2)):
        waiting["samples"] |= {f"{mode}/10/job_throughput_ratio": [part],
                               f"{mode}/10/drain_over_interval": [late]}  # fmt: skip
    text = " ".join(tables.throughput_lines(waiting))
    assert "of a phase counted, too: `orbax_async` 0.500, `gockpt` 0.700; phases" in text
    assert "saves wait for each other: they were visible after 1.20 by `gockpt` of the" in text
    drifting = training()
    drifting["samples"]["ideal/10/throughput_ratio"] = [0.5, 0.9, 1.0, 1.1, 1.5]
    again = "divided by itself, gave 0.900 to 1.100 (the middle half; the band in the plot)"
    assert again in " ".join(tables.throughput_lines(drifting))
    assert "on H100" in " ".join(tables.throughput_lines(training(devices=["H100"])))


def test_a_table_replaces_what_lies_between_the_marks(tmp_path):
    page = tmp_path / "docs" / "accelerators.md"
    page.parent.mkdir()
    begin, end = tables.marks()
    page.write_text(f"before\n{begin}\nlast year's\n{end}\nafter\n")
    results = write(tmp_path / "results", aot=aot() | {"notes": ["v5p/7B/fsdp: not measured: no"]})
    assert "docs/accelerators.md: table from aot.json" in list(
        make.make(results, tmp_path / "out", tmp_path)
    )
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "last year" not in text
    assert "| v5e:2x4, 1B, FSDP | 1.50 | 1.50 | 0.75 | 1.50 | 1.00 / 1.00 | 0.67 / 0.67 |" in text
    assert "\nNot measured: v5p/7B/fsdp; the result" in text
    assert "Arming adds 0.500 to 0.500 times" in text
    assert "in at most 17 parts, which hold at most 1.000 times that budget" in text
    page.write_text("no marks")
    with pytest.raises(ValueError, match="has no place for its table"):
        tables.insert(page, [])


def test_the_documents_are_those_of_the_kept_results(tmp_path):
    """Figures by the result that they name (bytes differ between matplotlibs), tables as text."""
    results = make.load_results(ROOT / "bench" / "results")
    for name, plot in make.PLOTS.items():
        suited = [r for r in results if plot.suits(r.record)]
        path = ROOT / "docs" / "figures" / f"{name}.svg"
        assert path.exists() == bool(suited), name
        if suited:
            assert source(path) == suited[-1].caption
    for place, (suits, table) in tables.TABLES.items():
        suited = [r for r in results if suits(r.record)]
        if suited:
            page, _, name = place.partition("#")
            copy = tmp_path / "page.md"
            copy.write_text((ROOT / page).read_text(encoding="utf-8"), encoding="utf-8")
            tables.insert(copy, tables.lines_of(table, suited[-1]), name)
            assert copy.read_text() == (ROOT / page).read_text(), "run `make figures`"


def test_what_saves_take_is_told_beside_their_budget(tmp_path):
    figures = {
        "gockpt_k2/extra_rss_state_ratio": 1.5, "gockpt_k2/extra_over_accounted_ratio": 0.9,
        "gockpt_k2/host_peak_extra_bytes": 1e9, "gockpt_k2/host_budget_bytes": 2e9,
        "gockpt_k2/host_peak_budget_ratio": 0.5, "gockpt_k2/kept_bytes": 1e7,
        "orbax_async/extra_rss_state_ratio": 3.0, "orbax_async/kept_bytes": 0.0,
    }  # fmt: skip
    found = record("memory", {name: [x, x * 1.5, x] for name, x in figures.items()})
    found |= {"details": {"state_bytes": 1e9}, "command": "python -m bench memory"}
    lines = tables.memory_table(found)
    assert "| `gockpt_k2` | 1.50 | 0.90 | 1.00 | 2.00 | 0.50 | 0.01 |" in lines
    assert "| `orbax_async` | 3.00 | - | - | - | - | 0.00 |" in lines
    assert lines[-1].endswith("at most 0.75 of its budget in any.")
    page = tmp_path / "page.md"
    begin, end = tables.marks("memory")
    page.write_text(f"{tables.marks()[0]}\nother\n{end}\n{begin}\n{end}\n")
    tables.insert(page, lines, "memory")
    assert "\nother\n" in page.read_text()
    assert not tables._is_memory(found | {"command": "python -m bench memory --quick"})


def test_lanes_are_read_from_a_profile(tmp_path):
    def train_step(x):
        return jnp.sin(x) @ x

    def armed(x):
        return jnp.cos(x) @ x

    def _copy(x):
        return jnp.copy(x)

    programs = [jax.jit(f) for f in (train_step, armed, _copy)]
    x = jnp.ones((64, 64))
    hosts = [name for names in LANES.values() for name in names if name.startswith("gockpt/")]
    jax.block_until_ready([program(x) for program in programs])
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with jax.profiler.trace(tmp_path, profiler_options=options):
        with events.span(ORIGIN):
            pass
        for program in programs:
            program(x).block_until_ready()
        with contextlib.ExitStack() as stack:
            for name in hosts:
                stack.enter_context(events.span(name))
    spans = read_spans(tmp_path)
    assert [s.name for s in spans[:3]] == ["step", "armed step", "staging copy"]
    assert {(s.lane, s.name) for s in spans} == {
        (lane, label) for lane, names in LANES.items() for label in names.values()
    }
    assert all(0.0 <= s.start_secs <= s.end_secs < 60.0 for s in spans)


def test_landing_and_writing_are_spans(monkeypatch):
    """Writing is one span for as long as any chunk is with TensorStore."""
    open_spans, seen = [], []

    @contextlib.contextmanager
    def span(name):
        open_spans.append(name)
        seen.append(name)
        yield
        open_spans.remove(name)

    monkeypatch.setattr(events, "span", span)
    Pull([jnp.ones(3)], list).result()
    assert seen == [events.SPAN_LAND]

    async def write():
        budget = WriteBudget(100, WriteStats())
        async with budget.admit(10, 10):
            async with budget.admit(20, 20):
                assert open_spans == [events.SPAN_WRITE]
            assert open_spans == [events.SPAN_WRITE]
        assert not open_spans
        async with budget.admit(10, 10):
            assert open_spans == [events.SPAN_WRITE]

    asyncio.run(write())
    assert seen == [events.SPAN_LAND, events.SPAN_WRITE, events.SPAN_WRITE]


def test_lanes_are_the_librarys_own_names():
    names = {value for name, value in vars(events).items() if name.startswith("SPAN_")}
    lanes = {name for lane in LANES.values() for name in lane if name.startswith("gockpt/")}
    assert lanes == names


def test_spans_are_in_the_order_of_time():
    assert Span(0.0, 1.0, "write", "write") < Span(0.5, 0.6, "device", "step")
