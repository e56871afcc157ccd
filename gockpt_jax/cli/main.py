"""`gockpt_jax COMMAND`: one module per command, named like it."""

import click

from gockpt_jax.cli.console import Commands
from gockpt_jax.cli.diff import diff
from gockpt_jax.cli.inspect import inspect
from gockpt_jax.cli.plan import plan
from gockpt_jax.cli.verify import verify


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="gockpt_jax")
def main() -> None:
    """Checkpoints that leave the device over several training steps."""


main.add_command(plan)
main.add_command(diff)
main.add_command(inspect)
main.add_command(verify)
