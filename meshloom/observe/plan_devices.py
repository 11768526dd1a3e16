"""The device map of a plan's page: which roles are on which devices, how each is cut, when it is busy.

Owns: its drawing. Refuses to know: how a layout is made. Always holds: nodes that are alike are drawn once; what is drawn is
bounded, whatever the number of devices, and says what it leaves out.
"""

from collections.abc import Iterator, Sequence

from meshloom.observe.format import plural
from meshloom.observe.markup import Markup, el, join, void
from meshloom.plan.host_names import fold
from meshloom.plan.layout import Layout, RoleLayout
from meshloom.plan.meshes import Mesh
from meshloom.plan.picture import kinds_of_nodes, step_phases
from meshloom.plan.placement import Shared
from meshloom.plan.topology import DeviceSet

_MOST_KINDS, _MOST_DEVICES, _MOST_NAMES = 16, 32, 6
_MOST_ROWS, _MOST_COLUMNS = 8, 16
_BAR = 18
_AXES = {
    "pp": "pipeline stages",
    "replicate": "groups with the same weights",
    "fsdp": "shards of the weights",
    "sp": "parts of each sequence",
    "tp": "parts of each layer",
    "dp": "replicas with samples of their own",
}


def device_map(layout: Layout) -> Markup:
    """The picture, and a table of the roles' meshes and phases."""
    kinds = kinds_of_nodes(layout)
    drawn = [_node(layout, alike) for alike in kinds[:_MOST_KINDS]]
    small = layout.topology.devices_per_node <= 4
    left = len(kinds) - _MOST_KINDS
    more = el("p", f"and {left:,} more kinds of nodes; --json names all devices", class_="note") if left > 0 else None
    return join([_groups(layout), el("div", drawn, class_=f"nodes{' small' if small else ''}"), more, _roles(layout)])


def _groups(layout: Layout) -> Markup | None:
    """All devices by their roles, as one bar with a band for each role; none where all have the same."""
    if len(layout.shared) < 2:
        return None
    total, at = layout.topology.num_devices, 0
    shapes: list[Markup] = []
    for shared in layout.shared:
        count = len(shared.devices)
        shapes += _bands(shared, 100 * at / total, 100 * count / total)
        at += count
    bar = el(
        "svg", shapes, class_="groups-bar", width="100%", height=_BAR, role="img", aria_label="devices by their roles"
    )
    return el("div", bar, el("ul", (_stretch(layout, shared, total) for shared in layout.shared)), class_="groups card")


def _bands(shared: Shared, start: float, width: float) -> Iterator[Markup]:
    """A stretch of devices: its roles on top of each other."""
    roles = [f"role-{role}" for role in shared.roles] or ["no-role"]
    each = _BAR / len(roles)
    for at, css in enumerate(roles):
        x, wide = f"{start:.3f}%", f"{max(width - 0.2, 0.1):.3f}%"
        yield void("rect", class_=css, x=x, y=f"{at * each:.2f}", width=wide, height=f"{each:.2f}")


def _stretch(layout: Layout, shared: Shared, total: int) -> Markup:
    names = join((_role_name(str(role)) for role in shared.roles), " ") if shared.roles else el("em", "no role")
    count = el("strong", plural(len(shared.devices), "device"))
    share = el("span", f"{len(shared.devices) / total:.0%}")
    return el("li", count, share, el("span", names), el("span", _named(layout, shared.devices), class_="entries"))


def _named(layout: Layout, devices: DeviceSet) -> str:
    """Devices in short."""
    entries = layout.topology.entries(devices)
    return ", ".join(entries[:_MOST_NAMES]) + (", …" if len(entries) > _MOST_NAMES else "")


def _role_name(role: str) -> Markup:
    return el("span", role, class_=f"role role-{role}")


def _node(layout: Layout, alike: Sequence[int]) -> Markup:
    topology, first = layout.topology, alike[0]
    span = topology.devices_of(first)
    shown = span[:_MOST_DEVICES]
    cells = [_device(layout, device, device - span.start) for device in shown]
    hidden = len(span) - len(shown)
    more = el("p", f"and {plural(hidden, 'more device')} of each", class_="note") if hidden else None
    return el("div", _heading(layout, alike), el("div", cells, class_="devices"), more, class_="node card")


def _heading(layout: Layout, alike: Sequence[int]) -> Markup:
    topology = layout.topology
    names = fold(topology.node_name(node) for node in alike)
    told = ", ".join(names[:_MOST_NAMES]) + (
        f" and {len(names) - _MOST_NAMES:,} more" if len(names) > _MOST_NAMES else ""
    )
    what = "this node" if topology.plain else told
    note = plural(topology.devices_per_node, "device")
    if len(alike) > 1:
        note = f"{len(alike):,} nodes alike, {note} each; the ranks are those of {topology.node_name(alike[0])}"
    return el("div", el("h3", what), el("span", note, class_="note"), class_="node-head")


def _device(layout: Layout, device: int, index: int) -> Markup:
    chips = [_chip(layout, role, device) for role in layout.roles]
    here = [chip for chip in chips if chip is not None]
    empty = el("span", "no role", class_="idle") if not here else None
    return el("div", el("span", index, class_="index"), here, empty, class_="device" if here else "device empty")


def _chip(layout: Layout, role: RoleLayout, device: int) -> Markup | None:
    """One role on one device: its rank, and its place on each axis; joined to the next device of its innermost group."""
    rank = role.devices.rank_of(device)
    if rank is None:
        return None
    places = list(zip(role.mesh.dims, role.mesh.coordinates(rank), strict=True))
    text = " · ".join(f"{axis} {place}" for axis, place in places) or "whole"
    after = role.devices.rank_of(device + 1)
    last = (device + 1) % layout.topology.devices_per_node == 0
    joined = not last and after is not None and places and role.mesh.dims[-1] in ("tp", "sp")
    joined = joined and role.mesh.coordinates(after or 0)[:-1] == role.mesh.coordinates(rank)[:-1]
    name, shown = el("b", str(role.role)), join((el("i", f"{axis} {place}") for axis, place in places), " ")
    css = f"chip role-{role.role}{' joined' if joined else ''}"
    return el(
        "span",
        name,
        el("span", shown if places else text),
        class_=css,
        title=f"{role.role}, rank {rank} of {len(role.devices):,}: {text}",
    )


def _roles(layout: Layout) -> Markup:
    head = el(
        "tr",
        *(el("th", text) for text in ("role", "devices", "mesh", "replicas")),
        map(_phase_head, step_phases(layout)),
    )
    rows = (_role_row(layout, role) for role in layout.roles)
    table = el("table", el("thead", head), el("tbody", rows), class_="ledger roles")
    return join([el("div", table, class_="table-frame"), _ranks(layout)])


def _phase_head(phase: str) -> Markup:
    return el("th", phase, class_="phase")


def _role_row(layout: Layout, role: RoleLayout) -> Markup:
    mesh = [el("div", _mesh(role.mesh), class_="mesh")]
    if role.sequence_mesh is not None and role.replicas > 1:
        mesh.append(el("div", "samples over ", _mesh(role.sequence_mesh), class_="mesh soft"))
    busy = (_phase_cell(phase, phase in role.phases) for phase in step_phases(layout))
    count = join(
        [el("span", plural(len(role.devices), "device")), el("div", _named(layout, role.devices), class_="entries")]
    )
    return el(
        "tr",
        el("td", _role_name(str(role.role))),
        el("td", count),
        el("td", mesh),
        el("td", f"{role.replicas:,}"),
        busy,
    )


def _phase_cell(phase: str, busy: bool) -> Markup:
    mark = el("span", "busy", class_=f"busy phase-{phase.replace('-', '_')}") if busy else None
    return el("td", mark, class_="phase")


def _mesh(mesh: Mesh) -> Markup:
    if not mesh.axes:
        return Markup("one device")
    return join(
        (el("span", f"{axis} ", el("b", f"{size:,}"), class_="axis", title=_AXES[axis]) for axis, size in mesh.axes),
        " × ",
    )


def _ranks(layout: Layout) -> Markup | None:
    """Ranks of the meshes that have several axes, as matrices: the innermost axis across."""
    tables = [_matrix(str(role.role), mesh) for role in layout.roles for mesh in _meshes(role) if len(mesh.axes) > 1]
    if not tables:
        return None
    summary = el("summary", "Ranks of the meshes", el("span", "the innermost axis across"))
    return el("details", summary, el("div", tables, class_="matrices"), class_="fold")


def _meshes(role: RoleLayout) -> Iterator[Mesh]:
    yield role.mesh
    if role.sequence_mesh is not None and role.replicas > 1:
        yield role.sequence_mesh


def _matrix(role: str, mesh: Mesh) -> Markup:
    across = mesh.shape[-1]
    outer = len(mesh.devices) // across
    columns, rows = range(min(across, _MOST_COLUMNS)), range(min(outer, _MOST_ROWS))
    wide, long = across > len(columns), outer > len(rows)
    dots = el("td", "…") if wide else None
    head = el("tr", el("th", " · ".join(mesh.dims[:-1])), (el("th", f"{mesh.dims[-1]} {at}") for at in columns), dots)
    body = [
        el("tr", el("th", _place(mesh, row * across)), (el("td", f"{row * across + at:,}") for at in columns), dots)
        for row in rows
    ]
    if long:
        body.append(el("tr", el("th", "…"), el("td", f"{outer - len(rows):,} more rows", colspan=len(columns) + wide)))
    caption = el("figcaption", _role_name(role), " ", _mesh(mesh))
    return el("figure", caption, el("table", el("thead", head), el("tbody", body), class_="matrix"))


def _place(mesh: Mesh, rank: int) -> str:
    """Position on all axes but the innermost."""
    return " · ".join(f"{axis} {at}" for axis, at in zip(mesh.dims[:-1], mesh.coordinates(rank)[:-1], strict=True))
