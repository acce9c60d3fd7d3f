"""Directories for pages are checked before anything else happens (FS08)."""

import os
from pathlib import Path

import pytest

from zinf_jax.config import Config, check_paths, load, uses_nvme
from zinf_jax.errors import ConfigError


def nvme(*paths: object) -> Config:
    return load({"placement": {"weights": "nvme"}, "nvme_path": [str(path) for path in paths]})


def test_a_directory_is_made_and_probed(tmp_path: Path) -> None:
    assert check_paths(nvme(tmp_path, tmp_path / "new")) == (tmp_path, tmp_path / "new")
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
    assert list(tmp_path.iterdir()) == [tmp_path / "new"]  # the probe left nothing


def test_the_run_directory_serves_without_nvme_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = load({"placement": {"optimizer": "nvme"}})
    assert check_paths(config, "runs/a") == (tmp_path / "runs" / "a",)
    assert check_paths(config) == ()  # the trainer makes a temporary one


def test_paths_are_not_touched_when_nothing_is_on_nvme() -> None:
    placement = dict.fromkeys(("weights", "optimizer", "gradients", "residuals"), "host")
    config = load({"placement": placement, "nvme_path": "/no/such/place"})
    assert not uses_nvme(config)
    assert check_paths(config) == ()


@pytest.mark.parametrize(
    ("kind", "message"),
    [("missing parent", "neither it nor"), ("file", "is a file"), ("below a file", "neither it nor"),
     ("symlink", "is a symlink|a symlink could"), ("relative", "relative path"),
     ("read-only", "not writable|cannot be made")],
)  # fmt: skip
def test_unusable_paths_are_refused(tmp_path: Path, kind: str, message: str) -> None:
    """FS08."""
    file = tmp_path / "file"
    file.write_text("")
    (tmp_path / "link").symlink_to(tmp_path)
    path = {
        "missing parent": tmp_path / "a" / "b",
        "file": file,
        "below a file": file / "x",
        "symlink": tmp_path / "link",
        "relative": Path("some/where"),
        "read-only": Path("/proc/zinf"),  # for root, too
    }[kind]
    with pytest.raises(ConfigError, match=message) as caught:
        check_paths(nvme(path))
    assert str(path) in str(caught.value)
    assert "nvme_path" in str(caught.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_without_write_permission_is_refused(tmp_path: Path) -> None:
    (tmp_path / "ro").mkdir(mode=0o500)
    with pytest.raises(ConfigError, match="not writable"):
        check_paths(nvme(tmp_path / "ro"))


@pytest.mark.parametrize("path", ["", "  ", [], ["/a", ""], ["/a", "/a"]])
def test_empty_and_double_paths_are_refused_at_load(path: object) -> None:
    with pytest.raises(ConfigError, match="nvme_path"):
        load({"nvme_path": path})


def test_a_disk_that_is_too_full_is_refused_with_the_numbers(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"needs 1\.00 EiB|needs 1024\.00 PiB"):
        check_paths(nvme(tmp_path), needed_bytes=1 << 60)


def test_every_combination_of_tiers_loads() -> None:
    """NV13: none needs a special way to build the model."""
    for weights in ("device", "host", "nvme", "auto"):
        for gradients in ("device", "host", "nvme", "auto"):
            for optimizer in ("device", "host", "nvme", "auto"):
                placement = {"weights": weights, "gradients": gradients, "optimizer": optimizer}
                config = load({"placement": placement})
                assert [getattr(config.placement, key) or "auto" for key in placement] == list(placement.values())
