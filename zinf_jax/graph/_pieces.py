"""Which leaves are stacks, and every use of a leaf in terms of its pieces."""

from collections.abc import Sequence

from zinf_jax.graph import _jaxpr
from zinf_jax.graph._jaxpr import Atom, Eqn, Var
from zinf_jax.graph._slices import PARAM, Slot, Tape
from zinf_jax.graph._tile import MAX_SLICES, split_ranges


def used_depths(tape: Tape) -> dict[int, int]:
    """Over how many leading dims the equations of a tape take each leaf apart; leaves taken whole are not in it."""
    depths: dict[int, int] = {}
    for eqn in tape.eqns:
        for atom in eqn.invars:
            if not _jaxpr.is_literal(atom) and atom in tape.pieces:
                leaf, prefix = tape.pieces[atom]
                if prefix:
                    depths[leaf] = max(len(prefix), depths.get(leaf, 0))
    return depths


def indexed_leaves(tape: Tape) -> dict[int, int]:
    """Leaves that a Python loop takes apart, each index of the leading dim by itself: leaf -> 1."""
    taken: dict[int, set[int]] = {}
    for eqn in list(tape.eqns):
        if eqn.primitive.name not in ("slice", "split") or tape.kind(eqn.invars[0]) != PARAM:
            continue
        ranges, sources = split_ranges(eqn), tape.sources(eqn.invars[0])
        if ranges is None or len(sources) != 1 or any(stop - start != 1 for start, stop in ranges):
            continue
        leaf, prefix = next(iter(sources))
        element = tape.element(eqn.invars[0], ranges[0][0])
        if not prefix and element is not None and tape.sources(element) - sources:
            taken.setdefault(leaf, set()).update(start for start, _ in ranges)
    depths = {}
    for leaf, found in taken.items():
        length = tape.slots[leaf, ()].aval.shape[0]
        if len(found) == length and 2 <= length <= MAX_SLICES:
            depths[leaf] = 1
    return depths


def assemble(tape: Tape, depths: dict[int, int]) -> tuple[list[Eqn], dict[Var, Atom]]:
    """Makes every slot that is used but is not a piece: put together from pieces, or indexed out of one.

    Returns:
      The equations that do so, and what stands for each such slot's variable.
    """
    used = {atom for eqn in tape.eqns for atom in eqn.invars if not _jaxpr.is_literal(atom) and atom in tape.pieces}
    old, tape.eqns = tape.eqns, []
    env: dict[Var, Atom] = {}
    for var in sorted(used, key=lambda v: tape.pieces[v]):
        leaf, prefix = tape.pieces[var]
        if len(prefix) != depths.get(leaf, 0):
            env[var] = _made(tape, (leaf, prefix), depths.get(leaf, 0))
    made, tape.eqns = tape.eqns, old
    return made, env


def _made(tape: Tape, slot: Slot, depth: int) -> Atom:
    leaf, prefix = slot
    if len(prefix) == depth:
        return tape.slots[slot]
    if len(prefix) > depth:
        return tape.index(_made(tape, (leaf, prefix[:-1]), depth), prefix[-1])
    var = tape.slots[slot]
    elements: list[Atom] = [tape.element(var, i) for i in range(var.aval.shape[0])]
    return tape.stack([_made(tape, tape.pieces[element], depth) for element in elements])


def whole_uses(tape: Tape, depths: dict[int, int]) -> dict[int, Eqn]:
    """Stacked leaves that some equation takes whole, and the first such equation."""
    found: dict[int, Eqn] = {}
    for eqn in tape.eqns:
        for atom in eqn.invars:
            if not _jaxpr.is_literal(atom) and atom in tape.pieces:
                leaf, prefix = tape.pieces[atom]
                if len(prefix) < depths.get(leaf, 0):
                    found.setdefault(leaf, eqn)
    return found


def in_order(tape: Tape, eqns: Sequence[Eqn]) -> list[Eqn]:
    """The equations so that each follows those that it needs; otherwise as they stand.

    A needed equation that is not among them is taken from the tape: an element that was dead when it was made, and is
    used now.
    """
    made_by = {var: eqn for eqn in eqns for var in eqn.outvars}
    done: set[int] = set()
    ordered: list[Eqn] = []
    for root in eqns:
        stack = [(root, iter(root.invars))]
        if id(root) in done:
            continue
        while stack:
            eqn, atoms = stack[-1]
            for atom in atoms:
                maker = None if _jaxpr.is_literal(atom) else made_by.get(atom) or tape.maker(atom)
                if maker is not None and id(maker) not in done:
                    stack.append((maker, iter(maker.invars)))
                    break
            else:
                stack.pop()
                if id(eqn) not in done:
                    done.add(id(eqn))
                    ordered.append(eqn)
    return ordered
