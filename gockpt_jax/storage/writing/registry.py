"""Orbax's type handler registries, with one type that is ours."""

from collections.abc import Callable
from typing import Any

import orbax.checkpoint as ocp


class RegistryView:
    """A registry in which one type has our handler; all else is another registry's business.

    It asks the other registry at every look-up, so types that the user registers with
    `ocp.type_handlers.register_type_handler`, before or after, are found.

    Args:
      ty: The type, with those derived from it.
      handler: Its handler.
      others: The registry for all other types; `None`: Orbax's global one.
      by_name: Whether the handler's type name is ours as well: what is on disk is read by it.
    """

    def __init__(
        self,
        ty: type,
        handler: ocp.type_handlers.TypeHandler,
        others: ocp.type_handlers.TypeHandlerRegistry | None,
        *,
        by_name: bool,
    ) -> None:
        self._type = ty
        self._handler = handler
        self._look_up = look_up(others)
        self._name = handler.typestr() if by_name else None

    def get(self, ty: Any) -> ocp.type_handlers.TypeHandler:
        """Returns the handler of a type or type name; ValueError if there is none."""
        is_ours = issubclass(ty, self._type) if isinstance(ty, type) else ty == self._name
        return self._handler if is_ours else self._look_up(ty)

    def has(self, ty: Any) -> bool:
        """Returns whether `get` would find a handler."""
        try:
            self.get(ty)
        except ValueError:
            return False
        return True


def look_up(registry: Any) -> Callable[[Any], ocp.type_handlers.TypeHandler]:
    """The look-up of a registry; of Orbax's global one where none is given."""
    found: Callable[[Any], ocp.type_handlers.TypeHandler] = (
        ocp.type_handlers.get_type_handler if registry is None else registry.get
    )
    return found
