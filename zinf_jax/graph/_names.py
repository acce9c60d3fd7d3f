"""Names of units, for people."""

from collections.abc import Sequence

from zinf_jax.leaves import Leaf, Piece


def unit_name(leaves: Sequence[Leaf], pieces: Sequence[Piece], index: int) -> str:
    """What the leaves that a unit reads have in common: `block_3`, `layers[2]`, else the first one's module."""
    if not pieces:
        return f"unit_{index}"
    paths = [leaves[piece.leaf].name.split("/") for piece in pieces]
    common = list(paths[0])
    for path in paths[1:]:
        shared = min(len(common), len(path))
        while common[:shared] != path[:shared]:
            shared -= 1
        common = common[:shared]
    if common[:1] == ["params"] and len(paths[0]) > 1:
        common = common[1:]
        paths = [path[1:] if path[0] == "params" else path for path in paths]
    name = "/".join(common) if common else _several(paths)
    stacked = {piece.index for piece in pieces if leaves[piece.leaf].stack_ndim}
    if stacked:
        low, high = min(stacked), max(stacked)
        name += f"[{low}]" if low == high else f"[{low}:{high + 1}]"
    return name


def _several(paths: Sequence[Sequence[str]]) -> str:
    heads = list(dict.fromkeys(path[0] for path in paths))
    return heads[0] if len(heads) == 1 else f"{heads[0]}..{heads[-1]}"
