"""Directories for pages are checked before anything else happens (FS08)."""

import os
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import zinf_jax as zinf
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


def test_without_anything_on_nvme_there_is_nowhere_to_put_pages(tmp_path: Path) -> None:
    placement = dict.fromkeys(("weights", "optimizer", "gradients", "residuals"), "host")
    config = load({"placement": placement})
    assert not uses_nvme(config)
    assert check_paths(config) == check_paths(config, tmp_path / "run") == ()
    with pytest.raises(ConfigError, match="neither it nor"):  # where the pages of a closed run would rest
        check_paths(load({"placement": placement, "nvme_path": "/no/such/place"}))


def bad_run_dir(tmp_path: Path, kind: str) -> Path | str:
    file = tmp_path / "file"
    file.write_text("")
    (tmp_path / "link").symlink_to(tmp_path)
    return {"file": file, "below a file": file / "x" / "y", "symlink": tmp_path / "link", "empty": "", "blank": "  ",
            "read-only": Path("/proc/zinf/run")}[kind]  # fmt: skip


@pytest.mark.parametrize("tier", ["host", "nvme"])
@pytest.mark.parametrize(
    ("kind", "message"),
    [("file", "is a file"), ("below a file", "cannot be made"), ("symlink", "a symlink could"),
     ("empty", "is empty"), ("blank", "is empty"), ("read-only", "cannot be made")],
)  # fmt: skip
def test_unusable_run_directories_are_refused(tmp_path: Path, kind: str, message: str, tier: str) -> None:
    """FS08. Wherever the state is: the manifest and the pages of a closed run go there."""
    placement = dict.fromkeys(("weights", "optimizer", "gradients", "residuals"), tier)
    path = bad_run_dir(tmp_path, kind)
    for config in (load({"placement": placement}), load({"placement": placement, "nvme_path": str(tmp_path)})):
        with pytest.raises(ConfigError, match=message) as caught:
            check_paths(config, path)
        assert "run_dir" in str(caught.value)
        assert str(path).strip() in str(caught.value)


def test_a_run_directory_may_be_relative_and_is_made_with_its_parents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert check_paths(nvme(tmp_path), "runs/of/today") == (tmp_path,)
    assert (tmp_path / "runs/of/today").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("key", ["run_dir", "nvme_path"])
@pytest.mark.parametrize("kind", ["file", "symlink", "read-only", "missing parent", "relative"])
def test_a_trainer_refuses_bad_paths_before_it_makes_anything(
    tmp_path: Path, kind: str, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FS08: in the first second, not when the model is loaded."""
    monkeypatch.chdir(tmp_path)
    made: list[str] = []

    def init(seed: jax.Array) -> dict[str, jax.Array]:
        made.append("traced")
        return {"w": jax.random.normal(seed, (4,))}

    paths = {"missing parent": tmp_path / "a" / "b", "relative": Path("some/where")}
    path = paths[kind] if kind in paths else bad_run_dir(tmp_path, kind)
    params = zinf.lazy(init, jax.random.key(0))
    made.clear()
    config = {"placement": {"weights": "nvme"}} | ({"nvme_path": str(path)} if key == "nvme_path" else {})
    given = {"run_dir": path} if key == "run_dir" else {}

    def train() -> None:
        loss = lambda params, batch: jnp.sum(params["w"] * batch)  # noqa: E731
        zinf.Trainer(loss, params, zinf.optim.sgd(0.1), config, **given).close()

    if kind in paths and key == "run_dir":
        train()  # a run's own directory is named by hand
        assert path.is_dir()
    else:
        with pytest.raises(ConfigError, match=key):
            train()
    assert not made


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
