"""Stock Orbax's array handler as `bench train` sets it up: behind a slower link, or unhurried."""

from typing import Any

import jax
import orbax.checkpoint as ocp

from bench.train.link import Link


class InBackground:
    """Tells Orbax to move every array in the background, which is its strongest setting.

    `ArrayHandler(callback=...)` is public, the enumeration that its callback answers with is not
    (Orbax 0.12.8).

    Raises:
      NotImplementedError: if this Orbax cannot.
    """

    def __init__(self) -> None:
        try:
            from orbax.checkpoint._src.serialization.types import TransferPriority
        except ImportError as error:
            raise NotImplementedError("this Orbax moves nothing in the background.") from error
        self._priority = TransferPriority.ASYNCHRONOUS_DEPRIORITIZED

    def key_priority(self, keypath: Any) -> Any:
        """After all that training waits for, of which there is nothing."""
        return self._priority

    def on_transfer_start(self, keypath: Any) -> None:
        """Nothing to do."""

    def on_transfer_end(self, keypath: Any) -> None:
        """Nothing to do."""

    def on_write_end(self, keypath: Any) -> None:
        """Nothing to do."""


class _SlowArrayHandler(ocp.type_handlers.ArrayHandler):  # type: ignore[misc]
    """Stock's, behind a slower link: `serialize` returns when the state is on the host."""

    def __init__(self, link: Link, **options: Any):
        super().__init__(**options)
        self._link = link

    async def serialize(self, values: Any, infos: Any, args: Any = None) -> Any:
        self._link.send(values).result()
        return await super().serialize(values, infos, args)


def array_registry(link: Link | None, **options: Any) -> Any:
    """Orbax's own type handlers, but for arrays: the same handler, set up as it should be here.

    Args:
      link: A slower link; `None`: the real one.
      **options: Of `ArrayHandler`.
    """
    types = ocp.type_handlers
    arrays = _SlowArrayHandler(link, **options) if link else types.ArrayHandler(**options)
    return types.create_type_handler_registry(
        (int, types.ScalarHandler()), (float, types.ScalarHandler()), (jax.Array, arrays)
    )
