"""Where the state is among a step's arguments and results."""

import dataclasses
import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from gockpt_jax import _compat
from gockpt_jax.errors import StepMismatchError
from gockpt_jax.training.places import (
    Place,
    Places,
    are_several,
    as_places,
    identical,
    states_at,
    states_within,
)


class NotLookedAtError(StepMismatchError):
    """Where the state is cannot be told before a call like this one has run."""


class CallForm:
    """How a jitted step is called: which arguments are state, which are static.

    Args:
      step: The jitted function.
      state: Positions or names of the state among the arguments.
      settings: What is known of its `jax.jit` call.
      state_out: Positions or names of the new state in the result; found by structure if `None`.

    Raises:
      WrapError: if a place is not one.
    """

    def __init__(
        self, step: Callable[..., Any], state: Places, settings: _compat.JitSettings,
        state_out: Places | None = None,
    ):  # fmt: skip
        self._places = as_places("state", state)
        self._state_out = None if state_out is None else as_places("state_out", state_out)
        self.settings = settings
        self._parameters, self._told = _parameters(step)

    def is_abstract(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether this call is a trace (`eval_shape`, an outer `jit`) and not an update."""
        if _compat.is_tracing():
            return True
        state = self.state_of(args, kwargs)
        leaf = _first_leaf(state)
        if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer):
            return False
        abstract = (jax.core.Tracer, jax.ShapeDtypeStruct)
        return any(isinstance(x, abstract) for x in jax.tree.leaves(state))

    def locate(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], out_tree: Any, before: Any = None
    ) -> "Positions":
        """Follows leaves by their number through the call's structure: no array is compared.

        Args:
          args: Positional arguments of a call.
          kwargs: Keyword arguments of it.
          out_tree: Structure of the result.
          before: Leaves of the result of the call before: of several parts that are like the state,
            the new state is the one that the loop has given back, and if none is like it, so are
            the arrays that it has given back. `None`: the first part.

        Raises:
          NotLookedAtError: if several parts are like the state, and the call before had another.
          StepMismatchError: if the state is not found.
        """
        states = self.state_of(args, kwargs)
        inputs = self.state_of(*self._leaves_of_arguments(args, kwargs))
        outputs = self._outputs(out_tree, states, list(before or ()))
        return Positions(tuple(itertools.chain(*inputs)), outputs, leaf_paths(states))

    def _outputs(self, out_tree: Any, states: Sequence[Any], before: list[Any]) -> tuple[int, ...]:
        """Which of the result's leaves are the new state's, in the order of the state's."""
        if len(before) != out_tree.num_leaves:  # another program's
            before = []
        given = [jax.tree.leaves(s) for s in states]
        given_ids = [set(map(id, leaves)) for leaves in given]

        def came_back(leaves: range, n: int) -> int:
            return sum(id(before[i]) in given_ids[n] for i in leaves) if before else 0

        places = [i for i in identical([*itertools.chain(*given)], before) if i is not None]
        are_all = bool(places) and len(set(places)) == sum(map(len, given))
        is_known = bool(places) or not before or self._state_out is not None
        if not is_known and are_several(out_tree, [jax.tree.structure(s) for s in states]):
            raise NotLookedAtError  # another thread's came between, or a state was replaced
        try:
            new = self._new_states(out_tree, states, came_back, largest_first=not are_all)
            return tuple(itertools.chain(*new))
        except StepMismatchError:
            if self._state_out is not None or not are_all:
                raise
            # In other containers than it went in with; the loop puts the arrays back itself.
            return tuple(places)

    def new_leaves_of(self, result: Any, states: Sequence[Any]) -> list[Any]:
        """The new state in a result: the leaves of all parts.

        Raises:
          StepMismatchError: if a part is missing or its structure differs.
        """
        new, out_tree = jax.tree.flatten(result)
        old = [jax.tree.leaves(s) for s in states]

        def looks_like(leaves: range, n: int) -> int:
            return sum(_same_kind(new[i], x) for i, x in zip(leaves, old[n], strict=True))

        return [new[i] for part in self._new_states(out_tree, states, looks_like) for i in part]

    def _new_states(
        self, out_tree: Any, states: Sequence[Any], likeness: Callable[[range, int], int],
        *, largest_first: bool = True,
    ) -> Sequence[Sequence[int]]:  # fmt: skip
        """Which of the result's leaves are the new state, for each state argument."""
        wanted = [jax.tree.structure(s) for s in states]
        if self._state_out is None:
            return states_within(out_tree, wanted, likeness, largest_first=largest_first)
        numbered = jax.tree.unflatten(out_tree, range(out_tree.num_leaves))
        return [jax.tree.leaves(p) for p in states_at(numbered, self._state_out, wanted)]

    def state_of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        """The state arguments of one call, in the order of `state`.

        Raises:
          StepMismatchError: if the call has no such argument.
        """
        return tuple(self._find(place, args, kwargs) for place in self._places)

    def state_leaves(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        """The leaves of the state in one call, arrays or not."""
        return jax.tree.leaves(self.state_of(args, kwargs))

    def _find(self, place: Place, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        index = place if isinstance(place, int) else self._parameters.get(place, len(args))
        name = place if isinstance(place, str) else self._name(place)
        if name is not None and name in kwargs:
            return kwargs[name]
        if -len(args) <= index < len(args):
            return args[index]
        takes = f", whose parameters are `{self._told}`" if self._told else ""
        by_name = f", and by keyword `{'`, `'.join(sorted(kwargs))}`" if kwargs else ""
        raise StepMismatchError(
            f"`state={place!r}` names no argument of this call of the wrapped step{takes}; given "
            f"by position: {len(args)}{by_name}. Pass the position or the name of the state to "
            "`wrap(step, state=...)`."
        )

    @property
    def told_state(self) -> str:
        """Which arguments are taken for the state, in words."""
        names = [self._name(p) if isinstance(p, int) else p for p in self._places]
        if None not in names:
            return f"argument{'s' * (len(names) > 1)} `{'`, `'.join(map(str, names))}`"
        return "the first argument" if self._places == (0,) else f"the arguments at {self._places}"

    def _name(self, index: int) -> str | None:
        return next((n for n, i in self._parameters.items() if i == index), None)

    def dynamic(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments without the static ones, as `jax.jit` flattens them."""
        static, names = self._static_positions(len(args)), self.settings.static_argnames
        positional = tuple(a for i, a in enumerate(args) if i not in static)
        return positional, {k: v for k, v in kwargs.items() if k not in names}

    def static(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        """The static arguments of a call, with their types: what its program was specialised to.

        They are equal where `jax.jit` takes them for equal: it tells 1, 1.0 and True apart.
        """
        static, names = self._static_positions(len(args)), self.settings.static_argnames
        by_name = tuple((k, type(kwargs[k]), kwargs[k]) for k in sorted(kwargs) if k in names)
        return (*((type(a), a) for i, a in enumerate(args) if i in static), *by_name)

    def _leaves_of_arguments(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[range, ...], dict[str, range]]:
        """The call with each argument replaced by its flat positions; of a static one, none."""
        positional, by_name = self.dynamic(args, kwargs)
        names = sorted(by_name)  # as JAX flattens them
        sizes = [len(jax.tree.leaves(x)) for x in (*positional, *(by_name[k] for k in names))]
        spans = map(range, itertools.accumulate([0, *sizes]), itertools.accumulate(sizes))
        static = self._static_positions(len(args))
        in_order = tuple(range(0) if i in static else next(spans) for i in range(len(args)))
        return in_order, dict(zip(names, spans, strict=True))

    def _static_positions(self, num_args: int) -> set[int]:
        return {n + num_args if n < 0 else n for n in self.settings.static_argnums}


def _same_kind(a: Any, b: Any) -> bool:
    kinds = [(getattr(x, "shape", None), getattr(x, "dtype", None)) for x in (a, b)]
    return kinds[0] == kinds[1]


def _parameters(step: Callable[..., Any]) -> tuple[dict[str, int], str]:
    """Positions of the positional parameters by name, and all in words, such as `(s, x)`.

    Both are empty where there is no signature.
    """
    try:
        signature = inspect.signature(step)
    except (TypeError, ValueError):
        return {}, ""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = list(signature.parameters.values())
    positions = {p.name: i for i, p in enumerate(parameters) if p.kind in kinds}
    # Defaults may be arrays, and annotations whole types.
    bare = [p.replace(default=p.empty, annotation=p.empty) for p in parameters]
    return positions, str(inspect.Signature(bare))


@dataclasses.dataclass(frozen=True, slots=True)
class Positions:
    """Flat positions of the state's leaves.

    Attributes:
      inputs: Position of each leaf among the flat dynamic arguments.
      outputs: Position of each leaf among the flat results.
      paths: Each leaf's path, as `jax.tree_util.keystr` prints it.
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    paths: tuple[str, ...]


def leaf_paths(states: tuple[Any, ...]) -> tuple[str, ...]:
    """The path of each leaf of the state arguments, as `jax.tree_util.keystr` prints it."""
    listed = jax.tree_util.tree_flatten_with_path(states)[0]
    return tuple(_short(jax.tree_util.keystr(path), len(states)) for path, _ in listed)


def argument_name(arguments: tuple[tuple[Any, ...], Mapping[str, Any]], i: int) -> str:
    """What the user calls an array that goes in, such as `args[1]['loss']`.

    Args:
      arguments: The positional ones, and those by keyword.
      i: Flat position of the array.
    """
    (kind, *path), _ = jax.tree_util.tree_leaves_with_path(arguments)[i]
    return f"`{('args', 'kwargs')[kind.idx]}{jax.tree_util.keystr(tuple(path))}`"


def _short(path: str, num_states: int) -> str:
    """Drops the index into the tuple of states where there is only one."""
    return (path.removeprefix("[0]") or "the state") if num_states == 1 else path


def _first_leaf(tree: Any) -> Any:
    """The first leaf without flattening the rest: this runs at every step."""
    registry = jax.tree_util.default_registry
    while (level := registry.flatten_one_level(tree)) is not None:
        children = iter(level[0])
        tree = next((c for c in children if c is not None), None)
        if tree is None:
            return None
    return tree
