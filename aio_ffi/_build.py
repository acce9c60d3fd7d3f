"""Builds the C extension `aio_ffi._aio`: `python aio_ffi/_build.py`, or through setup.py.

The kernel's asynchronous I/O is used by its system calls, so no library is linked: `linux/aio_abi.h` (part of every C
tool chain's kernel headers) is all there is to have. Where even that is missing, or does not compile, the build
still succeeds, without the rings: files then go through the thread lane. Why is compiled in, and `probe` reports it.
"""

import os
import pathlib
import shlex
import subprocess
import sysconfig
import tempfile

from cffi import FFI

HERE = pathlib.Path(__file__).resolve().parent
SOURCES = ("engine.c", "rings.c", "threads.c", "file.c", "arena.c", "checksum.c", "faults.c")

PROBE = """
#include <linux/aio_abi.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>
int main(void) {
    aio_context_t context = 0;
    struct iocb iocb = {.aio_flags = IOCB_FLAG_RESFD, .aio_lio_opcode = IOCB_CMD_PREAD};
    struct io_event event;
    (void)iocb; (void)event;
    return eventfd(0, EFD_CLOEXEC) < 0
        || syscall(SYS_io_setup, 1, &context) < 0 || syscall(SYS_io_submit, context, 0, 0) < 0
        || syscall(SYS_io_getevents, context, 0, 0, 0, 0) < 0 || syscall(SYS_io_destroy, context) < 0;
}
"""


def missing_kernel_aio() -> str:
    """Compiles and links a program that needs what the rings need. Returns "" or the compiler's first complaint."""
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
    with tempfile.TemporaryDirectory() as folder:
        source = pathlib.Path(folder, "probe.c")
        source.write_text(PROBE)
        command = [
            *compiler,
            *shlex.split(os.environ.get("CFLAGS", "")),
            str(source),
            "-o",
            str(source.with_suffix("")),
        ]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError as error:
            return f"the compiler {compiler[0]} cannot be run: {error.strerror}"
    if done.returncode == 0:
        return ""
    complaints = [line for line in done.stderr.splitlines() if "error" in line or "undefined" in line]
    first = (complaints or done.stderr.splitlines() or ["no message"])[0]
    return first.replace(str(folder), "").lstrip("/")


def declarations() -> str:
    """The part of the header that cffi parses."""
    text = (HERE / "zaio.h").read_text()
    return text[text.index("*/", text.index("/* cdef begin")) + 2 : text.index("/* cdef end")]


def make() -> FFI:
    """The builder that setup.py and `main` use."""
    macros: list[tuple[str, str | None]] = []
    note = missing_kernel_aio()
    if note:
        print(f"aio_ffi: built without kernel AIO, threads will be used: {note}")
        quoted = note.replace("\\", "/").replace('"', "'")
        macros = [("ZAIO_NO_KERNEL_AIO", "1"), ("ZAIO_BUILD_NOTE", f'"{quoted}"')]
    builder = FFI()
    builder.cdef(declarations())
    builder.set_source(
        "aio_ffi._aio",
        '#include "zaio.h"',
        sources=[f"aio_ffi/{name}" for name in SOURCES],
        include_dirs=["aio_ffi"],
        depends=["aio_ffi/zaio.h", "aio_ffi/zaio_internal.h"],
        define_macros=macros,
        extra_compile_args=["-O3", "-std=gnu11", "-Wall", "-Wextra", "-Wno-unused-parameter", "-pthread"],
        extra_link_args=["-pthread"],
    )
    return builder


def main() -> None:
    """Builds in place, whatever the current directory."""
    os.chdir(HERE.parent)
    ffibuilder.compile(tmpdir=".", verbose=bool(os.environ.get("VERBOSE")))
    for leftover in HERE.glob("*.o"):
        leftover.unlink()


ffibuilder = make()

if __name__ == "__main__":
    main()
