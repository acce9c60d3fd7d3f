"""The benchmark runs, small, and leaves nothing but its figures."""

import json
import os
import subprocess
import sys

import pytest

from tests.aio_ffi.conftest import ROOT


@pytest.mark.parametrize("fio", [True, False])
def test_bench_io(disk, fio, tmp_path):
    """Also without fio on the path: then it says so, and prints ours."""
    environment = {**os.environ} if fio else {**os.environ, "PATH": str(tmp_path)}
    folder = disk / f"bench_{fio}"
    folder.mkdir()
    report = tmp_path / "report.json"
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "bench_io.py"), "--directory", str(folder), "--sizes", "16M",
         "--repeats", "2", "--json", str(report)],
        capture_output=True, text=True, env=environment, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    records = json.loads(report.read_text())["records"]
    assert [record["direction"] for record in records] == ["read", "write", "mixed"]
    assert all(record["ours_gbps"] > 0 for record in records)
    if not fio:
        assert "fio is not installed" in done.stdout
        assert all(record["ratio"] is None for record in records)
    assert not list(folder.iterdir())
