"""Programs in parts: casts of weights made once for all that read them, weight gradients beside what waits for nothing
else. Both take equations out of a traced program and change none, so that op by op all results are equal."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.graph.models import MODELS
from zinf_jax.graph import _jaxpr, cut_function, keep_residuals
from zinf_jax.graph.apart import Apart
from zinf_jax.graph.casts import Cast, given_casts, parameter_casts
from zinf_jax.graph.interpret import grad_units
from zinf_jax.graph.types import Program
from zinf_jax.leaves import classify

WIDTH, ROWS = 8, 4
FLOAT32 = np.dtype(np.float32)


@pytest.fixture(autouse=True)
def fast_compile():
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def middle_layer(loss, policy="nothing_saveable", dtype=jnp.bfloat16):
    """A middle unit of a stack of `loss(layer, x)`, and its program."""

    def whole(params, x):
        for layer in params:
            x = loss(layer, x)
        return jnp.sum(x**2)

    keys = jax.random.split(jax.random.key(0), 3)
    params = [{"w": jax.random.normal(key, (WIDTH, WIDTH), dtype), "b": jnp.ones(WIDTH, dtype)} for key in keys]
    size = (WIDTH * WIDTH + WIDTH) * jnp.dtype(dtype).itemsize
    leaves = classify(params, compute_dtype=jnp.dtype(dtype))
    graph = cut_function(whole, params, leaves, (jnp.ones((ROWS, WIDTH)),), max_unit_bytes=size)
    graph = keep_residuals(graph, policy, range(len(graph.units)))
    return graph.units[1], graph.programs[graph.units[1].program]


def layer_program(loss, **options):
    return middle_layer(loss, **options)[1]


def tanh_layer(layer, x):
    return jnp.tanh(x @ layer["w"].astype(jnp.float32) + layer["b"].astype(jnp.float32))


def arguments(program, seed=0):
    """Random arrays as a program's forward takes them."""
    rng = np.random.default_rng(seed)

    def arrays(avals):
        floating = [jnp.issubdtype(a.dtype, jnp.floating) for a in avals]
        return [
            jnp.asarray(rng.normal(size=a.shape), a.dtype) if f else jnp.ones(a.shape, a.dtype)
            for a, f in zip(avals, floating, strict=True)
        ]

    return arrays(program.piece_avals), arrays(program.input_avals), arrays(program.operand_avals)


def backward_arguments(unit, program):
    pieces, inputs, operands = arguments(program)
    outputs = program.forward(pieces, inputs, operands)
    values = dict(zip(unit.outputs, outputs, strict=True))
    cotangents = [jnp.ones_like(x) for x, diff in zip(outputs, program.diff_outputs, strict=True) if diff]
    return pieces, inputs, operands, [values[v] for v in unit.saved], cotangents


def assert_same(ours, theirs):
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def casts_of_arguments(function, args):
    """How many of a function's first arguments it casts to float32."""
    block = _jaxpr.flat(_jaxpr.trace(function, *args).block)
    first = set(block.invars[: len(args[0])])
    return sum(
        eqn.primitive.name == "convert_element_type" and eqn.invars[0] in first and eqn.outvars[0].aval.dtype == FLOAT32
        for eqn in block.eqns
    )


@pytest.mark.parametrize("policy", ["nothing_saveable", "dots_saveable", "everything_saveable"])
def test_a_cast_is_given_instead_of_made(policy):
    """Backward of what a policy keeps is inside a `checkpoint` equation: casts are found there too."""
    unit, program = middle_layer(tanh_layer, policy)
    (cast,) = parameter_casts(program)
    pieces, inputs, operands, saved, cotangents = backward_arguments(unit, program)
    made = [pieces[cast.piece].astype(cast.dtype)]

    forward = given_casts(program.forward, [cast])
    assert_same(forward(pieces, made, inputs, operands), program.forward(pieces, inputs, operands))
    backward = given_casts(program.backward, [cast])
    ours = backward(pieces, made, inputs, operands, saved, cotangents)
    assert_same(ours, program.backward(pieces, inputs, operands, saved, cotangents))
    assert [g.dtype for g in ours[0]] == [jnp.bfloat16] * 2, "the gradient is still the piece's"

    def alone(pieces, *rest):
        return backward(pieces, made, *rest)

    rest = (inputs, operands, saved, cotangents)
    before = casts_of_arguments(program.backward, (pieces, *rest))
    assert casts_of_arguments(alone, (pieces, *rest)) == before - 1


def test_what_is_given_is_what_is_read():
    program = layer_program(tanh_layer)
    (cast,) = parameter_casts(program)
    pieces, inputs, operands = arguments(program)
    doubled = given_casts(program.forward, [cast])(pieces, [2 * pieces[cast.piece].astype(FLOAT32)], inputs, operands)
    twice = [2 * p if i == cast.piece else p for i, p in enumerate(pieces)]
    assert_same(doubled, program.forward(twice, inputs, operands))


def test_only_operands_of_products_are_cast_apart():
    """A bias is cast in the loop that adds it; rows of a table are looked up, not all of it cast first."""

    def loss(params, tokens):
        x = params["table"].astype(jnp.float32)[tokens] + params["bias"].astype(jnp.float32)
        return jnp.sum((x @ params["matrix"].astype(jnp.float32)) ** 2)

    params = {
        "table": jnp.ones((16, WIDTH), jnp.bfloat16),
        "bias": jnp.ones(WIDTH, jnp.bfloat16),
        "matrix": jnp.ones((WIDTH, WIDTH), jnp.bfloat16),
    }
    leaves = classify(params, compute_dtype=jnp.dtype(jnp.bfloat16))
    graph = cut_function(loss, params, leaves, (jnp.zeros(ROWS, jnp.int32),), max_unit_bytes=1 << 20)
    (unit,) = graph.units
    (cast,) = parameter_casts(graph.programs[unit.program])
    assert graph.leaves[unit.pieces[cast.piece].leaf].name.endswith("matrix")
    assert cast == Cast(cast.piece, FLOAT32)


def test_a_cast_that_something_else_reads_stays():
    def layer(layer, x):
        w = layer["w"].astype(jnp.float32)
        return jnp.tanh(x @ w) + jnp.sum(w**2)

    assert parameter_casts(layer_program(layer)) == ()


def test_a_narrowing_is_no_cast_to_share():
    def layer(layer, x):
        return (x.astype(jnp.bfloat16) @ layer["w"].astype(jnp.bfloat16)).astype(jnp.float32)

    assert parameter_casts(layer_program(layer, dtype=jnp.float32)) == ()


@pytest.mark.parametrize("policy", ["nothing_saveable", "dots_saveable"])
def test_gradients_may_come_later(policy):
    unit, program = middle_layer(tanh_layer, policy)
    args = backward_arguments(unit, program)
    two = Apart(program.backward, *args)
    assert two.splits
    back, crossing = two.early(*args)
    gradients = two.late(crossing, *args)
    assert_same((gradients, back), program.backward(*args))
    assert [(x.shape, x.dtype) for x in crossing] == [(x.shape, x.dtype) for x in two.crossing]


def test_each_product_is_in_one_of_the_two():
    """One for the input's cotangent, one for the weight's gradient, none twice."""
    unit, program = middle_layer(tanh_layer, "dots_saveable")
    args = backward_arguments(unit, program)
    two = Apart(program.backward, *args)
    _, crossing = two.early(*args)

    assert (_products(two.early, *args), _products(two.late, crossing, *args)) == (1, 1)
    assert _products(program.backward, *args) == 2


def test_what_early_work_made_is_not_made_again():
    def function(x):
        y = x @ x
        return [y @ x], [y]

    x = jnp.ones((WIDTH, WIDTH))
    two = Apart(function, x)
    _, crossing = two.early(x)
    assert [_products(two.early, x), _products(two.late, crossing, x)] == [1, 1]


def _products(function, *args):
    block = _jaxpr.flat(_jaxpr.trace(function, *args).block)
    return [eqn.primitive.name for eqn in block.eqns].count("dot_general")


def test_what_has_one_kind_of_result_is_not_split():
    def only_late(x):
        return [x @ x], []

    def late_is_early(x):
        y = x @ x
        return [y], [y]

    x = jnp.ones((WIDTH, WIDTH))
    assert not Apart(only_late, x).splits
    assert not Apart(late_is_early, x).splits


def test_a_late_result_that_early_work_makes_crosses():
    def function(x):
        y = jnp.sin(x)
        return [y, jnp.cos(x), x], [y * 2]

    x = jnp.arange(4.0)
    two = Apart(function, x)
    early, crossing = two.early(x)
    assert two.splits and len(crossing) == 1
    assert_same((two.late(crossing, x), early), function(x))


_QUICK = ("linen_gpt", "nnx_batchnorm", "custom_rules", "control_flow")
_ONE_DTYPE = ("stax_convnet",)  # its convolutions refuse weights that are not of their inputs' dtype


class InParts(Program):
    """A program that casts first and makes its gradients last."""

    def backward(self, pieces, *rest):
        given = given_casts(super().backward, self._casts)
        arguments = (list(pieces), self._made(pieces), *rest)
        two = Apart(given, *arguments)
        back, crossing = two.early(*arguments)
        return two.late(crossing, *arguments), back[: sum(self.diff_inputs)]

    @property
    def _casts(self):
        return parameter_casts(self)

    def _made(self, pieces):
        return [pieces[cast.piece].astype(cast.dtype) for cast in self._casts]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in _QUICK else pytest.mark.slow) for name in MODELS]
)
def test_models_in_parts_have_the_same_gradients(name):
    model = MODELS[name]()
    params = model.params()
    compute_dtype = np.dtype(np.float32) if name in _ONE_DTYPE else jnp.dtype(jnp.bfloat16)
    leaves = classify(params, compute_dtype=compute_dtype)
    graph = cut_function(model.loss_fn, params, leaves, model.args, max_unit_bytes=1 << 12)
    graph = keep_residuals(graph, "dots_saveable", range(len(graph.units)))
    parts = tuple(InParts(**{f.name: getattr(p, f.name) for f in dataclasses.fields(p)}) for p in graph.programs)
    _, gradients = grad_units(graph, params, model.args, jit=True)
    _, ours = grad_units(dataclasses.replace(graph, programs=parts), params, model.args, jit=True)
    whole = np.sqrt(sum(float(jnp.sum(jnp.square(g.astype(jnp.float32)))) for g in gradients.values()))
    assert ours.keys() == gradients.keys()
    for piece, gradient in gradients.items():
        first, second = np.asarray(gradient, np.float32), np.asarray(ours[piece], np.float32)
        assert np.linalg.norm(first - second) <= 0.02 * np.linalg.norm(first) + 3e-3 * whole, piece
