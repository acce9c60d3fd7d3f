"""Shapes of steps: a stack of layers, and random ones."""

from typing import Any

from hypothesis import strategies as st

from zinf_jax.plan import Hardware, PageShape, StepShape, StreamOptions, UnitShape, make_plan
from zinf_jax.plan.placement import PlacementOptions

GIB, MIB, PAGE = 1 << 30, 1 << 20, 4096
ITEMS = {"weights_itemsize": 2, "record_itemsize": 10, "gradient_itemsize": 2}


def page(name: str, num_elements: int, *, trained: bool = True) -> PageShape:
    """bf16 weights, Adam's record (remainder, m, v), bf16 gradients."""
    record, gradient = (10, 2) if trained else (0, 0)
    return PageShape(name, 2 * num_elements, record * num_elements, gradient * num_elements, num_elements)


def stack(
    num_layers: int = 12,
    *,
    elements: int = 1 << 20,
    value_bytes: int = MIB,
    groups: tuple[int, ...] = (1,),
    tied: bool = False,
) -> StepShape:
    """An embedding, equal layers and a head; value i goes into unit i. With `tied`, the head reads the embedding."""
    pages = [page("embedding", elements), *(page(f"block_{i}", elements) for i in range(num_layers))]
    head = 0 if tied else len(pages)
    if not tied:
        pages.append(page("head", elements))
    reads = [0, *range(1, num_layers + 1), head]
    units = tuple(
        UnitShape(f"unit_{i}", (p,), (p,), (i,), (i + 1,), (), value_bytes, 2 * value_bytes, 10**9, 3 * 10**9)
        for i, p in enumerate(reads)
    )
    return StepShape(
        pages=tuple(pages), units=units, backward=tuple(range(len(units) - 1, -1, -1)),
        value_bytes=(PAGE, *([value_bytes] * len(units))), outer_values=frozenset({0}),
        kept_values=frozenset({len(units)}), group_sizes=groups, turn=True,
    )  # fmt: skip


@st.composite
def steps(draw: st.DrawFn) -> StepShape:
    """Any order of reads, pages of any size, several groups, units that read values of long ago."""
    sizes = draw(st.lists(st.integers(1, 6), min_size=1, max_size=7))
    pages = tuple(page(f"page_{i}", n * PAGE, trained=draw(st.integers(0, 5)) > 0) for i, n in enumerate(sizes))
    num_units, turn = draw(st.integers(1, 9)), draw(st.booleans())
    lowest = draw(st.integers(0, num_units - 1))
    some_pages = st.lists(st.integers(0, len(pages) - 1), min_size=1, max_size=3, unique=True).map(tuple)
    units = []
    for i in range(num_units):
        reads = draw(some_pages)
        inputs = tuple(sorted({i, draw(st.integers(0, i))}))
        trained = tuple(p for p in reads if pages[p].gradient_bytes) if i >= lowest else ()
        saves = lowest <= i < num_units - turn and draw(st.booleans())  # a value of its own for backward
        saved = (num_units + 1 + i,) if saves else ()
        units.append(
            UnitShape(f"unit_{i}", reads, trained, inputs, (i + 1, *saved), saved, draw(st.integers(0, 9)) * 100,
                      draw(st.integers(0, 9)) * 100, 1000, 2000)
        )  # fmt: skip
    return StepShape(
        pages=pages, units=tuple(units), backward=tuple(range(num_units - 1, lowest - 1, -1)),
        value_bytes=tuple(draw(st.integers(1, 3 * PAGE)) for _ in range(2 * num_units + 1)),
        outer_values=frozenset({0}),
        kept_values=frozenset({num_units}), turn=turn,
        group_sizes=tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))),
    )  # fmt: skip


OPTIONS = st.builds(
    StreamOptions,
    lookahead=st.integers(0, 4),
    max_in_flight=st.integers(1, 3),
    chunk_bytes=st.sampled_from([1, 100_000, MIB]),
    num_chunk_frames=st.integers(1, 4),
    update_overlap=st.sampled_from(["none", "next_forward", "auto"]),
    read_ahead=st.booleans(),
)


def hardware(host: int = 64 * GIB, device: int = 64 * GIB, **other: Any) -> Hardware:
    return Hardware(**{"device_memory": device, "host_memory": host, "aliases": True, "cache_pages": False} | other)


def plan(shape: StepShape, machine: Hardware | None = None, options: StreamOptions | None = None, **tiers: Any) -> Any:
    update = tiers.pop("update_bytes", 0)
    return make_plan(shape, machine or hardware(), PlacementOptions(**tiers), options or StreamOptions(),
                     update_bytes=update, **ITEMS)  # fmt: skip
