"""Batch sizes: any two give the third; what does not fit together fails with the numbers."""

import itertools

import pytest

from zinf_jax.config import BatchSizes, load
from zinf_jax.errors import ConfigError

KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


@pytest.mark.parametrize(
    "given",
    [set(c) for n in range(4) for c in itertools.combinations(KEYS, n)],
    ids=lambda keys: "+".join(sorted(keys)),
)
@pytest.mark.parametrize("world", [1, 2, 4])
def test_the_rest_follows(given: set[str], world: int) -> None:
    sizes = dict(zip(KEYS, (24 * world, 3, 8), strict=True))
    got = load({key: sizes[key] for key in given}).batch_sizes(world)
    if given == {"train_batch_size"}:
        expected = BatchSizes(24 * world, 24, 1, world)
    elif given == {"train_micro_batch_size_per_gpu"}:
        expected = BatchSizes(3 * world, 3, 1, world)
    elif given <= {"gradient_accumulation_steps"}:
        expected = BatchSizes(None, None, 8 if given else 1, world)
    else:
        expected = BatchSizes(24 * world, 3, 8, world)
    assert got == expected


def test_what_does_not_divide_fails_at_load() -> None:
    with pytest.raises(ConfigError, match=r"train_batch_size 10 is not a multiple of .* 4 x .* 2 = 8"):
        load(dict(zip(KEYS, (10, 4, 2), strict=True)))


@pytest.mark.parametrize("given", [{"train_batch_size": 8}, dict(zip(KEYS, (8, 4, 2), strict=True))])
def test_what_does_not_fit_the_devices_fails_with_the_numbers(given: dict[str, int]) -> None:
    config = load(given)
    assert config.batch_sizes(1).train == 8
    with pytest.raises(ConfigError, match=r"train_batch_size is 8, but .* 3 data-parallel devices = (3|24)"):
        config.batch_sizes(3)
    try:
        config.batch_sizes(3)
    except ConfigError as error:  # the advice works
        advice = int(str(error).partition("set train_batch_size to ")[2].partition(",")[0])
        assert load({**given, "train_batch_size": advice}).batch_sizes(3).train == advice
