"""Builds `zinf_jax.optim._host` from the C files beside this one.

`python zinf_jax/optim/_build.py`, from the root of the checkout, builds in place; setup.py uses `ffibuilder`. Each
vector variant is compiled whatever the build machine has and chosen at run time, so the result runs on any CPU of the
architecture.
"""

import os
import pathlib

import cffi

_DIRECTORY = "zinf_jax/optim"
_SOURCES = ("host", "pool", "kernels_portable", "kernels_avx2", "kernels_avx512")

_ALIASING = "-fno-strict-aliasing"  # frames and tail buffers hold several types

ffibuilder = cffi.FFI()
ffibuilder.cdef(
    """
    typedef struct {
        void *weights;
        void *master;
        const void *gradient;
        float *slots[2];
        const float *coefficients;
        int64_t length;
        int32_t weights_dtype;
        int32_t gradient_dtype;
    } zinf_range;

    int zinf_num_variants(void);
    int zinf_variant_supported(int variant);
    int zinf_variant_get(void);
    int zinf_variant_set(int variant);
    void zinf_update(int kernel, const zinf_range *ranges, int64_t num_ranges, float scale, int num_threads);
    double zinf_squared_norm(const void *values, int dtype, int64_t length, double *sums, int num_threads);
    void zinf_split(const void *master, void *weights, void *remainder, int64_t length, int num_threads);
    void zinf_join(const void *weights, const void *remainder, void *master, int64_t length, int num_threads);
    void zinf_accumulate(void *target, int target_dtype, const void *source, int source_dtype, int64_t length,
                         int num_threads);
    void zinf_copy(void *target, const void *source, int64_t num_bytes, int num_threads);
    void zinf_zero(void *target, int64_t num_bytes, int num_threads);
    void zinf_triad(float *target, const float *a, const float *b, float scale, int64_t length, int nontemporal,
                    int num_threads);
    """
)
ffibuilder.set_source(
    "zinf_jax.optim._host",
    '#include "host.h"',
    sources=[f"{_DIRECTORY}/{name}.c" for name in _SOURCES],
    depends=[f"{_DIRECTORY}/{name}" for name in ("host.h", "kernels.inc.h")],
    include_dirs=[_DIRECTORY],
    # No contraction: which operations are fused is part of the numbers. Never -ffast-math: linking with it turns on
    # flush-to-zero for the whole process.
    extra_compile_args=["-O2", "-std=gnu11", "-Wall", "-Wextra", "-ffp-contract=off", "-fno-math-errno", _ALIASING],
    extra_link_args=["-pthread"],
)

if __name__ == "__main__":
    os.chdir(pathlib.Path(__file__).resolve().parents[2])
    ffibuilder.compile(verbose=False)
    for name in (*_SOURCES, "_host"):
        pathlib.Path(_DIRECTORY, f"{name}.o").unlink(missing_ok=True)
