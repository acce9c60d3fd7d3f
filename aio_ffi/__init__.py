"""Asynchronous file I/O for pages that are too many for memory, in C behind cffi. See README.md in this folder.

::

    arena = aio_ffi.Arena(1 << 30)
    with aio_ffi.Engine() as engine, engine.open("pages", num_bytes=1 << 30) as file:
        frame = arena.array(0, 1 << 24)
        engine.write(file, 0, frame).wait()
        engine.read(file, 0, frame).wait()
"""

from aio_ffi._arena import Arena
from aio_ffi._checksum import crc32c, crc32c_variant
from aio_ffi._engine import Engine
from aio_ffi._errors import AioError, AioWarning
from aio_ffi._file import File
from aio_ffi._filesystem import fs_type
from aio_ffi._measure import Bandwidth, measure
from aio_ffi._options import ENGINES, EngineOptions
from aio_ffi._probe import Probe, probe
from aio_ffi._request import Handle, wait_all
from aio_ffi._statistics import Statistics

__all__ = [
    "ENGINES",
    "AioError",
    "AioWarning",
    "Arena",
    "Bandwidth",
    "Engine",
    "EngineOptions",
    "File",
    "Handle",
    "Probe",
    "Statistics",
    "crc32c",
    "crc32c_variant",
    "fs_type",
    "measure",
    "probe",
    "wait_all",
]
