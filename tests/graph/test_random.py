"""Random programs, cut at random limits, against `jax.grad`; and random step sequences, cut by numbers alone."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.graph.reference import check, normal
from zinf_jax.graph._segment import Steps, choose_cuts

D = 3

_UNARY = {
    "tanh": jnp.tanh,
    "sin": jnp.sin,
    "square": lambda x: x * x * 0.1,
    "stop": jax.lax.stop_gradient,
    "round": jnp.round,
    "cast": lambda x: x.astype(jnp.bfloat16).astype(jnp.float32),
    "transpose": lambda x: x.T,
    "sum": lambda x: x.sum(0, keepdims=True) + jnp.zeros_like(x),
    "sort": lambda x: jnp.sort(x, axis=0),
    "relu": jax.nn.relu,
    "jit": jax.jit(lambda x: jnp.cos(x) * 2),
    "loop": lambda x: jax.lax.scan(lambda c, row: (c * 0.5 + row, c), x[0], x)[1],
    "while": lambda x: x * jax.lax.while_loop(lambda n: n < 3, lambda n: n + 1, 0),
    "cond": lambda x: jax.lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x),
    "argmax": lambda x: jnp.argmax(x, axis=0)[None] * jnp.ones_like(x),
}
_BINARY = {
    "add": jnp.add,
    "mul": jnp.multiply,
    "matmul": lambda a, b: jnp.tanh(a @ b),
    "where": lambda a, b: jnp.where(a > 0, a, b),
    "max": jnp.maximum,
    "concat": lambda a, b: jnp.concatenate([a, b])[1 : D + 1],
}


@st.composite
def recipes(draw: Any) -> tuple[int, int, list[tuple[Any, ...]]]:
    """How many parameters and inputs, and a list of operations on earlier values."""
    num_params, num_inputs = draw(st.integers(0, 4)), draw(st.integers(1, 2))
    num_values = num_params + num_inputs + 1
    operations: list[tuple[Any, ...]] = []
    for _ in range(draw(st.integers(1, 14))):
        value = st.integers(0, num_values - 1)
        if draw(st.booleans()):
            operations.append((draw(st.sampled_from(sorted(_UNARY))), draw(value)))
        else:
            operations.append((draw(st.sampled_from(sorted(_BINARY))), draw(value), draw(value)))
        num_values += 1
    return num_params, num_inputs, operations


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(recipes(), st.sampled_from([1, 40, 80, 10**6]), st.data())
def test_random_programs_have_the_gradients_of_jax_grad(recipe, limit, data) -> None:
    num_params, num_inputs, operations = recipe
    constant = np.linspace(-1, 1, D * D, dtype=np.float32).reshape(D, D)

    def run(p, *inputs):
        values = [*p, *inputs, constant]
        for name, *operands in operations:
            fn = _UNARY.get(name) or _BINARY[name]
            values.append(fn(*(values[i] for i in operands)))
        return (values[-1] ** 2).mean() + values[-(len(values) // 2)].sum(), values[len(values) // 2 :]

    params = [normal(i, D, D, scale=0.5) for i in range(num_params)]
    frozen = [data.draw(st.booleans()) for _ in params]
    inputs = tuple(normal(10 + i, D, D) for i in range(num_inputs))
    check(
        run,
        params,
        inputs,
        limit,
        trainable=[not f for f in frozen] or None,
        tolerance=1e-2 if _rounds(operations) else 2e-5,
    )


def _rounds(operations: list[tuple[Any, ...]]) -> bool:
    return any(name == "cast" for name, *_ in operations)


@st.composite
def sequences(draw: Any) -> Steps:
    """Repeated random blocks between random steps."""
    step = st.tuples(st.integers(0, 6), st.sampled_from([0, 0, 0, 5, 9, 30]), st.integers(0, 40))
    steps: list[tuple[int, int, int]] = []
    for _ in range(draw(st.integers(1, 3))):
        steps += draw(st.lists(step, max_size=6))
        steps += draw(st.lists(step, min_size=1, max_size=8)) * draw(st.integers(1, 6))
    hashes = [kind for kind, _, _ in steps]
    reads = [[(index, num_bytes)] if num_bytes else [] for index, (_, num_bytes, _) in enumerate(steps)]
    live = [0, *(num_bytes for _, _, num_bytes in steps)]
    return Steps(hashes, reads, live)


@settings(max_examples=300, deadline=None)
@given(sequences(), st.sampled_from([1, 9, 10, 30, 64, 1000]), st.integers(0, 40))
def test_cuts_keep_the_limit_and_leave_no_unit_without_parameters(steps, limit, least) -> None:
    cuts = choose_cuts(steps, limit, least)
    num_steps = len(steps.hashes)
    assert cuts == sorted(set(cuts)) and all(0 < cut < num_steps for cut in cuts)
    borders = [0, *cuts, num_steps]
    for start, stop in itertools.pairwise(borders):
        readers = sum(bool(steps.reads[step]) for step in range(start, stop))
        assert readers or not cuts
        assert steps.piece_bytes(start, stop) <= limit or readers == 1


@settings(max_examples=100, deadline=None)
@given(st.integers(3, 40), st.integers(1, 12), st.integers(0, 5), st.integers(0, 5), st.data())
def test_equal_blocks_are_cut_at_equal_places(num_blocks, length, num_before, num_after, data) -> None:
    block = data.draw(st.lists(st.integers(0, 3), min_size=length, max_size=length))
    hashes = [100 + i for i in range(num_before)] + block * num_blocks + [200 + i for i in range(num_after)]
    sizes = [1] * num_before + ([10] + [0] * (length - 1)) * num_blocks + [1] * num_after
    live = [50] * num_before + ([5] + [20] * (length - 1)) * num_blocks + [50] * (num_after + 1)
    steps = Steps(hashes, [[(i, size)] if size else [] for i, size in enumerate(sizes)], live)
    cuts = choose_cuts(steps, 10, 1)
    assert set(range(num_before, num_before + num_blocks * length + 1, length)) - {0, len(hashes)} <= set(cuts) | {
        num_before, num_before + num_blocks * length}  # fmt: skip
    inside = [cut for cut in cuts if num_before < cut < num_before + num_blocks * length]
    assert all((cut - num_before) % length == 0 for cut in inside)
