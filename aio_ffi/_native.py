"""The C extension, or a message that says how to get it."""

try:
    from aio_ffi._aio import ffi, lib
except ImportError as error:
    raise ImportError(
        f"the C extension of aio_ffi cannot be loaded ({error}); build it: `python aio_ffi/_build.py` in the project's "
        "root (needs a C compiler and the cffi package), or `pip install -e .`"
    ) from error

__all__ = ["ffi", "lib"]
