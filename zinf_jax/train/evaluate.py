"""Forward passes of any function of the parameters, over the pages that training uses."""

from collections.abc import Callable
from typing import Any

import jax

from zinf_jax.graph import cut_function
from zinf_jax.plan import plan_evaluation
from zinf_jax.stream.engine import StreamEngine, device_operands, step_program
from zinf_jax.stream.executor import Executor
from zinf_jax.train import setup


class Evaluator:
    """Traces, compiles and plans once per function and batch shape; runs between training steps."""

    def __init__(self, engine: StreamEngine, abstract: Any) -> None:
        self._engine = engine
        self._abstract = abstract
        self._cache: dict[Any, tuple[Executor, Any, dict[int, Any]]] = {}

    def __call__(self, fn: Callable[..., Any], batch: Any) -> Any:
        """`fn(params, batch)`.

        Args:
          fn: Any traceable function. Pass the same object again to reuse what was compiled.
          batch: Pytree of arrays.

        Returns:
          The function's output tree, of jax arrays that are ready.
        """
        abstract_batch = setup.abstract_of(batch)
        flat, tree = jax.tree.flatten(abstract_batch)
        key = (fn, tree, tuple((x.shape, str(x.dtype)) for x in flat))
        if key not in self._cache:
            self._cache[key] = self._build(fn, abstract_batch)
        executor, out_tree, shardings = self._cache[key]
        arrays = jax.tree.leaves(batch)
        outer = {v: jax.device_put(x, s) for (v, s), x in zip(shardings.items(), arrays, strict=True)}
        (results,) = executor.run([outer])
        return jax.tree.unflatten(out_tree, results)

    def _build(self, fn: Callable[..., Any], batch: Any) -> tuple[Executor, Any, dict[int, Any]]:
        engine, topology = self._engine, self._engine.topology
        graph = cut_function(
            fn, self._abstract, engine.layout.leaves, (batch,),
            max_unit_bytes=engine.options.max_unit_bytes, differentiate=False,
            stacks={leaf.index: leaf.stack_ndim for leaf in engine.layout.leaves if leaf.stack_ndim},
        )  # fmt: skip
        shardings = {v: self._sharding(graph.values[v].shape) for v in graph.outer_inputs}
        program = step_program(
            graph, engine.layout, topology, engine.record,
            gradient_dtype=engine.record.weights, outer_shardings=shardings, group_sizes=(1,),
        )  # fmt: skip
        plan = plan_evaluation(program.shape, engine.plan)
        executor = Executor(
            graph, plan, program.executables, device_operands(graph, topology), engine.pager, None, None,
            engine.counters,
        )  # fmt: skip
        return executor, graph.out_tree, shardings

    def _sharding(self, shape: tuple[int, ...]) -> Any:
        """Split over the mesh where it divides evenly, else replicated: any batch can be evaluated."""
        topology = self._engine.topology
        if shape and shape[0] % topology.batch_ways == 0:
            return topology.batch_sharding(shape)
        return topology.replicated
