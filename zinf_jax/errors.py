"""The exceptions that users can meet. A user's mistake is a ValueError; a broken invariant is an assert."""


class ZinfError(Exception):
    """Base of every exception that this package raises on purpose."""


class ConfigError(ZinfError, ValueError):
    """A config value, an argument or a combination of them that cannot work; says what to change."""


class PlanError(ZinfError, ValueError):
    """The run cannot fit the budgets. The message holds the table of what needs how much."""


class CutError(ZinfError, ValueError):
    """A loss function that cannot be cut into units; names the equation that stands in the way."""


class InitError(ZinfError, ValueError):
    """An init function that cannot be restricted to the leaves of one page."""


class StoreError(ZinfError, OSError):
    """I/O on pages failed: names operation, page, file, offset, length and errno."""


class CorruptionError(StoreError):
    """Bytes that were read are not those that were written: names page, file, offset, step, expected and found."""


class OwnerError(ZinfError, RuntimeError):
    """The run directory belongs to another live run, or to a dead one that was not asked to be taken over."""


class ResumeError(ZinfError, RuntimeError):
    """A checkpoint or run directory that cannot be resumed from."""


class NonFiniteError(ZinfError, ArithmeticError):
    """Too many steps in a row had non-finite gradients."""
