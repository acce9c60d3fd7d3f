"""streamed(tx): a plain optax loop whose state is in host memory or in a file."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.optim import reference
from zinf_jax import optim
from zinf_jax.errors import ConfigError

TRANSFORMATIONS = {
    "adamw": (optim.adamw(1e-2), optax.adamw(1e-2)),
    "generic": (optax.chain(optax.add_decayed_weights(0.1), optax.adam(1e-2)), None),
    "lamb": (optax.lamb(1e-2), None),
    "sgd": (optim.sgd(0.1), optax.sgd(0.1)),
}


def _params() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {
        "a": jnp.asarray(rng.standard_normal((70, 50)), jnp.float32),
        "b": jnp.asarray(rng.standard_normal(5), jnp.float32),
    }


def _gradients(step: int) -> dict[str, Any]:
    rng = np.random.default_rng(10 + step)
    return jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape), jnp.float32), _params())


@pytest.mark.parametrize("place", ["host", "nvme"])
@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_follows_optax(name: str, place: str, tmp_path: Path) -> None:
    ours, plain = TRANSFORMATIONS[name]
    plain = ours if plain is None else plain
    tx = optim.streamed(ours, nvme_path=tmp_path if place == "nvme" else None, chunk_elements=1024)
    params, expected = _params(), _params()
    state, plain_state = tx.init(params), plain.init(expected)
    step = reference.jitted_step(plain)
    for number in range(3):
        updates, state = tx.update(_gradients(number), state, params)
        params = optax.apply_updates(params, updates)
        expected, plain_state = step(expected, plain_state, _gradients(number))
    assert int(state.count) == 3 and not list(tmp_path.iterdir())  # the file has no name
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)
    state.close()


def test_places_give_the_same_bits(tmp_path: Path) -> None:
    results = []
    cases: list[dict[str, Any]] = [
        {},
        {"nvme_path": tmp_path, "chunk_elements": 1024},
        {"nvme_path": tmp_path, "num_threads": 1},
    ]
    for arguments in cases:
        tx, params = optim.streamed(optim.lion(1e-3), **arguments), _params()
        state = tx.init(params)
        for number in range(2):
            updates, state = tx.update(_gradients(number), state, params)
            params = optax.apply_updates(params, updates)
        results.append(
            [np.asarray(x).tobytes() for x in jax.tree.leaves(params)] + [v.tobytes() for _, v in state.items()]
        )
        state.close()
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_saves_and_restores(name: str, tmp_path: Path) -> None:
    tx = optim.streamed(TRANSFORMATIONS[name][0], nvme_path=tmp_path, chunk_elements=1024)
    params = _params()
    _, state = tx.update(_gradients(0), tx.init(params), params)
    saved = dict(state.items())
    fresh = tx.init(params).restore(saved, 1)
    expected, _ = tx.update(_gradients(1), state, params)
    found, _ = tx.update(_gradients(1), fresh, params)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), expected, found))


def test_a_used_state_is_refused() -> None:
    tx, params = optim.streamed(optim.adam(1e-3)), _params()
    old = tx.init(params)
    _, new = tx.update(_gradients(0), old, params)
    with pytest.raises(RuntimeError, match=r"step 0.*already used.*step 1"):
        tx.update(_gradients(0), old, params)
    with pytest.raises(ValueError, match="needs the parameters"):
        tx.update(_gradients(0), new)
    with pytest.raises(TypeError, match="outside jit"):
        jax.jit(tx.update)(_gradients(0), new, params)
    new.close()
    with pytest.raises(RuntimeError, match="closed"):
        tx.update(_gradients(0), new, params)


def test_integer_leaves_stay() -> None:
    params = {"n": jnp.int32(5), "w": jnp.ones(3)}
    tx = optim.streamed(optim.sgd(0.5))
    updates, _ = tx.update({"n": None, "w": jnp.ones(3)}, tx.init(params), params)
    new = optax.apply_updates(params, updates)
    assert new["n"] == 5 and new["n"].dtype == jnp.int32 and (new["w"] == 0.5).all()


def test_bad_arguments(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="existing directory"):
        optim.streamed(optim.adam(1e-3), nvme_path=tmp_path / "missing")
    with pytest.raises(ConfigError, match="chunk_elements"):
        optim.streamed(optim.adam(1e-3), chunk_elements=0)
