"""A picture of the devices for a terminal: which role is where, how it is cut, when it is busy.

Owns: its layout. Always holds: a node of eight devices fits 80 columns; nodes that are alike are drawn once; the work does not
grow with the number of devices, only with that of nodes.
"""

from collections.abc import Iterator, Sequence

from meshloom.plan.host_names import fold
from meshloom.plan.layout import Layout, RoleLayout

_LABEL, _CELL, _ACROSS, _PHASE = 12, 8, 8, 10
_MOST_KINDS, _MOST_NAMES, _MOST_DEVICES = 12, 4, 64
_STEP_PHASES = ("generate", "score", "log-prob", "values", "update", "sync")
_ASKED = ("log-prob", "values")


def step_phases(layout: Layout) -> tuple[str, ...]:
    """Phases of a step in their order; log-probs and values are asked for only where a role computes them."""
    busy = {phase for role in layout.roles for phase in role.phases}
    return tuple(phase for phase in _STEP_PHASES if phase in busy or phase not in _ASKED)


Signature = tuple[tuple[tuple[int, int, int], ...], ...]
"""Of one node, for each role: first index, end index and place in the innermost group of each stretch."""


def draw(layout: Layout) -> str:
    """The picture as plain text.

    Each kind of node is drawn with the devices as columns and a line for each role. A cell is a device's coordinates in the
    role's mesh, in the order of its axes; a line joins devices of the same innermost group.
    """
    topology = layout.topology
    nodes = "1 node" if topology.num_nodes == 1 else f"{topology.num_nodes:,} nodes"
    each = " each" if topology.num_nodes > 1 else ""
    lines = [f"devices: {nodes}, {topology.devices_per_node} devices{each}", ""]
    kinds = kinds_of_nodes(layout)
    for alike in kinds[:_MOST_KINDS]:
        lines += [*_node(layout, alike), ""]
    if len(kinds) > _MOST_KINDS:
        lines += [f"and {len(kinds) - _MOST_KINDS:,} more kinds of nodes; --json names all devices", ""]
    lines += [*_meshes(layout), "", *_phases(layout)]
    return "\n".join(line.rstrip() for line in lines)


def kinds_of_nodes(layout: Layout) -> list[list[int]]:
    """Nodes in groups that are alike, in the order of their first."""
    found: dict[Signature, list[int]] = {}
    for node in range(layout.topology.num_nodes):
        found.setdefault(_signature(layout, node), []).append(node)
    return list(found.values())


def _signature(layout: Layout, node: int) -> Signature:
    span = layout.topology.devices_of(node)
    parts: list[tuple[tuple[int, int, int], ...]] = []
    for role in layout.roles:
        inner = role.mesh.shape[-1] if role.mesh.shape else 1
        stretches = role.devices.within(span)
        parts.append(
            tuple(
                (part.start - span.start, part.stop - span.start, (role.devices.rank_of(part.start) or 0) % inner)
                for part in stretches
            )
            if inner <= len(span)
            else tuple((part.start - span.start, part.stop - span.start, 0) for part in stretches)
        )
    return tuple(parts)


def _node(layout: Layout, alike: Sequence[int]) -> Iterator[str]:
    """One kind of node: a heading, and rows of at most eight devices."""
    topology, first = layout.topology, alike[0]
    if not topology.plain:
        names = fold(topology.node_name(node) for node in alike)
        more = f" and {len(names) - _MOST_NAMES:,} more" if len(names) > _MOST_NAMES else ""
        told = (
            f": {len(alike):,} nodes alike; the ranks are those of {topology.node_name(first)}"
            if len(alike) > 1
            else ""
        )
        yield f"{', '.join(names[:_MOST_NAMES])}{more}{told}"
    span = topology.devices_of(first)
    shown = min(len(span), _MOST_DEVICES)
    for start in range(0, shown, _ACROSS):
        indices = range(start, min(start + _ACROSS, shown))
        yield f"{'device':<{_LABEL}}" + "".join(f"{index:<{_CELL}}" for index in indices)
        for role in layout.roles:
            if role.devices.within(span):
                yield f"  {role.role:<{_LABEL - 2}}" + _row(role, span[indices.start : indices.stop])
    if shown < len(span):
        yield f"and {len(span) - shown:,} more devices of the node; --json names all"


def _row(role: RoleLayout, devices: range) -> str:
    """Cells of one role, joined where neighbours are in the same innermost group."""
    cells: list[str] = []
    ranks = [role.devices.rank_of(device) for device in devices]
    for rank, after in zip(ranks, [*ranks[1:], None], strict=True):
        if rank is None:
            cells.append(f"{'·':<{_CELL}}")
            continue
        text = _coordinates(role, rank)
        joined = after is not None and _group(role, rank) == _group(role, after)
        cells.append(f"{text:─<{_CELL}}" if joined else f"{text:<{_CELL}}")
    return "".join(cells)


def _coordinates(role: RoleLayout, rank: int) -> str:
    places = ".".join(map(str, role.mesh.coordinates(rank))) or "0"
    return places if len(places) < _CELL else f"#{rank}"


def _group(role: RoleLayout, rank: int) -> tuple[int, ...]:
    """The innermost group that a rank is in; single devices are groups of their own."""
    return role.mesh.coordinates(rank)[:-1] if role.mesh.shape else (rank,)


def _meshes(layout: Layout) -> Iterator[str]:
    for role in layout.roles:
        count = len(role.devices)
        mesh = "" if count == 1 else f" as {role.mesh}"
        yield f"{role.role:<{_LABEL}}{count:,} device{'' if count == 1 else 's'}{mesh}"
        if role.sequence_mesh is not None and role.replicas > 1:
            yield f"{'':<{_LABEL}}samples over {role.sequence_mesh}"
    if layout.idle:
        yield f"{'no role':<{_LABEL}}{len(layout.idle):,} devices"


def _phases(layout: Layout) -> Iterator[str]:
    phases = step_phases(layout)
    yield f"{'phase':<{_LABEL}}" + "".join(f"{phase:<{_PHASE}}" for phase in phases)
    for role in layout.roles:
        busy = role.phases
        yield f"{role.role:<{_LABEL}}" + "".join(f"{'■' if phase in busy else '':<{_PHASE}}" for phase in phases)
