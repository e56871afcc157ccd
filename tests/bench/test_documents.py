"""Every figure in the documents is from a kept result.

Figures and tables that are made are compared in `test_figures.py`. What prose tells by hand is
here: the very words, made from the result.
"""

from __future__ import annotations

import json
import re
import statistics

import pytest

from bench.gpu.table import aims_of
from bench.record import ROOT

RESULTS = ROOT / "bench" / "results"
PAGES = [ROOT / "README.md", ROOT / "bench" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PICTURES = sorted((ROOT / "docs" / "figures").glob("*.svg"))


def words(path):
    """A text without its line breaks."""
    return " ".join(path.read_text(encoding="utf-8").split())


def short(value):
    """As prose writes small numbers.

    Example:
      >>> short(0.00491)
      '4.9e-3'
    """
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa.removesuffix('.0')}e{int(exponent)}"


def lars(figures):
    by = short(figures["lars/cut/by"])
    yield f"by at most {figures['lars/cut/ulps']} ULP in the first step, {by} of the leaf's largest"


def _perturbed(figures):
    """How many are, with FMA, on each model; by how much at most; and the two that grow."""
    by = {
        tuple(name.split("/")[:2]): by
        for name, by in figures.items()
        if name.endswith("/fma/perturbed by") and by > 0
    }
    models = [model for model, _ in by]
    grown = [by.pop(("transformer", name)) for name in ("adam, l2", "adamw, clipped")]
    most = short(max(by.values()))
    return models.count("mlp"), models.count("transformer"), most, short(grown[0]), grown[1]


def armed_with_fma(figures):
    mlp, transformer, most, l2, clipped = _perturbed(figures)
    count = len(_optimizers(figures))
    yield f"{mlp} of the {count} differ on the MLP after 8 armed steps and {transformer} on the"
    yield f"transformer, by at most {most} of a leaf's largest value; but for L2"
    yield f"transformer, {l2} and {clipped:.2f} (`bench/results/cut.json`;"


def armed_elsewhere(figures):
    mlp, transformer, most, l2, clipped = _perturbed(figures)
    assert most == "4.1e-7", "as on the machine before"
    yield f"processor {mlp} and {transformer}, and {l2} and {clipped:.2f})"
    count = len(_optimizers(figures))
    yield f"any of the bench's {count} optimizers, on an MLP"
    assert not any(v for name, v in figures.items() if name.endswith("/avx/perturbed"))


ROWS = ("adan", "lars", "novograd", "optimistic_adam", "sm3")


def cut_today(figures):
    def of(name, what):
        return figures[f"transformer/{name}/{what}"]

    for name in ROWS:
        early, late, scalars = (int(of(name, w)) for w in ("early", "late", "scalars"))
        bytes_ = f"{of(name, 'early bytes'):.1f} | {of(name, 'retained'):.1f}"
        yield f"| {name} | {early} / {late} | {bytes_} | {scalars} |"
    count = len(_optimizers(figures))
    yield f"none of the {count} is perturbed, and none torn"
    assert not any(v for name, v in figures.items() if "/avx/" in name)
    before = json.loads((RESULTS / "cut.json").read_text(encoding="utf-8"))["figures"]
    changed = {
        name
        for name in _optimizers(figures)
        for what in ("early", "late", "early bytes", "retained", "scalars")
        if of(name, what) != before[f"transformer/{name}/{what}"]
    }
    assert changed == set(ROWS)


def _optimizers(figures):
    return {name.split("/")[1] for name in figures}


def grown(figures):
    def most(kind, precision="bf16", last=7):
        return short(max(figures[f"{precision}/{kind}/{n}/by"] for n in range(last + 1)))

    assert [figures[f"bf16/other bf16/{n}"] for n in (5, 6)] == [0, 1]
    yield f"each of the {figures['bf16/contracted/differ']:.0f} elements of first moments"
    yield f"no armed step differs by more than {most('one step')}, and the first"
    yield f"The runs stay within {most('running', last=6)} of each other for seven steps; then one"
    yield f"the next step differs by {short(figures['bf16/running/7/by'])}. That parameter"
    yield f"makes the same {short(figures['bf16/planted/7/by'])}. With the matrix products in fp32"
    yield f"fp32 the runs stay within {most('running', 'fp32')}. In clipped"
    assert [figures[f"clipped/other bf16/{n}"] for n in range(5)] == [0, 0, 0, 0, 1]
    assert figures["clipped/planted/5/by"] == figures["clipped/running/5/by"]
    yield f"alone makes the same {figures['clipped/planted/5/by']:.2f} as the next step has"
    yield f"differs by {figures['clipped/running/7/by, no key bias']:.3f}, not"
    yield f"not {figures['clipped/running/7/by']:.2f}. Other"


def small_leaves(figures):
    files, ocdbt, stock = (figures[f"small/save_secs/{w}"] for w in ("files", "ocdbt", "stock"))
    yield f"as plain files took {files / ocdbt:.1f} times as long, {files / stock:.2f} of stock's"


def saves(figures):
    def ms(figure):
        return f"{1000 * figures[f'{figure}/files_aligned']:.0f} ms"

    yield f"as it lies: {figures['raw_disk_ratio/files_aligned']:.2f} of the raw disk"
    yield f"{figures['writing_raw_ratio/files_aligned']:.2f} while it writes; "
    yield f"{ms('first_write_secs')} pass before the first write"
    yield f"{ms('tail_secs')} after the last one, of which {ms('sync_secs')} are the last syncs"
    yield f"syncs, {ms('rename_secs')} Orbax's"
    yield f"that is copied: {figures['raw_disk_ratio/files']:.2f} ("
    yield f"and {figures['writing_raw_ratio/files']:.2f} while it writes, for"
    copied, taken = (figures[f"cpu_secs_per_gb/{w}"] for w in ("files", "files_aligned"))
    yield f"({copied:.2f} s for 10^9 bytes, {taken:.2f} without them)"


def databases(figures):
    def ratio(name):
        return f"{figures[f'raw_disk_ratio/{name}']:.2f}"

    yield f"{ratio('ocdbt_aligned')} of the raw disk from memory that it takes as it lies, and"
    yield f"{ratio('ocdbt')} from memory that is copied; plain files {ratio('files_aligned')} and"
    yield f"and {ratio('files')} (`raw_disk_ratio/...`"
    yield f"{1000 * figures['first_write_secs/ocdbt_aligned']:.0f} ms pass before the first write"


def many_small_leaves(figures):
    def secs(name, what="save"):
        return figures[f"small/{what}_secs/{name}"]

    ours, files, stock = (secs(name) for name in ("ocdbt", "files", "stock"))
    yield f"a save took {ours / stock:.2f} of stock's time with its defaults, and"
    yield f"and {ours / files:.2f} of that with plain files"
    yield f"a restore {secs('ocdbt', 'restore') / secs('stock', 'restore'):.2f} of stock's"
    large = figures["restore_secs/ocdbt"] / figures["stock_restore_secs/ocdbt"]
    yield f"a restore {large:.2f} of stock's time on the same database"


def large_leaves(figures):
    def ratio(to, of=""):
        return figures[f"{of}save_secs/ocdbt"] / figures[f"{of}save_secs/{to}"]

    yield f"a save took {ratio('stock'):.2f} of stock's time with its defaults, and"
    yield f"files and no compression a save took {ratio('stock_fastest'):.2f}. Of 2,000"
    small = ratio("stock_fastest", "small/")
    yield f"and {small:.2f} of stock's with plain files and no compression"


def hooks(figures):
    inside, beside = figures["hook_window_ms"], figures["hook_window_writing_ms"]
    yield f"{inside:.1f} ms in a window ({figures['hook_window_cpu_ms']:.1f} ms of processor time,"
    yield f"{figures['hook_jax_ms']:.1f} ms in calls of JAX), {beside:.1f} ms beside a save that is"
    yield f"{figures['hook_opening_ms']:.1f} ms where it opens, {figures['hook_idle_us']:.0f} us"


def save_calls(figures):
    ratio = figures["save_call_ratio"]
    yield f"`save_call_stock_ms`): {ratio:.2f} of stock's, with windows, at 300 leaves"


def save_calls_held_back(figures):
    yield f"and {figures['save_call_ratio']:.2f} on another machine since it is held back"
    yield f"step behind it take {figures['held_back_ratio']:.2f} of what they take without (median"


def collections_of_garbage(figures):
    names = ("", "_snapshot", "_stock")
    often = {round(1 / figures[f"full_collections_per_save{name}"]) for name in names}
    assert (min(often), max(often)) == (6, 8)
    took, frozen = figures["full_collection_ms"], figures["full_collection_frozen_ms"]
    yield f"once in six to eight saves, ours or stock's, for {took:.0f} ms"
    yield f"makes it {frozen:.1f} ms"
    ours, stock = figures["save_call_cpu_ms"], figures["save_call_cpu_stock_ms"]
    yield f"of 300 it took {ours:.0f} ms of processor time (stock's {stock:.0f}"


def analysis(figures):
    leaves = [int(name.split()[0]) for name in figures if name.endswith("/analysis_over_jit")]
    ratios = [figures[f"{n} leaves/analysis_over_jit"] for n in leaves]
    lowering = [figures[f"{n} leaves/lowering_over_jit"] for n in leaves]
    in_words = ", ".join(f"{n:,}" for n in leaves[:-1]) + f" and {leaves[-1]:,}"
    yield f"with {in_words} leaves the analysis took {', '.join(f'{r:.2f}' for r in ratios[:-1])}"
    yield f"and {ratios[-1]:.2f} of the processor time that `jax.jit` itself takes on that thread"
    yield f"lowering the armed step {min(lowering):.2f} to {max(lowering):.2f} of it"


def profiled_window(figures, samples):
    least, most = (f(samples["user_step_call_ms"]) for f in (min, max))
    first = figures["user_step_call_ms/first_after_the_window"]
    yield f"took {least:.0f} to {most:.0f} ms of the trainer's thread for a call"
    yield f"and {first:.0f} ms at the first step after the window"
    idle = sorted(samples["compute_idle_ms/behind_the_save_step"])[:-3:-1]
    sample = figures["sample_call_ms/first"]
    yield f"the first sample took {sample:.0f} ms of the trainer's thread so"
    yield f"idle for {idle[0]:.0f} ms of it"
    yield f"again for {idle[1]:.0f} ms while"
    busy = [figures[f"compute_busy_ratio/{when}"] for when in ("armed_steps", "before_the_window")]
    yield f"busy for {busy[0]:.2f} of the armed steps' time ({busy[1]:.2f} before the window)"
    ahead = figures["ahead_ms/at_the_end_of_the_last_armed_call"]
    yield f"the device had {ahead:.0f} ms more to do"
    rest = figures["trainer_ms/from_there_to_the_next_steps_call"] - sample
    yield f"the trainer took {rest:.0f} ms beside that first sample; the call itself"
    yield f"the call itself took {first:.0f} ms."
    yield f"for an armed step had {figures['kernels_per_armed_step']:.0f}, and"
    assert 90 < ahead < 110  # half of a step of 0.2 s


def measured_windows(figures, samples):
    ways = ("gockpt_k4", "gockpt", "orbax_async")
    window, copy, stock = ([1000 * x for x in samples[f"{w}/50/around_save_secs"]] for w in ways)
    yield f"A window cost training {window[0]:.0f} and {window[1]:.0f} ms ("
    yield f"{figures['state_gb']:.1f} GB, `bench/results/"
    yield f"a device copy {copy[0]:.0f} and {copy[1]:.0f}, stock {stock[0]:.0f} and {stock[1]:.0f}."


def windows_with_graphs(figures, samples):
    steps = figures["gockpt_k4/50/window_steps"]
    cost = [1000 * x for x in samples["gockpt_k4/50/around_save_secs"]]
    yield f"a window cost {cost[0]:.0f} and {cost[1]:.0f} ms. What of it is what"
    yield f"{figures['state_gb']:.1f} GB of state, a window of {steps:.0f})"


def graphs_side_by_side(figures, samples):
    graphs, without = (samples[f"800m/gockpt_k4{x}/around_save_ms"] for x in ("+graphs", ""))
    middle = [figures[f"800m/gockpt_k4{x}/around_save_ms"] for x in ("+graphs", "")]
    cost = f"{min(graphs):.0f} to {max(graphs):.0f} ms (median {middle[0]:.0f})"
    yield f"with graphs a save cost {cost}"
    yield f"without {min(without):.0f} to {max(without):.0f} ({middle[1]:.0f}). With graphs"
    calls = sorted(samples["800m/gockpt_k4+graphs/step_call_ms/in_window"][2:])
    assert calls[6] > 200
    took = f"{calls[0]:.0f} to {calls[5]:.0f} ms once"
    yield f"two of three calls of the armed step took {took}"


def what_a_window_cost(figures, samples):
    for mode, words_for in (("gockpt_k4", "a window cost"), ("gockpt_k1", "a device copy cost")):
        cost = samples[f"800m/{mode}/around_save_ms"]
        middle = figures[f"800m/{mode}/around_save_ms"]
        unit = " ms" if mode == "gockpt_k4" else ""
        yield f"{words_for} {middle:.0f}{unit} ({min(cost):.0f} to {max(cost):.0f}"


def held_by_the_driver(figures, samples):
    held, free = (
        samples[f"callbacks_outstanding/{x}"] for x in ("when_one_was_held", "when_none_was")
    )
    yield f"With {min(held)} to {max(held)} of them outstanding the next one did not"
    yield f"(four times); with up to {max(free)} none was held (three times)"
    assert (len(held), len(free)) == (4, 3)
    copies, idle = (
        samples[x]
        for x in ("late_copy_call_ms", "compute_idle_ms/behind_the_save_step_until_the_next_call")
    )
    yield f"took {copies[0]:.0f} and {copies[1]:.0f} ms of the trainer's thread: until the device"
    yield f"waited for it: {idle[0]:.0f} and {idle[1]:.0f} ms"


def counts_of_a_gpu(figures, samples):
    run, failed = figures["tests/invariants/run"], figures["tests/invariants/failed"]
    yield f"`tests/gpu` passed ({figures['tests/gpu/passed']:.0f})"
    yield f"{figures['tests/invariants/passed']:.0f} of the {run:.0f} of `tests/invariants`"
    assert figures["failed_ones/passed_with_deterministic_ops"] == failed
    yield f"The other {failed:.0f} compare with a run without checkpoints: they passed with"


def link_of_a_gpu(figures, samples):
    assert 0.88 < figures["pull_link_ratio"] < 0.94
    yield "nine tenths of the driver's own rate for a block of 1 GiB"
    slow = [figures[f"pull_gbps/{w}/1024MiB/warm"] for w in ("copy_to_host_async", "asarray")]
    slow.append(figures["pull_gbps/put_on_cpu/1024MiB/warm"])
    ours = figures["pull_gbps/library/1024MiB/warm"]
    assert 30 < ours / max(slow) < ours / min(slow) < 75
    yield "thirty to seventy times as slow"
    for figure in ("overlap_ratio", "async_dispatch/overlap_ratio"):
        assert figures[figure] > 0.98
    assert (
        figures["donated_step_secs/pulled_buffer"] > 20 * figures["donated_step_secs/other_buffer"]
    )
    assert figures["same_memory/pinned_to_numpy"] == figures["same_memory/numpy_to_cpu"] == 1


def aims_on_a_gpu(figures, samples):
    ours, window, stock = (
        figures[f"{mode}/50/around_save_secs"] for mode in ("gockpt", "gockpt_k4", "orbax_async")
    )
    yield f"at {ours / stock:.2f} of it and the window at {window / stock:.2f};"
    yield f"with {figures['state_gb']:.1f} GB, all that was measured of them is met but three"
    assert {text for text, _, met in aims_of(samples) if met == "NO"} == {
        "state: at least 20 GB",
        "window of 4 steps, inflation per save: at most 0.02 of stock async's",
    }


def pauses_on_a_gpu(figures, samples):
    stock, link = figures["orbax_async/50/around_save_secs"], figures["state_gb"] / 55.1
    yield f"stopped training for {stock:.2f} s, where the link alone would take {link:.2f}"
    hooks = [figures[f"{mode}/50/hook_secs_per_save"] for mode in ("gockpt_k4", "orbax_async")]
    yield f"{hooks[0]:.2f} s in all (stock: {hooks[1]:.2f}, a device copy "
    yield f"a device copy {figures['gockpt/50/hook_secs_per_save']:.2f}; `hook_secs_per_save`)"


def twenty_gigabytes(figures, samples):
    stock, copy, window = (
        samples[f"{mode}/50/around_save_secs"] for mode in ("orbax_async", "gockpt", "gockpt_k4")
    )
    step = figures["ideal/50/step_median_secs"]
    yield f"({figures['state_gb']:.1f} GB, steps of {step:.2f} s, two"
    yield f"a save cost {stock[0]:.2f} and {stock[1]:.2f} s by stock's asynchronous saving"
    yield f"{copy[0]:.2f} s by the device copy, and {window[0]:.2f} and"
    yield f"{window[0]:.2f} and {window[1]:.2f} s by a window of four steps"


def many_arrays(figures, samples):
    together, apart = (samples[f"340m_apart/gockpt_k1{x}/around_save_ms"] for x in ("", "+apart"))
    yield f"{min(together):.0f} to {max(together):.0f} with shared buffers"
    yield f"and {min(apart):.0f} to {max(apart):.0f} without"


def a_window_since(figures, samples):
    saves, costs = (samples[f"800m/gockpt_k4/{x}_ms"] for x in ("save_call", "around_save"))
    yield f"`save_call_ms` was {min(saves):.0f}, 136 to 147 before; it cost {min(costs):.0f} ms"


def with_graphs_again(figures, samples):
    graphs, without = (samples[f"800m/gockpt_k4{x}/around_save_ms"] for x in ("+graphs", ""))
    yield f"A save cost {spread(graphs, '30 ms with graphs ({} to {})')} and"
    yield f"and {spread(without, '58 without ({} to {})')}. What is chance"
    chance = samples["800m/ideal/around_save_ms"]
    yield f"checkpoints: {min(chance):.0f} to {max(chance):.0f} ms."
    calls, alone = (samples[f"800m/gockpt_k4{x}/step_call_ms/in_window"] for x in ("+graphs", ""))
    yield f"returned after {min(calls):.0f} to {max(calls):.0f} ms with graphs"
    step = figures["800m/gockpt_k4/step_ms"]
    assert min(alone) > step
    yield f"Without, after {min(alone):.0f} to {max(alone):.0f} ms: a whole step of {step:.0f} ms"
    held, freely = (sorted(samples[f"800m/gockpt_k4{x}/save_call_ms"]) for x in ("", "+graphs"))
    yield f"then took {held[2]:.0f} and {held[3]:.0f} ms, where it took {freely[0]:.0f} to"
    yield f"to {freely[2]:.0f} with graphs (and once {freely[3]:.0f}, in which Python's"
    yield f"took {figures_of_garbage(samples):.0f})"
    behind = samples["800m/gockpt_k4+graphs/step_call_ms/behind"]
    usual = samples["800m/ideal/step_call_ms/behind"]
    yield f"its call took {min(behind):.0f} to {max(behind):.0f} ms, where it takes"
    yield f"where it takes {min(usual):.0f} to {max(usual):.0f}, and cost nothing that could be"


def figures_of_garbage(samples):
    return min(samples["800m/gockpt_k4+graphs/full_collection_ms"])


def spread(values, form):
    """A sentence's least and most."""
    middle, _, rest = form.partition(" ")
    assert f"{statistics.median(values):.0f}" == middle
    return f"{middle} {rest.format(*(f'{f(values):.0f}' for f in (min, max)))}"


def many_arrays_again(figures, samples):
    calls = samples["340m_apart/gockpt_k4/step_call_ms/in_window"]
    middle = statistics.median(calls)
    yield f"took {min(calls):.0f} to {max(calls):.0f} ms (median {middle:.0f};"
    ours = [
        samples[f"340m_apart/{mode}/step_call_ms/behind"] for mode in ("gockpt_k1", "gockpt_k4")
    ]
    calls = sorted(ours[0] + ours[1])
    steps = [figures[f"340m_apart/{mode}/step_ms"] for mode in ("gockpt_k1", "gockpt_k4")]
    yield f"411 arrays it took {calls[0]:.0f} to {calls[-1]:.0f} ms beside steps of"
    yield f"beside steps of {steps[0]:.0f} to {steps[1]:.0f}. There"
    copy = samples["340m_apart/gockpt_k1/around_save_ms"]
    yield f"a device copy cost {spread(copy, '31 ms ({} to {}, of which')}"


def held_behind_a_save(figures, samples):
    updates = samples["graph_update_ms"]
    yield f"its updates took {updates[0]:.0f} and {updates[1]:.0f} ms"
    yield f"{figures['callback_held_ms']:.0f} ms were one `cuLaunchHostFunc`"
    yield f"{figures['callbacks_outstanding/when_it_was_held']:.0f} of them were outstanding"
    assert figures["transfers_done/when_it_returned"] == 4
    yield f"four of the save's {figures['transfers']:.0f} transfers had ended"


def shared_buffers_again(figures, samples):
    together, apart = (samples[f"340m_apart/gockpt_k1{x}/around_save_ms"] for x in ("", "+apart"))
    yield f"cost {spread(together, '31 ms in shared buffers ({} to {})')}, and"
    yield f"and {spread(apart, '158 without ({} to {})')}."


def single_saves(figures, samples):
    ways = ("gockpt_k1", "gockpt_k4+graphs", "ideal", "orbax_async")
    copy, window, chance, stock = (figures[f"800m/{way}/around_save_ms"] for way in ways)
    yield f"the device copy is at {copy / stock:.3f} of stock's and the window"
    yield f"at {window / stock:.2f}, where chance alone"
    yield f"gave {chance / stock:.2f} ("
    yield f"misses by {window - 0.02 * stock:.0f} ms: two of its steps"
    least, most = (f(samples["800m/ideal/around_save_ms"]) for f in (min, max))
    for way in ("device_copy", "orbax_async_background"):
        assert figures[f"800m/{way}/around_save_ms"] < most
    assert least > 0


def by_hand_and_in_the_background(figures, samples):
    (copy,) = samples["device_copy/50/around_save_secs"]
    background = [1000 * x for x in samples["orbax_async_background/50/around_save_secs"]]
    yield f"with {figures['state_gb']:.1f} GB a save cost {1000 * copy:.0f} ms, in one round, and"
    yield f"and {background[0]:.0f} and {background[1]:.0f} ms (`around_save_secs`), on a"
    again = samples["ideal/50/throughput_ratio"]
    yield f"at {min(again):.3f} to {max(again):.3f} of itself"


_MISSED = {
    "inflation per save: at most 0.02 of stock async's",
    "window of 4 steps, inflation per save: at most 0.02 of stock async's",
    "window of 4 steps, throughput: at least 0.995 of ideal",
}


def missed(samples):
    return {text for text, _, met in aims_of(samples) if met == "NO"}


def aims_with_twenty_gigabytes(figures, samples):
    (inflation,) = samples["gockpt/50/inflation_vs_stock_async"]
    window = samples["gockpt_k4/50/throughput_ratio"]
    yield f"{figures['state_gb']:.1f} GB the device copy's inflation is {inflation:.2f} of stock's"
    yield f"the window's throughput {window[0]:.3f} and {window[1]:.3f} of undisturbed"
    assert missed(samples) == _MISSED
    assert within_the_drift(figures, samples)


def aims_with_few_gigabytes(figures, samples):
    first, second = samples["gockpt/50/inflation_vs_stock_async"]
    copy, window = (samples[f"{m}/50/throughput_ratio"] for m in ("gockpt", "gockpt_k4"))
    inflation = f"inflation is {first:.2f} and {second:.2f} of stock's"
    yield f"With {figures['state_gb']:.1f} GB the device copy's {inflation}"
    yield f"its throughput {copy[0]:.3f} and {copy[1]:.3f}, and the"
    yield f"and the window's {window[0]:.3f} and {window[1]:.3f}"
    more = {"state: at least 20 GB", "throughput: at least 0.995 of ideal"}
    assert missed(samples) == _MISSED | more
    assert within_the_drift(figures, samples)


def within_the_drift(figures, samples):
    """Whether a device copy's inflation is no more than what an interval without saves drifted."""
    again = samples["ideal/50/throughput_ratio"]
    drift = 50 * figures["ideal/50/step_median_secs"] * (max(again) - min(again))
    return figures["gockpt/50/inflation_secs_per_save"] <= drift


def four_hundred_arrays(figures, samples):
    copy, stock = (samples[f"340m_apart/{m}/around_save_ms"] for m in ("gockpt_k1", "orbax_async"))
    yield f"a save cost {spread(copy, '31 ms by a device copy ({} to {})')}, where"
    yield f"saves cost {spread(stock, '249 ({} to {})')}. Python's"
    yield f"4.1 GB, steps of {figures['340m_apart/gockpt_k1/step_ms']:.0f} ms;"


def perturbed(figures):
    return {name[10:] for name, x in figures.items() if name.startswith("perturbed/") and x > 0}


def two_thirds_of_them(figures, samples):
    assert figures["perturbed/fromage"] == 0
    assert perturbed(figures) == {"adafactor", "lars"}
    yield f"there was time for {figures['exact/tried']:.0f} of the 33"


def all_optimizers(figures, samples):
    assert figures["exact/tried"] == 33
    exact = [x for name, x in figures.items() if re.match("exact/.*/max_ulps|library/", name)]
    assert {x for x in exact if x < 100} == {0}
    assert figures["exact/failures"] == 0
    assert perturbed(figures) == {"fromage", "novograd"}
    rounded = [x for name, x in figures.items() if re.fullmatch("rounded/.*/params/relative", name)]
    assert 2.1e-7 < max(rounded) < 2.2e-7
    yield "within 2.2e-7 of the leaf's largest value"
    yield "of the 33."


def torchs_stall(figures, samples):
    yield f"returned after {figures['torch/stall_in_transfers']:.0f} times its transfer"


def little_memory(figures, samples):
    window, snapshot = "gockpt_b80/50", "gockpt/50"
    assert figures[f"{window}/window_steps"] == 2
    staged = figures[f"{window}/staged_bytes_ratio"] * figures["state_gb"]
    yield f"a save cost {figures[f'{window}/around_save_secs']:.2f} s, with {staged:.1f} GB staged"
    yield f"and throughput was {figures[f'{window}/throughput_ratio']:.3f} of undisturbed"
    yield f"in parts: {figures[f'{snapshot}/around_save_secs']:.2f} s each, nearly what"
    yield f"cost above, and {figures[f'{snapshot}/throughput_ratio']:.3f}."
    peaks = [figures[f"{mode}/device_memory_over_plan"] for mode in (window, snapshot)]
    yield f"The device's peak was {peaks[0]:.2f} and {peaks[1]:.2f} of what was planned"


def memory_of_the_host(figures, samples):
    yield f"grew by {figures['gockpt/50/host_memory_ratio']:.2f} times the state"


def predictions_on_a_gpu(figures, samples):
    assert figures["gockpt/50/predicted_stall_secs"] == 0
    copy, window = (samples[f"{mode}/50/around_save_secs"] for mode in ("gockpt", "gockpt_k4"))
    yield f"a save cost {copy[0]:.2f} and {copy[1]:.2f} s by that copy, {window[0]:.2f} and"
    yield f"{window[0]:.2f} and {window[1]:.2f} s by a window of four steps"


def replay_on_a_gpu(figures, samples):
    yield f"{figures['exact/tried']:.0f} of 33"
    assert (
        max(x for name, x in figures.items() if re.fullmatch("rounded/.*/params/relative", name))
        < 2.1e-7
    )
    exact = [x for name, x in figures.items() if re.fullmatch("exact/.*/max_ulps", name)]
    assert len(exact) > 22
    assert figures["rounded/adam/params/max_ulps"] == pytest.approx(1e6, rel=0.1)  # `Audit` says it
    assert max(exact) == figures["exact/failures"] == 0


H200, LATER = "h200-2026-11-27", "h200-2026-11-28"
GRAPHS_BACK = "docs/decisions/0035-the-armed-step-has-its-graphs-back.md"


@pytest.mark.parametrize(
    ("page", "result", "sentences"),
    [
        ("docs/decisions/0032-programs-that-run-now-and-then-on-a-gpu.md", *found)
        for found in (
            (f"{H200}/window.json", profiled_window),
            (f"{H200}/train.json", measured_windows),
            (f"{H200}/train-300m.json", windows_with_graphs),
            (f"{H200}/around.json", graphs_side_by_side),
        )
    ]
    + [
        ("docs/decisions/0034-few-transfers-behind-a-step.md", *found)
        for found in (
            (f"{H200}/seal.json", held_by_the_driver),
            (f"{H200}/around.json", what_a_window_cost),
        )
    ]
    + [
        ("docs/accelerators.md", f"{H200}/tests.json", counts_of_a_gpu),
        ("docs/accelerators.md", f"{H200}/transfer.json", link_of_a_gpu),
        ("bench/README.md", f"{H200}/train.json", aims_on_a_gpu),
        ("bench/README.md", f"{H200}/train.json", predictions_on_a_gpu),
        ("bench/README.md", f"{H200}/exact.json", replay_on_a_gpu),
        ("docs/accelerators.md", f"{H200}/exact.json", two_thirds_of_them),
        ("docs/accelerators.md", f"{H200}/train.json", pauses_on_a_gpu),
        ("docs/accelerators.md", f"{H200}/sixth.json", little_memory),
        ("docs/accelerators.md", f"{H200}/train-1.7b.json", twenty_gigabytes),
        ("docs/accelerators.md", f"{H200}/exact-33.json", all_optimizers),
        ("docs/decisions/0034-few-transfers-behind-a-step.md", f"{H200}/apart.json", many_arrays),
        (
            "docs/decisions/0034-few-transfers-behind-a-step.md",
            f"{LATER}/apart.json",
            shared_buffers_again,
        ),
        (GRAPHS_BACK, f"{LATER}/around.json", with_graphs_again),
        (GRAPHS_BACK, f"{LATER}/apart.json", many_arrays_again),
        (GRAPHS_BACK, f"{LATER}/behind.json", held_behind_a_save),
        ("bench/README.md", f"{LATER}/around.json", single_saves),
        ("docs/accelerators.md", f"{LATER}/apart.json", four_hundred_arrays),
        ("bench/README.md", f"{LATER}/train-300m.json", by_hand_and_in_the_background),
        (
            "docs/decisions/0034-few-transfers-behind-a-step.md",
            f"{H200}/around-few.json",
            a_window_since,
        ),
        ("bench/README.md", f"{H200}/train-1.7b.json", aims_with_twenty_gigabytes),
        ("bench/README.md", f"{LATER}/train-300m.json", aims_with_few_gigabytes),
        ("bench/README.md", f"{H200}/torch.json", torchs_stall),
        ("docs/accelerators.md", f"{H200}/memory.json", memory_of_the_host),
    ],
)
def test_prose_tells_what_a_gpu_showed(page, result, sentences):
    text = words(ROOT / page)
    assert f"bench/results/{result}" in text or f"`{result.partition('/')[2]}`" in text
    record = json.loads((RESULTS / result).read_text(encoding="utf-8"))
    for sentence in sentences(record["figures"], record["samples"]):
        assert sentence in text


def waits_of(record, mode):
    """Of the saves that count: what each waited for the one before, and held the trainer beside."""
    details = json.loads((RESULTS / H200 / record).read_text(encoding="utf-8"))["details"][mode]
    found = {report["step"]: report for report in details["reports"]}
    for step in sorted(found)[2:]:
        waited = found[step]["barrier_secs"]
        yield step, waited, 1e3 * (found[step]["stall_secs"] - waited)


def test_prose_tells_which_saves_waited_for_the_one_before():
    folder = ROOT / "docs" / "decisions"
    text = words(folder / "0032-programs-that-run-now-and-then-on-a-gpu.md")
    graphs, without = (
        [each for each in waits_of("around.json", f"800m/gockpt_k4{x}") if each[0] <= 100]
        for x in ("+graphs", "")
    )
    assert len(graphs) == len(without) == 4
    long = [f"{1e3 * waited:.0f}" for _, waited, _ in graphs if waited > 0.1]
    assert f"before, for {long[0]}, {long[1]} and {long[2]} ms (" in text
    assert len(long) == 3
    assert max(waited for _, waited, _ in without) < 0.01
    held, freer = ([round(beside) for _, _, beside in saves] for saves in (graphs, without))
    assert f"for {min(held)} to {max(held)} ms with graphs" in text
    assert f"and for {min(freer)} to {max(freer)} without" in text

    text = words(folder / "0034-few-transfers-behind-a-step.md")
    apart = [[*waits_of("apart.json", f"340m_apart/gockpt_k1{x}")] for x in ("", "+apart")]
    waits = [1e3 * waited for saves in apart for _, waited, _ in saves]
    assert f"for {min(waits):.0f} to {max(waits):.0f} ms (" in text
    together, alone = ([beside for _, _, beside in saves] for saves in apart)
    assert f"held the trainer for {min(together):.0f} to {max(together):.0f} ms with" in text
    assert f"and for {min(alone):.0f} to {max(alone):.0f} without" in text
    waited = [secs for _, secs, _ in waits_of("around-few.json", "800m/gockpt_k4") if secs > 0.1]
    assert f"waited for the one before, {waited[0]:.1f} and {waited[1]:.1f} s" in text


def steps_of(record, mode):
    """Milliseconds of each step, and those of full collections of garbage in it."""
    path = RESULTS / LATER / f"{record}.json"
    steps = json.loads(path.read_text(encoding="utf-8"))["details"][mode]["steps_ms"]
    return [step[2] for step in steps], [step[3] for step in steps]


def test_prose_tells_what_grows_old():
    path = RESULTS / "transfer-cpu-2026-11-28-later.json"
    record = json.loads(path.read_text(encoding="utf-8"))
    now, before = record["figures"], record["details"]["before"]

    def hundreds(figures, way=""):
        return f"{round(figures[f'grown_old_per_save{way}'], -2):,.0f}"

    text = words(ROOT / "docs" / "scale.md")
    assert (
        f"there are {hundreds(now)} more with windows and {hundreds(now, '_snapshot')} with" in text
    )
    assert f"({hundreds(before)} and {hundreds(before, '_snapshot')} before shards were" in text
    assert f"with stock {hundreds(now, '_stock')} (" in text
    text = words(ROOT / "docs" / "decisions" / "0036-few-objects-for-each-shard.md")
    assert f"{hundreds(now)} objects with windows and {hundreds(now, '_snapshot')} with" in text
    assert f"was {hundreds(before)} and {hundreds(before, '_snapshot')}, and stock's" in text
    assert f"stock's are {hundreds(now, '_stock')}." in text
    took = [figures["save_and_step_snapshot_ms"] for figures in (now, before)]
    assert f"behind it took {took[0]:.1f} ms, where it took {took[1]:.1f}." in text
    text = words(ROOT / "docs/decisions/0024-stock-is-asked-off-the-trainers-thread.md")
    ratios = [figures["held_back_ratio"] for figures in (now, before)]
    assert f"it is {ratios[0]:.2f} (median of 25 turns;" in text
    assert f"{ratios[1]:.2f} with the library of before" in text


def test_prose_tells_how_long_garbage_took_on_a_gpu():
    record = json.loads((RESULTS / LATER / "around.json").read_text(encoding="utf-8"))
    took = [v for name, of in record["samples"].items() if "full_coll" in name for v in of]
    assert record["samples"]["800m/ideal/full_collection_ms"]
    told = f"On an H200 it took {min(took):.0f} to {max(took):.0f} ms, in training without"
    assert told in words(ROOT / "docs" / "scale.md")


def test_prose_tells_which_steps_of_a_window_take_longer():
    took, _ = steps_of("around", "800m/gockpt_k4+graphs")
    figures = json.loads((RESULTS / LATER / "around.json").read_text(encoding="utf-8"))["figures"]
    usual, saves = figures["800m/gockpt_k4+graphs/step_ms"], (32, 48, 64, 80)
    more = [statistics.mean(took[at + n] - usual for at in saves) for n in (-1, 0, 1)]
    told = f"took {more[0]:.0f} and {more[1]:.0f} ms more than others and the one behind the save"
    assert f"{told} {more[2]:.0f} (means)" in words(ROOT / "bench" / "README.md")


def test_prose_tells_what_garbage_took():
    per_save = {}
    for way in ("gockpt_k1", "orbax_async", "gockpt_k1+frozen"):
        steps, collecting = steps_of("apart", f"340m_apart/{way}")
        per_save[way] = sum(collecting) / (len(steps) // 16 + 1)
    ours, stock, frozen = (round(x) for x in per_save.values())
    text = words(ROOT / "docs" / "accelerators.md")
    assert f"all in all {ours} ms per save by device copies, stock's {stock}. After" in text
    assert f"After `gc.freeze()` it was {frozen} (" in text


def test_prose_tells_what_the_first_saves_of_a_process_took():
    details = json.loads((RESULTS / H200 / "around.json").read_text(encoding="utf-8"))["details"]
    first = details["800m/gockpt_k1"]["reports"][0]
    told = f"{first['stall_secs']:.0f} s for {first['state_bytes'] / 1e9:.1f} GB;"
    accelerators, readme = (words(ROOT / page) for page in ("docs/accelerators.md", "README.md"))
    assert told in accelerators
    assert f"it took {first['stall_secs']:.0f} s, in which the system pins" in readme

    details = json.loads((RESULTS / LATER / "around.json").read_text(encoding="utf-8"))["details"]
    stock = details["800m/orbax_async"]["steps_ms"][0][1] / 1e3
    assert f"and stock's {stock:.0f} s, on another machine" in readme
    assert f"first of another process, took {stock:.0f} s), the later" in accelerators
    waits = [details[f"800m/gockpt_k4{x}"]["steps_ms"][14][0] / 1e3 for x in ("", "+graphs")]
    assert f"waits for that: {waits[0]:.1f} and {waits[1]:.1f} s with" in accelerators


@pytest.mark.parametrize(
    ("page", "result", "sentences"),
    [
        ("docs/guarantees.md", "cut_causes.json", lars),
        ("docs/guarantees.md", "cut.json", armed_with_fma),
        ("docs/guarantees.md", "cut-cpu-2026-11-29.json", armed_elsewhere),
        ("docs/decisions/0006-where-to-cut.md", "cut-cpu-2026-11-29.json", cut_today),
        ("docs/guarantees.md", "cut_growth.json", grown),
        (
            "docs/decisions/0014-plain-files-on-local-disks.md",
            "storage-save-cpu-2026-11-21.json",
            saves,
        ),
        (
            "docs/decisions/0027-databases-on-local-disks.md",
            "storage-save-cpu-2026-11-22.json",
            databases,
        ),
        (
            "docs/decisions/0027-databases-on-local-disks.md",
            "storage-cpu-2026-11-22.json",
            many_small_leaves,
        ),
        ("docs/storage.md", "storage-cpu-2026-11-22.json", many_small_leaves),
        ("docs/storage.md", "storage-cpu-2026-11-22.json", large_leaves),
        (
            "docs/decisions/0024-stock-is-asked-off-the-trainers-thread.md",
            "transfer-cpu-2026-11-22.json",
            save_calls,
        ),
        (
            "docs/decisions/0024-stock-is-asked-off-the-trainers-thread.md",
            "transfer-cpu-2026-11-28.json",
            save_calls_held_back,
        ),
        ("docs/scale.md", "transfer-cpu-2026-11-28.json", collections_of_garbage),
        ("docs/scale.md", "analysis-cpu-2026-11-29.json", analysis),
        (
            "docs/decisions/0026-what-follows-travels-as-one.md",
            "transfer-cpu-2026-11-22.json",
            hooks,
        ),
        (
            "docs/decisions/0014-plain-files-on-local-disks.md",
            "storage-writes-cpu-2026-11-21.json",
            small_leaves,
        ),
    ],
)
def test_prose_tells_what_was_measured(page, result, sentences):
    text = words(ROOT / page)
    assert f"bench/results/{result}" in text
    figures = json.loads((RESULTS / result).read_text(encoding="utf-8"))["figures"]
    for sentence in sentences(figures):
        assert sentence in text


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_results_that_are_named_are_kept(page):
    named = set(re.findall(r"bench/results/([\w./-]+\.json)", words(page)))
    assert {n for n in named if "DATE" not in n and not (RESULTS / n).exists()} == set()


def test_kept_results_are_named():
    """Each is the source of something, or in the list of bench/README.md."""
    texts = [path.read_text(encoding="utf-8") for path in (*PAGES, *PICTURES)]
    kept = {path.relative_to(RESULTS).as_posix() for path in RESULTS.rglob("*.json")}
    assert {name for name in kept if not any(name in text for text in texts)} == set()
