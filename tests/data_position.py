"""An item that is written as Grain writes the position of a data iterator."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import jax
import orbax.checkpoint as ocp


class PositionHandler(ocp.CheckpointHandler):
    """Does what Grain's does with a data iterator, and goes by its name."""

    def save(self, directory: Any, args: Any) -> None:
        file = f"process_{jax.process_index()}-of-{jax.process_count()}.json"
        (directory / file).write_text(json.dumps(args.item))

    def restore(self, directory: Any, args: Any) -> Any:
        (file,) = directory.glob("process_*.json")
        return json.loads(file.read_text())

    @classmethod
    def typestr(cls) -> str:
        return "grain._src.python.checkpoint.handler.CheckpointHandler"


@ocp.args.register_with_handler(PositionHandler, for_save=True, for_restore=True)
@dataclasses.dataclass
class Position(ocp.args.CheckpointArgs):
    """What it is given."""

    item: Any = None
