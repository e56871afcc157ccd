"""The tables of `gockpt_jax plan`, for a terminal, a document or a program."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import rich.box
import rich.measure
import rich.table

from gockpt_jax.checks import describe_bytes
from gockpt_jax.cli.console import FILE_COLUMNS, make_console
from gockpt_jax.cli.quantities import say_count, say_number, say_percent, say_secs
from gockpt_jax.cli.trade import Goodput, Machine, Row, StateSize, goodput

_TRADE_HEADS = (
    "", "way", "K", "stall s", "moved", "on the device", "on a host", "busy s", "saves/h",
)  # fmt: skip
_STUDY_HEADS = (
    "parameters", "devices", "state/device", "step s", "busy s", "planner takes", "K",
    "stock's stall s", "its stall s", "stock loses", "planner loses", "gain",
)  # fmt: skip
_GOODPUT_HEADS = (
    "parameters", "devices", "fails every", "busy s", "stock saves every", "stock ETTR",
    "planner saves every", "planner ETTR", "lost to stalls", "to lost work", "to restarts",
)  # fmt: skip

_MOST_COLUMNS = 1000  # no line is broken

Table = tuple[Sequence[str], list[list[str]]]


@dataclasses.dataclass(frozen=True, slots=True)
class Asked:
    """A model on a machine, and what saves cost it; no rows where it does not fit.

    Attributes:
      state: The model's.
      machine: That trains it.
      rows: What each way of saving costs.
      interval_steps: Between saves.
      device_mtbf_secs: Between failures of one device; `None`: not asked for.
      restart_secs: From a failure until training goes on.
    """

    state: StateSize
    machine: Machine
    rows: list[Row]
    interval_steps: int
    device_mtbf_secs: float | None
    restart_secs: float

    @property
    def stock(self) -> Row:
        """What stock Orbax costs."""
        return self.rows[0]

    @property
    def chosen(self) -> Row:
        """What the planner takes."""
        return next(row for row in self.rows if row.is_chosen)

    @property
    def device_bytes(self) -> float:
        """Bytes of state on each device."""
        return self.state.nbytes / self.machine.devices

    @property
    def train_secs(self) -> float:
        """From one save to the next, but for what they cost."""
        return self.interval_steps * self.machine.step_secs

    def loss(self, row: Row) -> float:
        """Part of the time that a way of saving costs at the interval.

        A save waits for the one before, ours and stock's alike.
        """
        lost_secs = max(row.stall_secs, row.busy_secs - self.train_secs)
        return lost_secs / (self.train_secs + lost_secs)

    @property
    def mtbf_secs(self) -> float:
        """Between failures of any device of the job."""
        assert self.device_mtbf_secs is not None
        return self.device_mtbf_secs / self.machine.devices

    def goodput(self, row: Row) -> Goodput:
        """What a way of saving leaves of the time where devices fail."""
        return goodput(
            row,
            step_secs=self.machine.step_secs,
            between_failures_secs=self.mtbf_secs,
            restart_secs=self.restart_secs,
        )


def trade_table(asked: Asked) -> Table:
    """Every way of saving one model on one machine."""
    return _TRADE_HEADS, [
        [
            "*" if row.is_chosen else "",
            row.way if row.fits else f"{row.way} (does not fit)",
            str(row.steps),
            say_secs(row.stall_secs),
            describe_bytes(row.moved_bytes),
            describe_bytes(row.device_bytes),
            describe_bytes(row.host_bytes),
            say_secs(row.busy_secs),
            say_number(row.per_hour) if row.fits else "-",
        ]
        for row in asked.rows
    ]


def _study_row(asked: Asked) -> list[str]:
    known = [
        say_count(asked.state.parameters),
        f"{asked.machine.devices:,}",
        describe_bytes(asked.device_bytes),
        say_secs(asked.machine.step_secs),
    ]
    if not asked.rows:
        return [*known, "-", "does not fit", "-", "-", "-", "-", "-", "-"]
    stock, chosen = asked.stock, asked.chosen
    gain = asked.loss(stock) - asked.loss(chosen)
    return [
        *known,
        say_secs(chosen.busy_secs),
        chosen.way,
        str(chosen.steps),
        say_secs(stock.stall_secs),
        say_secs(chosen.stall_secs),
        say_percent(asked.loss(stock)),
        say_percent(asked.loss(chosen)),
        "under 0.1%" if gain < 0.001 else say_percent(gain),
    ]


def _goodput_row(asked: Asked) -> list[str]:
    known = [
        say_count(asked.state.parameters),
        f"{asked.machine.devices:,}",
        f"{say_number(asked.mtbf_secs / 3600)} h",
    ]
    if not asked.rows:
        return [*known, "does not fit", *["-"] * (len(_GOODPUT_HEADS) - len(known) - 1)]
    stock, ours = asked.goodput(asked.stock), asked.goodput(asked.chosen)
    return [
        *known,
        say_secs(asked.chosen.busy_secs),
        f"{say_secs(stock.interval_secs)} s",
        f"{stock.ettr:.2%}",
        f"{say_secs(ours.interval_secs)} s",
        f"{ours.ettr:.2%}",
        say_percent(ours.stalls),
        say_percent(ours.lost_work),
        say_percent(ours.restarts),
    ]


def study_table(asked: Sequence[Asked]) -> Table:
    """What the planner takes for each, and what it gains over stock."""
    return _STUDY_HEADS, [_study_row(a) for a in asked]


def goodput_table(asked: Sequence[Asked]) -> Table:
    """What is left of the time where devices fail."""
    return _GOODPUT_HEADS, [_goodput_row(a) for a in asked]


def as_json(asked: Asked) -> dict[str, Any]:
    """Everything about one model on one machine, in base units."""
    state = dataclasses.asdict(asked.state)
    ways = [_way(asked, row) for row in asked.rows]
    return {"state": state, "machine": dataclasses.asdict(asked.machine), "ways": ways}


def _way(asked: Asked, row: Row) -> dict[str, Any]:
    way = dataclasses.asdict(row) | {"loss": asked.loss(row)}
    if asked.device_mtbf_secs is not None:
        best = asked.goodput(row)
        way["goodput"] = dataclasses.asdict(best) | {"ettr": best.ettr}
    return way


def markdown(table: Table) -> str:
    """As a table of Markdown."""
    heads, rows = table
    lines = [list(heads), ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def show(table: Table, asked: Asked | None) -> None:
    """Prints a table; under that of one model, what it was made for."""
    heads, rows = table
    shown = rich.table.Table(box=rich.box.SIMPLE)
    for head in heads:
        is_text = head in ("", "way", "planner takes")
        shown.add_column(head, justify="left" if is_text else "right", no_wrap=True)
    for row in rows:
        shown.add_row(*row)
    console = make_console()
    needed = rich.measure.Measurement.get(
        console, console.options.update(max_width=_MOST_COLUMNS), shown
    )
    console.width = max(console.width, FILE_COLUMNS, needed.maximum)
    console.print(shown)
    if asked is not None:
        machine, stock, chosen = asked.machine, asked.stock, asked.chosen
        console.print(
            f"* what the planner takes. State {describe_bytes(asked.device_bytes)} and "
            f"budget {describe_bytes(machine.budget_bytes)} on "
            f"{'one device' if machine.devices == 1 else f'each of {machine.devices:,} devices'}, "
            f"{describe_bytes(machine.link_bytes_per_sec)}/s, steps of "
            f"{say_secs(machine.step_secs)} s; stock loses {say_percent(asked.loss(stock))} at one "
            f"save in {asked.interval_steps} steps, the planner "
            f"{say_percent(asked.loss(chosen))}.",
        )
        if chosen.busy_secs > asked.train_secs + chosen.stall_secs:
            console.print(
                f"Saves wait for each other: one takes {say_secs(chosen.busy_secs)} s, and "
                f"{asked.interval_steps} steps {say_secs(asked.train_secs)} s. Give a longer "
                "--interval."
            )
