"""What a run asks the planner for, from most to least memory."""

from zinf_jax.plan import StreamOptions
from zinf_jax.stream.engine import EngineOptions

LEAST = {"num_chunk_frames": 2, "lookahead": 1, "chunk_bytes": 4 << 20}


def values(stream):
    return {name: getattr(stream, name) for name in LEAST}


def test_the_last_resort_is_the_least_of_everything_without_overlap():
    lowered = frozenset({*LEAST, "update_overlap"})
    streams = list(EngineOptions(stream=StreamOptions(update_overlap="auto"), lowered=lowered).streams())
    assert [s.update_overlap for s in streams] == ["auto", *["next_forward"] * 3, "none", "none"]
    assert values(streams[-1]) == LEAST and values(streams[-2]) == values(StreamOptions())


def test_what_somebody_chose_stays():
    lowered = frozenset({"num_chunk_frames", "update_overlap"})
    stream = StreamOptions(update_overlap="auto", lookahead=3, num_chunk_frames=1)
    for found in EngineOptions(stream=stream, lowered=lowered).streams():
        assert (found.lookahead, found.chunk_bytes, found.num_chunk_frames) == (3, 16 << 20, 1)
    assert list(EngineOptions(stream=stream).streams()) == [stream]
