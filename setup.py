"""Builds the two C extensions; everything else is declared in pyproject.toml."""

from setuptools import setup

setup(cffi_modules=["aio_ffi/_build.py:ffibuilder", "zinf_jax/optim/_build.py:ffibuilder"])
