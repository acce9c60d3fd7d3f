"""Structural keys of equations, and differentiable dependencies."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zinf_jax.graph import _jaxpr
from zinf_jax.graph._diff import Differentials
from zinf_jax.graph._equal import Keys, array_key

X = np.ones((3, 3), np.float32)


def last(fn: Any, *args: Any) -> Any:
    """The last equation of a function."""
    return _jaxpr.trace(fn, *args).block.eqns[-1]


def keys_of(*eqns: Any, differentiate: bool = True) -> list[int]:
    keys = Keys(differentiate=differentiate)
    return [keys.equation(eqn) for eqn in eqns]


def rule(factor: float, forward: Any = jnp.sin) -> Any:
    fn = jax.custom_vjp(lambda x: forward(x))
    fn.defvjp(lambda x: (forward(x), x), lambda x, ct: (factor * ct * x,))
    return fn


def jvp_rule(factor: float) -> Any:
    fn = jax.custom_jvp(jnp.sin)
    fn.defjvp(lambda primals, tangents: (jnp.sin(*primals), factor * tangents[0]))
    return fn


@pytest.mark.parametrize(
    ("make", "one", "other"),
    [
        (rule, 1.0, 2.0),
        (jvp_rule, 1.0, 2.0),
        (lambda n: lambda x: jax.lax.scan(lambda c, _: (c * n, None), x, None, length=3)[0], 1.0, 2.0),
        (lambda n: lambda x: jax.lax.scan(lambda c, _: (c * 2, None), x, None, length=n)[0], 3, 4),
        (lambda n: lambda x: jnp.sum(x, axis=n), 0, 1),
        (lambda n: lambda x: jax.pure_callback(lambda a: a * n, x, x), 1.0, 2.0),
        (lambda n: lambda x: jax.lax.while_loop(lambda v: v.sum() < n, lambda v: v + 1, x), 1.0, 2.0),
    ],
    ids=["custom_vjp", "custom_jvp", "literal", "length", "axes", "closure", "while"],
)
def test_equal_by_structure_and_only_then(make, one, other) -> None:
    same, again, different = keys_of(*(last(make(value), X) for value in (one, one, other)))
    assert same == again != different


def test_literals_and_wiring_are_not_part_of_an_equation() -> None:
    assert len(set(keys_of(last(lambda x: x * 2.0, X), last(lambda x: x * 3.0, X)))) == 1
    assert len(set(keys_of(last(lambda x: x * 2, X), last(lambda x: x * 2, X.astype(np.int32))))) == 2


def test_a_custom_rule_does_not_matter_where_nothing_is_differentiated() -> None:
    assert len(set(keys_of(last(rule(1.0), X), last(rule(2.0), X), differentiate=False))) == 1


def test_a_rule_that_refuses_is_equal_to_itself_only() -> None:
    def refuse(*_: Any) -> Any:
        raise NotImplementedError

    def make() -> Any:
        fn = jax.custom_vjp(jnp.sin)
        fn.defvjp(refuse, refuse)
        return last(fn, X)

    one, other = make(), make()
    first, second, third = keys_of(one, one, other)
    assert first == second != third


def test_arrays_are_compared_by_content() -> None:
    big = np.arange(10_000, dtype=np.float32)
    assert array_key(big) == array_key(big.copy()) == array_key(jnp.asarray(big))
    changed = big.copy()
    changed[-1] += 1
    assert array_key(big) != array_key(changed)
    assert array_key(np.float32(0.0)) != array_key(np.float32(-0.0))
    assert array_key(np.float32(np.nan)) == array_key(np.float32(np.nan))
    assert array_key(np.zeros(4, np.int32)) != array_key(np.zeros(4, np.float32))
    assert array_key(jax.random.key(1)) == array_key(jax.random.key(1)) != array_key(jax.random.key(2))


def depends(fn: Any, *args: Any) -> list[set[int]]:
    block = _jaxpr.trace(fn, *args).block
    return [set(deps) for deps in Differentials(Keys(differentiate=True)).block(block)]


@jax.custom_vjp
def drops_second(x, y):
    return x * y, x + y


drops_second.defvjp(lambda x, y: (drops_second(x, y), (x, y)), lambda res, cts: (cts[0] * res[1], None))


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (lambda x, y: (x + y, x * 2, jnp.argmax(x)), [{0, 1}, {0}, set()]),
        (lambda x, y: (jax.lax.stop_gradient(x) + y, jnp.round(x), jnp.floor(x) * y), [{1}, set(), {1}]),
        (lambda x, y: jax.lax.cond(x[0, 0] > 0, lambda x, y: (x, y), lambda x, y: (x, x), x, y), [{0}, {0, 1}]),
        (lambda x, y: jax.lax.cond(x[0, 0] > 0, lambda y: y, jnp.sin, y), [{1}]),
        (lambda x, y: jax.lax.while_loop(lambda c: c[0].sum() < 9, lambda c: (c[0] + 1, c[1] * y), (x, x)),
         [{0}, {0, 1}]),
        (lambda x, y: jax.lax.sort((x, y), num_keys=1), [{0}, {1}]),
        (lambda x, y: jax.lax.optimization_barrier((x, y)), [{0}, {1}]),
        (lambda x, y: drops_second(x, y), [{0}, set()]),
        (lambda x, y: jnp.where(x > 0, y, 0.0), [{1}]),
        (lambda x, y: jax.jit(lambda x: jax.lax.stop_gradient(x) * x)(x), [{0}]),
        (lambda x, y: jnp.take(x, y.astype(int)), [{0}]),
    ],
)  # fmt: skip
def test_differentiable_dependencies(fn, expected) -> None:
    assert depends(fn, X, X) == expected


def test_dependencies_through_a_scan_are_a_fixed_point() -> None:
    def chain(a, b, c, xs):
        # c <- b <- a over two turns; the last is never touched by xs
        def body(carry, x):
            a, b, c, free = carry
            return (a + x, a * 2, b * 2, free), (c, jax.lax.stop_gradient(a))

        return jax.lax.scan(body, (a, b, c, a), xs)

    scalar = np.float32(1)
    found = depends(chain, scalar, scalar, scalar, np.ones(5, np.float32))
    assert found[:4] == [{0, 3}, {0, 1, 3}, {0, 1, 2, 3}, {0}]
    assert found[4:] == [{0, 1, 2, 3}, set()]
