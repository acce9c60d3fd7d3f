"""The reader of equation parameters and maker of jaxprs: the same answers on both ends of the JAX range."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zinf_jax.graph import _jaxpr
from zinf_jax.graph._flops import flops_of

X = np.arange(6, dtype=np.float32).reshape(2, 3)


def eqn(fn: Any, name: str, *args: Any) -> Any:
    block = _jaxpr.trace(fn, *args).block
    return next(e for e in block.eqns if e.primitive.name == name)


def test_the_parts_of_a_scan() -> None:
    def fn(x, w):
        def body(carry, row):
            a, b = carry
            return (a * w + row["y"], b + 1), row["z"] + 1

        return jax.lax.scan(body, (x[0], 0), {"y": x, "z": x * 2}, reverse=True)

    scan = _jaxpr.scan_of(eqn(fn, "scan", X, np.float32(2)))
    assert scan is not None
    assert (scan.num_consts, scan.num_carry, scan.length, scan.reverse) == (1, 2, 2, True)
    assert len(scan.body.invars) == 5 and len(scan.body.outvars) == 3
    assert _jaxpr.scan_of(eqn(lambda x: x + 1, "add", X)) is None


def test_the_parts_of_while_cond_and_calls() -> None:
    loop = _jaxpr.while_of(
        eqn(lambda x, n: jax.lax.while_loop(lambda c: c.sum() < n, lambda c: c * n, x), "while", X, 9.0)
    )
    assert loop is not None and (len(loop[0].outvars), len(loop[1].outvars), loop[2], loop[3]) == (1, 1, 1, 1)
    cond = eqn(lambda x: jax.lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x), "cond", X)
    assert [b.eqns[0].primitive.name for b in _jaxpr.branches_of(cond) or ()] == ["cos", "sin"]
    for call, name in ((jax.jit, "jit"), (jax.checkpoint, "checkpoint")):
        outer = _jaxpr.trace(call(lambda x: jnp.sin(x) + 1), X).block.eqns[0]
        body = _jaxpr.inlined_body(outer)
        assert outer.primitive.name in (name, "pjit", "remat2") and body is not None
        assert body.eqns[0].primitive.name == "sin"
    assert _jaxpr.inlined_body(cond) is None


def test_restrict_drops_dead_code_arguments_and_constants_inside_scans_too() -> None:
    constant = np.ones(3, np.float32)

    def fn(x, y, z):
        def body(carry, row):
            return (carry[0] + row[0], carry[1] * row[1]), row[0] * constant

        (a, b), rows = jax.lax.scan(body, (y, y), (x, z))
        return a, b, rows, y * 2

    block = _jaxpr.trace(fn, X, np.ones(3, np.float32), X).block
    first, used = _jaxpr.restrict(block, [True, False, False, False])
    assert used == (True, True, False) and not first.consts
    scan = _jaxpr.scan_of(first.eqns[-1])
    assert scan is not None and scan.num_carry == 1 and len(scan.body.invars) == 2
    np.testing.assert_array_equal(_jaxpr.evaluate(first, X, np.ones(3, np.float32))[0], 1 + X.sum(0))
    rows, used = _jaxpr.restrict(block, [False, False, True, False])
    assert used == (True, False, False) and len(rows.consts) == 1
    nothing, used = _jaxpr.restrict(block, [False] * 4)
    assert not nothing.eqns and not any(used)


def test_a_made_jaxpr_runs_and_warns_of_nothing() -> None:
    constant = np.full(3, 2, np.float32)
    block = _jaxpr.trace(lambda x: {"a": jnp.sin(x) * constant, "b": x}, X).block
    run = jax.jit(jax.extend.core.jaxpr_as_fun(_jaxpr.close_block(block)))
    for got, want in zip(run(X), (np.sin(X) * 2, X), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)
    again = _jaxpr.trace(lambda *a: _jaxpr.evaluate(block, *a), X).block
    assert [e.primitive.name for e in again.eqns] == [e.primitive.name for e in block.eqns]


def test_names_of_equations_say_whose_function_it_is() -> None:
    @jax.custom_vjp
    def mine(x):
        return x

    mine.defvjp(lambda x: (x, None), lambda _, ct: (ct,))
    assert "mine" in _jaxpr.name_of(_jaxpr.trace(mine, X).block.eqns[0])


@pytest.mark.parametrize(
    ("fn", "args", "expected"),
    [
        (jnp.dot, (np.ones((4, 5)), np.ones((5, 6))), 2 * 4 * 5 * 6),
        (lambda a, b: jnp.einsum("bij,bjk->bik", a, b), (np.ones((7, 4, 5)), np.ones((7, 5, 6))), 7 * 2 * 4 * 5 * 6),
        (
            lambda x, k: jax.lax.conv_general_dilated(x, k, (1, 1), "SAME"),
            (np.ones((2, 3, 8, 8)), np.ones((4, 3, 3, 3))),
            2 * (2 * 4 * 8 * 8) * (3 * 3 * 3),
        ),
        (lambda x, w: jax.lax.scan(lambda c, _: (c @ w, None), x, None, length=3)[0],
         (np.ones((2, 5)), np.ones((5, 5))), 3 * 100),
        (lambda x: jnp.sin(x), (X,), 0),
    ],
)  # fmt: skip
def test_flops(fn, args, expected) -> None:
    block = _jaxpr.trace(fn, *(np.asarray(a, np.float32) for a in args)).block
    assert sum(flops_of(e) for e in block.eqns) == expected
