"""A step's update, as the trainer asks for it: ahead of the norm, beside the next forward, or at once.

The bits are the same whenever it runs; see `stream.overlap`. An optimizer without a fused kernel is updated at once.
"""

from collections.abc import Callable
from typing import Any

from zinf_jax.optim import clipping
from zinf_jax.stream.engine import StreamEngine
from zinf_jax.stream.overlap import OverlapChooser


class StepUpdates:
    """The updates of one trainer.

    Args:
      engine: Holds the pages.
      rule: The optimizer, bound to the leaves.
      clips: There is a bound on the norm.

    Attributes:
      num_undone: Steps whose updates had run ahead in vain.
    """

    def __init__(self, engine: StreamEngine, rule: Any, *, clips: bool) -> None:
        self._engine = engine
        self._rule = rule
        self._chooser = OverlapChooser(engine.plan.options.update_overlap, clips=clips)

    @property
    def num_undone(self) -> int:
        return self._chooser.num_undone

    def ahead(self, count: int, divisor: float | None) -> Callable[[], None] | None:
        """What starts a step's update before its norm is known; None where that is not worth trying.

        Args:
          count: Steps taken before this one.
          divisor: By what the gradients are too large; None where that is not known yet.
        """
        if not self._rule.fused or divisor is None or not self._chooser.runs_ahead:
            return None
        unclipped = clipping.clip((), divisor).gradient_scale

        def speculate() -> None:
            engine = self._engine
            # While the last commit is under way no old version would stay.
            if engine.may_write():
                gradients = engine.gradients.collected
                engine.updates.speculate(count + 1, engine.fused.of(self._rule, count, unclipped, gradients), gradients)

        return speculate

    def settle(self, clip: clipping.Clip, divisor: float) -> None:
        """The norm is known: an update that ran ahead stands, or is undone."""
        as_assumed = clip.gradient_scale == clipping.clip((), divisor).gradient_scale and not clip.skip
        undone = self._engine.updates.speculating and not as_assumed
        if undone:
            self._engine.updates.undo()
        self._chooser.saw(as_assumed=as_assumed, undone=undone)

    def took(self, seconds: float) -> None:
        """A step is over."""
        self._chooser.took(seconds)

    def apply(self, count: int, gradient_scale: float, commit: Callable[[], Callable[[], None]]) -> None:
        """Updates every page, now or beside the next forward.

        Args:
          count: Steps taken before this one.
          gradient_scale: Multiplies gradients in fp32.
          commit: Called once the optimizer's small state is the step's; gives what to call when all is written.

        Raises:
          StoreError: a transfer failed. Pages may then hold a mix of old and new state.
        """
        engine, gradients = self._engine, self._engine.gradients.collected
        if not self._rule.fused:
            engine.store.step = count + 1
            engine.store.versions.begin()
            engine.generic.run(self._rule, gradient_scale, gradients)
            commit()()
            return
        compute = engine.fused.of(self._rule, count, gradient_scale, gradients)
        engine.updates.owe(count + 1, compute, gradients, commit())
        if engine.plan.overlaps:
            engine.executor.prefetch()
        else:
            engine.updates.finish()
