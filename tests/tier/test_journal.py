"""The journal: what was appended is found; what is torn is dropped; what is damaged is refused."""

import errno
import os
import stat

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zinf_jax.errors import StoreError
from zinf_jax.tier.directories import make_directory, sync_directory
from zinf_jax.tier.journal import MAGIC, Disk, Journal, Record, encode, parse, read

DTYPES = [np.uint8, np.uint32, np.int64, np.float32, np.float16, np.bool_, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn]
TEXT = st.text('ab é\n"\\\u2028\U0001f600', max_size=6)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)


def equal(one: Record, other: Record) -> bool:
    return (
        one.sequence == other.sequence
        and one.meta == other.meta
        and list(one.arrays) == list(other.arrays)
        and all(
            a.dtype == other.arrays[n].dtype and a.shape == other.arrays[n].shape
            and a.tobytes() == other.arrays[n].tobytes() for n, a in one.arrays.items()
        )
    )  # fmt: skip


@st.composite
def records(draw):
    count = draw(st.integers(0, 4))
    first = draw(st.sampled_from([1, 7, 2**32 - 2, 2**40]))
    made = []
    for number in range(count):
        arrays = {}
        for name in draw(st.lists(st.text("abc/_", min_size=1, max_size=4), max_size=3, unique=True)):
            dtype = np.dtype(draw(st.sampled_from(DTYPES)))
            shape = tuple(draw(st.lists(st.integers(0, 3), max_size=3)))
            size = int(np.prod(shape)) * dtype.itemsize
            raw = draw(st.binary(min_size=size, max_size=size))
            if dtype == np.bool_:
                raw = bytes(b & 1 for b in raw)
            arrays[name] = np.frombuffer(raw, dtype).reshape(shape)
        made.append(Record(first + number, draw(st.dictionaries(TEXT, JSON, max_size=3)), arrays))
    return made


@settings(deadline=None)
@given(records())
def test_records_come_back(made):
    """PR05: whatever the dtype, bit for bit; sequence numbers beyond 32 bits too."""
    found, starts = parse(b"".join(map(encode, made)))
    assert len(found) == len(made) and all(map(equal, found, made))
    assert starts == [sum(len(encode(r)) for r in made[:n]) for n in range(len(made) + 1)]


def sample(sequence: int) -> Record:
    arrays = {"weights/index": np.arange(3, dtype=np.uint32), "small": np.array([0.5, -2], ml_dtypes.bfloat16)}
    return Record(sequence, {"step": sequence, "name": "x"}, arrays)


def test_a_journal_goes_on_where_it_was(tmp_path):
    path = tmp_path / "a.log"
    for life in range(3):
        journal = Journal(path)
        assert [r.meta["n"] for r in journal.records] == list(range(2 * life))
        for n in range(2 * life, 2 * life + 2):
            assert journal.append({"n": n}, {"a": np.full(n, n)}) == n + 1 == journal.last_sequence
        assert journal.num_bytes == path.stat().st_size
        journal.close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [r.sequence for r in read(path)] == list(range(1, 7))
    assert read(tmp_path / "none.log") == [] and not (tmp_path / "none.log").exists()


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_torn_tail_is_dropped_at_every_offset(tmp_path, count):
    """And records that are appended afterwards are found."""
    path = tmp_path / "a.log"
    data = b"".join(encode(sample(n + 1)) for n in range(count))
    last = len(data) - len(encode(sample(count)))
    for end in range(last, len(data)):
        path.write_bytes(data[:end])
        journal = Journal(path)
        assert [r.sequence for r in journal.records] == list(range(1, count))
        assert path.stat().st_size == last == journal.num_bytes
        assert journal.append({"step": "new"}) == count
        journal.close()
        again = read(path)
        assert [r.sequence for r in again] == list(range(1, count + 1)) and again[-1].meta == {"step": "new"}


def test_a_tail_whose_end_came_before_its_beginning_is_dropped():
    """The drive writes sectors in any order: zeros, or older bytes, can stand before newer ones."""
    whole, tail = encode(sample(1)), encode(sample(2))
    for begin in range(1, len(tail)):
        found, starts = parse(whole + bytes(begin) + tail[begin:])
        assert len(found) == 1 and starts[-1] == len(whole)


@pytest.mark.parametrize("sequence", [1, 2**32 - 1, 2**40])
def test_a_flipped_bit_is_refused_before_the_end_and_dropped_at_it(sequence):
    """Every byte of every record. Of the last record nobody can tell damage from a write that was cut off."""
    parts = [encode(sample(sequence + n)) for n in range(3)]
    data, last = b"".join(parts), len(parts[0]) + len(parts[1])
    for at in range(len(data)):
        flipped = bytearray(data)
        flipped[at] ^= 1 << (at % 8)
        if at < last:
            with pytest.raises(StoreError, match=r"damaged at offset \d+: a whole record") as caught:
                parse(bytes(flipped), "the.log")
            assert caught.value.filename == "the.log"
        else:
            found, starts = parse(bytes(flipped))
            assert len(found) == 2 and starts[-1] == last


@settings(deadline=None)
@given(st.binary(max_size=300), st.booleans())
def test_noise_is_no_record(noise, magic):
    found, starts = parse(MAGIC + noise if magic else noise)
    assert found == [] and starts == [0]


def test_replace_leaves_the_old_records_or_the_new_ones(tmp_path):
    path = tmp_path / "a.log"

    class Stop(Exception):
        pass

    class Stopping(Disk):
        left = 1 << 30

        def _count(self):
            self.left -= 1
            if self.left < 0:
                raise Stop

        def write(self, fd, data, offset):
            self._count()
            super().write(fd, data[: len(data) // 2], offset)
            self._count()
            super().write(fd, data, offset)

        def truncate(self, fd, num_bytes):
            self._count()
            super().truncate(fd, num_bytes)

        def sync(self, fd):
            self._count()

        def replace(self, source, target):
            self._count()
            super().replace(source, target)

        def sync_directory(self, path):
            self._count()

    outcomes = []
    for left in range(20):
        path.unlink(missing_ok=True)
        disk = Stopping()
        journal = Journal(path, disk=disk)
        for n in range(1, 4):
            journal.append({"n": n})
        disk.left = left
        try:
            journal.replace([Record(3, {"n": "all"}, {})])
            journal.append({"n": 4})
        except Stop:
            outcomes.append([r.meta["n"] for r in read(path)])
            continue
        finally:
            journal.close()
        assert [r.meta["n"] for r in read(path)] == ["all", 4] and read(path)[-1].sequence == 4
        break
    assert [1, 2, 3] in outcomes and ["all"] in outcomes
    assert all(found in ([1, 2, 3], ["all"], ["all", 4]) for found in outcomes), outcomes


def test_replaced_by_nothing_it_goes_on_counting(tmp_path):
    journal = Journal(tmp_path / "a.log")
    journal.append({})
    journal.append({})
    journal.replace([])
    assert journal.num_bytes == 0 and journal.append({"n": 3}) == 3
    journal.close()
    assert [r.sequence for r in read(tmp_path / "a.log")] == [3]


class Failing(Disk):
    def __init__(self, method: str, code: int):
        self.method, self.code, self.armed = method, code, False


for _name in ("write", "truncate", "sync", "replace", "sync_directory"):

    def _method(self, *args, _name=_name):
        if self.armed and self.method == _name:
            raise OSError(self.code, os.strerror(self.code))
        return getattr(Disk, _name)(self, *args)

    setattr(Failing, _name, _method)


@pytest.mark.parametrize("method", ["write", "sync"])
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_an_append_that_failed_is_an_error_for_good(tmp_path, method, code):
    disk = Failing(method, code)
    journal = Journal(tmp_path / "a.log", disk=disk)
    journal.append({"n": 1})
    disk.armed = True
    with pytest.raises(StoreError, match=r"cannot append to the journal: .*; resume from the last committed step") as e:
        journal.append({"n": 2})
    assert e.value.errno == code and e.value.filename == str(tmp_path / "a.log")
    disk.armed = False
    for again in (lambda: journal.append({"n": 2}), lambda: journal.replace([])):
        with pytest.raises(StoreError) as second:
            again()
        assert second.value is e.value, "it may have been written or not: only opening anew can tell"
    journal.close()
    assert [r.meta["n"] for r in read(tmp_path / "a.log")] in ([1], [1, 2])


@pytest.mark.parametrize("method", ["write", "truncate", "sync", "replace", "sync_directory"])
def test_a_replace_that_failed_is_an_error_for_good(tmp_path, method):
    disk = Failing(method, errno.EIO)
    journal = Journal(tmp_path / "a.log", disk=disk)
    journal.append({"n": 1})
    disk.armed = True
    with pytest.raises(StoreError, match="cannot compact the journal"):
        journal.replace([Record(1, {"n": "all"}, {})])
    with pytest.raises(StoreError, match="cannot compact the journal"):
        journal.append({"n": 2})
    journal.close()
    assert [r.meta["n"] for r in read(tmp_path / "a.log")] == (["all"] if method == "sync_directory" else [1])


def test_a_journal_that_cannot_be_made_durable_is_refused(tmp_path):
    Journal(tmp_path / "a.log").close()
    disk = Failing("sync", errno.EIO)
    disk.armed = True
    with pytest.raises(StoreError, match="cannot open the journal"):
        Journal(tmp_path / "a.log", disk=disk)


def test_a_directory_is_made_private_and_its_name_durable(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr("zinf_jax.tier.directories.sync_directory", synced.append)
    make_directory(tmp_path / "a" / "b")
    assert synced == [tmp_path, tmp_path / "a"]
    assert stat.S_IMODE((tmp_path / "a" / "b").stat().st_mode) == 0o700
    make_directory(tmp_path / "a" / "b")
    assert len(synced) == 2


def test_file_systems_that_cannot_sync_a_directory_are_no_error(tmp_path, monkeypatch):
    def fsync(code):
        def fail(fd):
            raise OSError(code, os.strerror(code))

        return fail

    monkeypatch.setattr(os, "fsync", fsync(errno.EINVAL))
    sync_directory(tmp_path)
    monkeypatch.setattr(os, "fsync", fsync(errno.EIO))
    with pytest.raises(OSError, match="Input/output error"):
        sync_directory(tmp_path)
