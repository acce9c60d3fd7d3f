"""A program in two: results that the next program waits for, and the rest, which may be made beside it.

The unit below needs a unit's input cotangents; nobody in the pass needs the gradients of its weights. In one program
both are there only when all of it is done; in two, products of the one fill the gaps of the other.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from zinf_jax.graph import _jaxpr


class Apart:
    """A function in two: `early` gives some of its results and what `late` needs to give the others.

    Args:
      function: (arguments...) -> (late results, early results), flat lists. Can be traced.
      arguments: Trees of abstract values.

    Attributes:
      crossing: What goes from the one to the other.
      splits: False where the early results are all the work, or the late ones are.
    """

    def __init__(self, function: Callable[..., tuple[list[Any], list[Any]]], *arguments: Any) -> None:
        num_late = 0

        def run(*args: Any) -> list[Any]:
            nonlocal num_late
            late, early = function(*args)
            num_late = len(late)
            return [*late, *early]

        self._block = block = _jaxpr.flat(_jaxpr.trace(run, *arguments).block)
        self._results = {"late": block.outvars[:num_late], "early": block.outvars[num_late:]}
        self._early = _jaxpr.needed(block.eqns, self._results["early"], effects=True)
        first = set(map(id, self._early))
        self._late = [eqn for eqn in _jaxpr.needed(block.eqns, self._results["late"]) if id(eqn) not in first]
        made = {var for eqn in self._early for var in eqn.outvars}
        read = [atom for eqn in self._late for atom in eqn.invars]
        self._crossing = list(dict.fromkeys(a for a in (*read, *self._results["late"]) if _is_in(a, made)))
        self.crossing = [_jaxpr.struct_of(var) for var in self._crossing]
        self.splits = bool(self._early and self._late)

    def early(self, *args: Any) -> tuple[list[Any], list[Any]]:
        """The early results, and what `late` reads."""
        env = self._run(self._early, args, {})
        return self._values(env, self._results["early"]), self._values(env, self._crossing)

    def late(self, crossing: Sequence[Any], *args: Any) -> list[Any]:
        """The late results. `args` are those of `early`."""
        env = self._run(self._late, args, dict(zip(self._crossing, crossing, strict=True)))
        return self._values(env, self._results["late"])

    def _run(self, eqns: Sequence[Any], args: Any, known: dict[Any, Any]) -> dict[Any, Any]:
        env = dict(self._block.consts) | known
        env.update(zip(self._block.invars, jax.tree.leaves(args), strict=True))
        _jaxpr.run(eqns, env)
        return env

    def _values(self, env: dict[Any, Any], atoms: Sequence[Any]) -> list[Any]:
        return [_jaxpr.value_of(env, atom) for atom in atoms]


def _is_in(atom: Any, variables: set[Any]) -> bool:
    return not _jaxpr.is_literal(atom) and atom in variables
