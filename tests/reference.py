"""The slow, obviously right trainer that everything is compared with: in memory, plain JAX + optax, no paging.

It has the interface of `zinf_jax.Trainer` as far as numbers go, and shares no code with it except
`Weighted` and the leaf table. The definitions that the two must agree on:

* A step splits dim 0 of the batch into `num_micro_batches` equal parts, in order.
* Micro-batch i gets the rng `fold_in(fold_in(rng, global_step), i)`.
* loss = sum_i w_i l_i / sum_i w_i, with w_i = 1 unless the loss function returns `Weighted`.
* gradient = sum_i w_i g_i / sum_i w_i, added up in `gradient_dtype`: by default the weight's dtype with one micro-batch
  (then it is g_0 itself: what `jax.grad` gives), fp32 with more. The loss scale is divided out afterwards, in fp32.
* grad_norm = norm of the fp32 gradients, before clipping; clipping multiplies by max_norm / norm where norm > max_norm.
* A step whose norm is not finite changes nothing but the loss scale and the count of skipped steps.
* bf16 and fp16: the optimizer works on an fp32 master; the weights that the loss sees are rounded from it, bf16 with
  ties up (`split_master`), fp16 to nearest even.
"""

import dataclasses
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from zinf_jax.leaves import LeafKind, classify
from zinf_jax.train.weighted import Weighted

WEIGHT_DTYPES = {"fp32": np.dtype(np.float32), "bf16": np.dtype(jnp.bfloat16), "fp16": np.dtype(np.float16)}


class Out(NamedTuple):
    """What a step returns: the fields of the Trainer's step output."""

    loss: float
    aux: Any
    grad_norm: float
    step: int
    skipped: bool


@dataclasses.dataclass
class LossScale:
    """DeepSpeed's loss scale for fp16: halved after `hysteresis` overflows, doubled after `window` good steps.

    `dynamic=False` keeps `scale` for ever.
    """

    scale: float = 2.0**16
    window: int = 1000
    hysteresis: int = 2
    min_scale: float = 1.0
    consecutive_hysteresis: bool = False
    dynamic: bool = True

    def __post_init__(self) -> None:
        self.left = self.hysteresis
        self.iteration = 0
        self.last_overflow = -1

    def update(self, overflow: bool) -> None:
        if not self.dynamic:
            return
        if overflow:
            if self.hysteresis == 1 or self.left == 1:
                self.scale = max(self.scale / 2, self.min_scale)
            else:
                self.left -= 1
            self.last_overflow = self.iteration
        else:
            if self.consecutive_hysteresis:
                self.left = self.hysteresis
            if (self.iteration - self.last_overflow) % self.window == 0:
                if not self.consecutive_hysteresis:
                    self.left = self.hysteresis
                self.scale *= 2
        self.iteration += 1


def round_bf16_ties_up(x: Any) -> jax.Array:
    """float32 -> bfloat16 as `split_master` rounds: to nearest, ties towards larger magnitude; NaN -> 0x7fc0."""
    x = jnp.asarray(x, jnp.float32)
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    bits = jnp.where(jnp.isnan(x), jnp.uint32(0x7FC00000), bits)
    high = ((bits + jnp.uint32(0x8000)) >> 16).astype(jnp.uint16)
    return jax.lax.bitcast_convert_type(high, jnp.bfloat16)


def split_batch(batch: Any, num_micro_batches: int) -> list[Any]:
    """Micro-batches of equal size, in order."""

    def part(x: Any, i: int) -> Any:
        size, rest = divmod(x.shape[0], num_micro_batches)
        assert rest == 0, f"batch of {x.shape[0]} rows does not split into {num_micro_batches} micro-batches"
        return x[i * size : (i + 1) * size]

    return [jax.tree.map(lambda x, i=i: part(x, i), batch) for i in range(num_micro_batches)]


class InMemoryTrainer:
    """Trains `params` (floating leaves that are not frozen by `trainable`) with everything in device memory.

    Args:
      loss_fn, params, tx, has_aux, rng, state: As for `zinf_jax.Trainer`; `rng=None` means that loss_fn takes none.
      precision: Dtype in which floating leaves reach loss_fn.
      gradient_clipping: Maximal global norm, or None.
      gradient_dtype: Dtype of the gradient's sum over micro-batches, or None for the default above.
      loss_scale: A number (static), a `LossScale`, or None: `LossScale()` with fp16, 1 otherwise.
      trainable: Pytree prefix of bools, or None for every floating leaf.
    """

    def __init__(
        self,
        loss_fn: Callable[..., Any],
        params: Any,
        tx: optax.GradientTransformation,
        *,
        precision: str = "fp32",
        gradient_clipping: float | None = None,
        has_aux: bool = False,
        rng: jax.Array | None = None,
        state: Any = None,
        num_micro_batches: int = 1,
        gradient_dtype: Any = None,
        loss_scale: LossScale | float | None = None,
        trainable: Any = None,
    ) -> None:
        self.tx, self.rng, self.state = tx, rng, state
        self.precision, self.gradient_clipping, self.num_micro_batches = precision, gradient_clipping, num_micro_batches
        default = WEIGHT_DTYPES[precision] if num_micro_batches == 1 else np.dtype(np.float32)
        self.gradient_dtype = default if gradient_dtype is None else np.dtype(gradient_dtype)
        if loss_scale is None:
            loss_scale = LossScale() if precision == "fp16" else 1.0
        self.loss_scale = loss_scale if isinstance(loss_scale, LossScale) else LossScale(loss_scale, dynamic=False)
        self.global_step, self.num_skipped, self.user_state = 0, 0, None

        leaves, self._treedef = jax.tree.flatten(params)
        self._kinds = [leaf.kind for leaf in classify(params, trainable=trainable)]
        floating = [k in (LeafKind.TRAINABLE, LeafKind.FROZEN) for k in self._kinds]
        # Masters of floating leaves; everything else as it came.
        self._masters = [jnp.array(x, jnp.float32) if f else x for x, f in zip(leaves, floating, strict=True)]
        self._opt_state = tx.init(self._trained())

        self._micro = jax.jit(
            _micro_step_fn(loss_fn, has_aux=has_aux, has_rng=rng is not None, has_state=state is not None),
            compiler_options={"xla_allow_excess_precision": False},
        )
        self._update = jax.jit(_update_fn(tx), compiler_options={"xla_allow_excess_precision": False})

    # --- trees

    def _only_trained(self, leaves: list[Any]) -> Any:
        """The parameter tree with None in place of what is not trained."""
        kept = [x if k is LeafKind.TRAINABLE else None for x, k in zip(leaves, self._kinds, strict=True)]
        return jax.tree.unflatten(self._treedef, kept)

    def _trained(self) -> Any:
        return self._only_trained(self._masters)

    def _weights(self) -> list[Any]:
        """What the loss function sees, leaf by leaf."""
        floating = (LeafKind.TRAINABLE, LeafKind.FROZEN)
        cast: Callable[[Any], Any] = {
            "fp32": lambda x: x,
            "bf16": round_bf16_ties_up,
            "fp16": lambda x: x.astype(jnp.float16),
        }[self.precision]
        return [cast(x) if k in floating else x for x, k in zip(self._masters, self._kinds, strict=True)]

    def params(self) -> Any:
        """The weights as the loss function sees them."""
        return jax.tree.unflatten(self._treedef, self._weights())

    def master_params(self) -> Any:
        return jax.tree.unflatten(self._treedef, self._masters)

    def opt_state(self) -> Any:
        return self._opt_state

    # --- steps

    def gradients(self, batch: Any) -> tuple[Any, float, list[Any], Any]:
        """(fp32 gradients before clipping with None where not trained, loss, aux of each micro-batch, new state)."""
        weights, state, scale = self._weights(), self.state, np.float32(self.loss_scale.scale)
        trained, rest = self._only_trained(weights), weights
        losses, counts, auxs, total = [], [], [], None
        for i, micro in enumerate(split_batch(batch, self.num_micro_batches)):
            rng = None
            if self.rng is not None:
                rng = jax.random.fold_in(jax.random.fold_in(self.rng, self.global_step), i)
            grads, loss, count, state, aux = self._micro(
                trained, _tree_without(trained, rest), state, micro, rng, scale
            )
            losses.append(loss)
            counts.append(count)
            auxs.append(aux)
            grads = jax.tree.map(lambda g: g.astype(self.gradient_dtype), grads)
            if self.num_micro_batches > 1:
                grads = jax.tree.map(lambda g, count=count: g * count.astype(g.dtype), grads)
            total = grads if total is None else jax.tree.map(operator.add, total, grads)
        weight_sum = sum(np.float32(c) for c in counts)
        loss = sum(np.float32(c) * np.float32(x) for c, x in zip(counts, losses, strict=True)) / weight_sum
        if self.num_micro_batches > 1:
            total = jax.tree.map(lambda g: g / jnp.asarray(weight_sum, g.dtype), total)
        unscaled = jax.tree.map(lambda g: g.astype(jnp.float32) * (1 / scale), total)
        return unscaled, float(loss), auxs, state

    def step(self, batch: Any) -> Out:
        with np.errstate(all="ignore"):
            grads, loss, auxs, state = self.gradients(batch)
            squares = [np.sum(np.square(np.asarray(g, np.float64))) for g in jax.tree.leaves(grads)]
            norm = float(np.sqrt(np.sum(squares)))
        skipped = not np.isfinite(norm)
        self.loss_scale.update(overflow=skipped)
        if skipped:
            self.num_skipped += 1
        else:
            if self.gradient_clipping is not None and norm > self.gradient_clipping:
                factor = np.float32(self.gradient_clipping / norm)
                grads = jax.tree.map(lambda g: g * factor, grads)
            new, self._opt_state = self._update(grads, self._opt_state, self._trained())
            fresh = iter(jax.tree.leaves(new))
            self._masters = [
                next(fresh) if k is LeafKind.TRAINABLE else x for x, k in zip(self._masters, self._kinds, strict=True)
            ]
            self.state = state
            self.global_step += 1
        aux = jax.tree.map(lambda *xs: jnp.stack(xs), *auxs)
        return Out(loss, aux, norm, self.global_step, skipped)

    def evaluate(self, fn: Callable[[Any, Any], Any], batch: Any) -> Any:
        return jax.jit(fn, compiler_options={"xla_allow_excess_precision": False})(self.params(), batch)

    def close(self) -> None:
        pass

    def __enter__(self) -> "InMemoryTrainer":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _tree_without(trained: Any, leaves: list[Any]) -> list[Any]:
    """`leaves` with None where `trained` has one: together they are the whole tree."""
    flat = jax.tree.leaves(trained, is_leaf=lambda x: x is None)
    return [None if t is not None else x for t, x in zip(flat, leaves, strict=True)]


def _micro_step_fn(loss_fn: Callable[..., Any], *, has_aux: bool, has_rng: bool, has_state: bool) -> Callable[..., Any]:
    """(trained, rest, state, batch, rng, scale) -> (scaled grads, loss, weight, new state, aux)."""

    def scaled_loss(trained: Any, rest: Any, state: Any, batch: Any, rng: Any, scale: Any) -> Any:
        flat, treedef = jax.tree.flatten(trained, is_leaf=lambda x: x is None)
        params = jax.tree.unflatten(treedef, [r if t is None else t for t, r in zip(flat, rest, strict=True)])
        args = [params, *([state] if has_state else []), batch, *([rng] if has_rng else [])]
        out = loss_fn(*args)
        aux, new_state = None, None
        if has_state:
            out, new_state = out
            if has_aux:
                new_state, aux = new_state
        elif has_aux:
            out, aux = out
        loss, weight = out if isinstance(out, Weighted) else (out, np.float32(1))
        return loss.astype(jnp.float32) * scale, (loss, jnp.asarray(weight, jnp.float32), new_state, aux)

    def micro(*args: Any) -> Any:
        grads, (loss, weight, new_state, aux) = jax.grad(scaled_loss, has_aux=True)(*args)
        return grads, loss, weight, new_state, aux

    return micro


def _update_fn(tx: optax.GradientTransformation) -> Callable[..., Any]:
    def update(grads: Any, opt_state: Any, params: Any) -> Any:
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return update
