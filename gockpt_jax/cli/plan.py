"""`gockpt_jax plan`: what saves would cost, before training."""

import json
from typing import Any

import click

from gockpt_jax.checks import describe_bytes
from gockpt_jax.cli.console import tree_at, why_unreadable
from gockpt_jax.cli.quantities import BYTES, COUNT, RATE, SECS
from gockpt_jax.cli.tables import (
    Asked,
    as_json,
    goodput_table,
    markdown,
    show,
    study_table,
    trade_table,
)
from gockpt_jax.cli.trade import (
    OPTIMIZERS,
    Machine,
    StateSize,
    size_of_checkpoint,
    size_of_model,
    trade,
)
from gockpt_jax.options import MOST_STEPS
from gockpt_jax.storage.inspecting.describe import describe_item

_ITEMSIZES = {"float32": 4, "bfloat16": 2, "float16": 2}
_DTYPE = click.Choice(list(_ITEMSIZES))
_KEEPS_FREE = 0.1
"""Part of a device's memory that a plan leaves alone, for fragmentation."""


@click.command(epilog="The trade is that of `docs/scale.md`, which this command has made.")
@click.option("--params", type=COUNT, multiple=True, help="Parameters, as in 8B; may be repeated.")
@click.option(
    "--checkpoint", help="A saved state, in their place: an item, a step, or a manager's directory."
)
@click.option(
    "--optimizer", type=click.Choice(list(OPTIMIZERS)), default="adamw", show_default=True
)
@click.option("--param-dtype", type=_DTYPE, default="float32", show_default=True)
@click.option("--moment-dtype", type=_DTYPE, default="float32", show_default=True)
@click.option("--grad-dtype", type=_DTYPE, default="float32", show_default=True)
@click.option(
    "--devices",
    type=click.IntRange(min=1),
    multiple=True,
    default=(1,),
    show_default=True,
    help="The state is spread over them; may be repeated.",
)
@click.option("--devices-per-host", type=click.IntRange(min=1), default=8, show_default=True)
@click.option(
    "--link",
    type=RATE,
    default="25GB/s",
    show_default=True,
    help="From one device to its host, while all send.",
)
@click.option("--step", "step_secs", type=SECS, help="Time of a training step.")
@click.option(
    "--batch",
    type=COUNT,
    help="Tokens per step, to reckon its time: 6 x parameters x tokens / (devices x flops).",
)
@click.option("--device-batch", type=COUNT, help="Or its tokens on each device.")
@click.option(
    "--flops",
    type=COUNT,
    default="400T",
    show_default=True,
    help="Per second, of one device, as reached.",
)
@click.option("--budget", type=BYTES, help="Device memory for staged and retained bytes.")
@click.option("--memory", type=BYTES, help="Memory of a device, to reckon the budget.")
@click.option(
    "--activations",
    type=click.FloatRange(0, 1),
    default=0.5,
    show_default=True,
    help="Part of what state and gradients leave of it.",
)
@click.option("--host-memory", type=BYTES, help="Memory of a host for saves.")
@click.option(
    "--commit", type=SECS, default="1", show_default=True, help="Barriers and commit of a save."
)
@click.option("--write", type=RATE, help="From one host to storage.")
@click.option(
    "--interval",
    type=click.IntRange(min=1),
    default=100,
    show_default=True,
    help="Steps between saves.",
)
@click.option(
    "--overhead",
    type=click.FloatRange(0, 1, min_open=True),
    default=0.01,
    show_default=True,
    help="Part of the time that saves may cost, for saves/h.",
)
@click.option(
    "--mtbf",
    type=COUNT,
    help="Hours between failures of one device: prints what is left of the time at the best "
    "interval.",
)
@click.option(
    "--restart",
    type=SECS,
    default="300",
    show_default=True,
    help="From a failure until training goes on.",
)
@click.option(
    "--max-steps",
    type=click.IntRange(1, MOST_STEPS),
    default=8,
    show_default=True,
    help="The largest K.",
)
@click.option("--json", "form", flag_value="json", help="Print JSON.")
@click.option("--markdown", "form", flag_value="markdown", help="Print a Markdown table.")
def plan(**given: Any) -> None:
    """Prints what saves cost a model: stall, bytes, memory, saves per hour, for each K.

    One row for stock Orbax async, which waits for the whole transfer; one for a full copy on the
    device; one for the best plan of each K. With several --params or --devices one row for each of
    them instead, with what the planner takes.

    \b
    gockpt_jax plan --params 8B --devices 8 --step 1.2 --budget 8GB
    gockpt_jax plan --checkpoint runs/ckpt --devices 8 --step 1.2 --memory 80GB --json
    """  # noqa: D301  # Click's mark for a paragraph that is not filled anew.
    asked = [
        _ask(state, devices, given) for state in _states(given) for devices in given["devices"]
    ]
    if given["form"] == "json":
        click.echo(json.dumps([as_json(a) for a in asked], indent=2))
        return
    if given["mtbf"] is not None:
        table = goodput_table(asked)
    elif len(asked) > 1:
        table = study_table(asked)
    elif asked[0].rows:
        table = trade_table(asked[0])
    else:
        raise click.UsageError(_why_not(asked[0]))
    if given["form"] == "markdown":
        click.echo(markdown(table))
    else:
        show(table, asked[0] if len(asked) == 1 and given["mtbf"] is None else None)


def _states(given: dict[str, Any]) -> list[StateSize]:
    grad_bytes = _ITEMSIZES[given["grad_dtype"]]
    if bool(given["params"]) == (given["checkpoint"] is not None):
        raise click.UsageError(
            "Give either --params, as in `--params 8B`, or --checkpoint with a saved state's path."
        )
    if given["checkpoint"] is not None:
        try:
            leaves = describe_item(tree_at(given["checkpoint"]))["leaves"]
        except (OSError, ValueError) as error:
            raise click.BadParameter(why_unreadable(error), param_hint="'--checkpoint'") from error
        return [size_of_checkpoint(leaves, grad_bytes=grad_bytes)]
    return [
        size_of_model(
            parameters, given["optimizer"], grad_bytes=grad_bytes,
            param_bytes=_ITEMSIZES[given["param_dtype"]],
            moment_bytes=_ITEMSIZES[given["moment_dtype"]],
        )
        for parameters in given["params"]
    ]  # fmt: skip


def _ask(state: StateSize, devices: int, given: dict[str, Any]) -> Asked:
    machine = Machine(
        devices=devices,
        link_bytes_per_sec=given["link"],
        step_secs=_step_secs(state, devices, given),
        budget_bytes=_budget(state, devices, given),
        devices_per_host=given["devices_per_host"],
        write_bytes_per_sec=given["write"],
        commit_secs=given["commit"],
        host_bytes=given["host_memory"],
        overhead=given["overhead"],
        max_steps=given["max_steps"],
    )
    fits = machine.budget_bytes >= 1 and _is_held_by_hosts(state, machine)
    mtbf_secs = None if given["mtbf"] is None else given["mtbf"] * 3600
    rows = trade(state, machine) if fits else []
    return Asked(state, machine, rows, given["interval"], mtbf_secs, given["restart"])


def _is_held_by_hosts(state: StateSize, machine: Machine) -> bool:
    """Whether a save fits the host memory that it may have; one that does not is refused."""
    on_host = state.nbytes / machine.devices * machine.on_host
    return machine.host_bytes is None or on_host <= machine.host_bytes


def _why_not(asked: Asked) -> str:
    machine, of_device = asked.machine, asked.device_bytes
    if machine.budget_bytes < 1:
        return (
            f"The state, {describe_bytes(of_device)} on each device, leaves no memory. Give more "
            "--devices or more --memory."
        )
    return (
        f"The state, {describe_bytes(of_device * machine.on_host)} on each host, is more than "
        "--host-memory holds, and such saves are refused. Give more of it, or more --devices."
    )


def _step_secs(state: StateSize, devices: int, given: dict[str, Any]) -> float:
    if given["step_secs"] is not None:
        return float(given["step_secs"])
    if given["device_batch"] is not None:
        tokens = given["device_batch"]
    elif given["batch"] is not None:
        tokens = given["batch"] / devices
    else:
        raise click.UsageError(
            "How long is a step? Give --step in seconds, or --batch or --device-batch in tokens."
        )
    if not state.parameters:
        raise click.UsageError(
            "The checkpoint does not tell the number of parameters (no `mu`); give --step."
        )
    return float(6 * state.parameters * tokens / given["flops"])


def _budget(state: StateSize, devices: int, given: dict[str, Any]) -> float:
    """What a device has for staged copies and retained values; at most 0 if the model is too big.

    Retained gradients exist in the step anyway, so only those of a second step in flight are extra;
    the plan counts both.
    """
    if given["budget"] is None and given["memory"] is None:
        raise click.UsageError(
            "How much memory has a device for copies? Give --budget, or its whole --memory."
        )
    if given["memory"] is None:
        return float(given["budget"])
    held = state.nbytes / devices
    free = given["memory"] * (1 - _KEEPS_FREE) - held
    if given["budget"] is not None:
        return float(min(free, given["budget"]))
    return float(free * (1 - given["activations"]))
