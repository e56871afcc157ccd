"""An item whose writing fails, where another's goes on."""

import concurrent.futures
import dataclasses
from typing import Any

import orbax.checkpoint as ocp


class Broken(ocp.JsonCheckpointHandler):  # type: ignore[misc]
    """Of that item; it comes before `state` where items are written in the order of their names."""

    async def async_save(self, directory: Any, args: Any) -> list[Any]:
        written: concurrent.futures.Future[None] = concurrent.futures.Future()
        if args.works:
            written.set_result(None)
        else:
            written.set_exception(OSError("the disk is gone"))
        return [written]


@ocp.args.register_with_handler(Broken, for_save=True, for_restore=True)
@dataclasses.dataclass
class BrokenSave(ocp.args.CheckpointArgs):  # type: ignore[misc]
    """Its arguments; it may work for once."""

    works: bool = False
