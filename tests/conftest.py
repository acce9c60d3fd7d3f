"""Makes `tests` a package at the repository root, so that every test can import `tests.reference`.

Tests share one compilation cache: many of them stream the same model from different tiers, and compiling is most of
what they would do otherwise.
"""

import os
import tempfile

import jax

_mine = "ZINF_TEST_CACHE" not in os.environ  # else it belongs to whoever started this process
_cache = os.environ.setdefault("ZINF_TEST_CACHE", tempfile.mkdtemp(prefix="zinf-test-cache-"))
jax.config.update("jax_compilation_cache_dir", _cache)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


def pytest_sessionfinish() -> None:
    if _mine:
        import shutil

        shutil.rmtree(_cache, ignore_errors=True)
