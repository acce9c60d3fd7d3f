"""What a run costs a drive: bytes written over the whole run, and the share of the drive's rated endurance that is.

Counted is what the I/O engine writes: initialising, steps, restoring. The file system's own writes are not, nor what
the drive adds inside (write amplification), nor checkpoints, which lie in the run's directory.
"""

import json
import os
import pathlib
import re
import shutil
import subprocess

from zinf_jax.train.metrics import read_metrics

RUN_TOTAL = "run_nvme_bytes_written"  # of a step's record in the metrics
_TERABYTE = 10**12  # endurance is rated in decimal terabytes
_NVME = re.compile(r"(nvme\d+)(n\d+)?(p\d+)?")
_TOOL_TIMEOUT_S = 5


def written_before(run_dir: pathlib.Path) -> int:
    """Bytes that earlier processes of a run wrote, by its metrics; steps that were lost in between count, they wore
    the drive too. To be asked before the metrics are cut back to the step that the run goes on from."""
    totals = [record.get(RUN_TOTAL) for record in read_metrics(run_dir, "step")]
    return max((int(total) for total in totals if total is not None), default=0)


def sentence(run_bytes: int, rate: float, rated_tb: float | None, percent_used: int | None) -> str | None:
    """What the report says of the drive; None where nothing is known.

    Args:
      run_bytes: Written by the whole run.
      rate: Bytes per second of training that this process wrote.
      rated_tb: Terabytes written that the drive is rated for (`nvme_tbw`).
      percent_used: The drive's own count of its endurance used, if it tells.
    """
    wrote = f"this run wrote {_terabytes(run_bytes)}"
    if rated_tb is not None:
        share = 100 * run_bytes / (rated_tb * _TERABYTE)
        text = f"{wrote}, {share:.2g}% of the {rated_tb:g} TB that the drive is rated for"
        days = rated_tb * _TERABYTE / rate / 86400 if rate > 0 else None
        return text if days is None else f"{text}; at this rate that lasts {days:,.3g} days"
    if percent_used is not None:
        return f"{wrote}; the drive says that {percent_used}% of its endurance is used"
    return None


def _terabytes(num_bytes: int) -> str:
    return f"{num_bytes / _TERABYTE:.2f} TB" if num_bytes >= _TERABYTE / 10 else f"{num_bytes / 10**9:.2f} GB"


def percent_used(directory: pathlib.Path) -> int | None:
    """The endurance used of the NVMe drive that a directory lies on, in percent of its rating, as it tells itself.

    Returns:
      None where the drive is none, or does not tell without root.
    """
    controller = _controller(directory)
    if controller is None:
        return None
    for path in (
        f"/sys/class/nvme/{controller}/percentage_used",
        f"/sys/class/nvme/{controller}/device/percentage_used",
    ):
        try:
            return int(pathlib.Path(path).read_text())
        except (OSError, ValueError):
            continue
    device = f"/dev/{controller}"
    if shutil.which("nvme") is None or not os.access(device, os.R_OK):
        return None
    try:
        done = subprocess.run(
            ["nvme", "smart-log", "--output-format=json", device],
            capture_output=True, text=True, timeout=_TOOL_TIMEOUT_S, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return parse_smart_log(done.stdout)


def parse_smart_log(text: str) -> int | None:
    """The percentage in `nvme smart-log`'s JSON, whose key was renamed between versions."""
    try:
        log = json.loads(text)
        for key in ("percent_used", "percentage_used"):
            if key in log:
                return int(log[key])
    except (ValueError, TypeError):
        pass
    return None


def _controller(directory: pathlib.Path) -> str | None:
    """`nvme0` of a directory on /dev/nvme0n1p2."""
    try:
        number = os.stat(directory).st_dev
        name = pathlib.Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}").resolve(strict=True).name
    except OSError:
        return None
    match = _NVME.fullmatch(name)
    return match[1] if match else None
