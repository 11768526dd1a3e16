"""The memory of a plan's page: what each group of devices holds in each phase, as stacked bars with peak and margin.

Owns: their drawing, and which kind of bytes a name is. Refuses to know: how bytes are counted. Always holds: all bars have one
scale; a bar is as long as the phase's sum in the ledger, less what a cache lacks that takes what is left of a GPU.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from meshloom.observe.format import bytes_text, plural
from meshloom.observe.markup import Markup, el, join, void
from meshloom.plan.build import Plan
from meshloom.plan.forecast import Group
from meshloom.plan.layout import Layout
from meshloom.plan.ledger import DERIVED, LedgerLine
from meshloom.plan.memory import GPU, MACHINE
from meshloom.plan.memory_lines import GENERATING, UPDATING
from meshloom.plan.recompute import needed_bytes
from meshloom.plan.residency import Holding, Phase, Residency

_KINDS = {
    "weights": "weights",
    "engine": "engine's copy of the weights",
    "optimizer": "optimizer: moments and float32 masters",
    "gradients": "gradients",
    "gathered": "gathered layers and gradients",
    "activations": "activations",
    "logits": "logits",
    "cache": "key-value cache",
    "buffers": "buffers: communication, weights in movement",
}
"""Kinds of bytes, in the order of the bars; what they are called."""
_NAMES = (
    ("in movement", "buffers"),
    ("communication", "buffers"),
    ("engine's weights", "engine"),
    ("vLLM's weights", "engine"),
    ("masters", "optimizer"),
    ("moments", "optimizer"),
    ("gathered", "gathered"),
    ("gradients", "gradients"),
    ("activations", "activations"),
    ("logits", "logits"),
    ("cache", "cache"),
)
_MOST_NAMES, _CACHE, _MANY = 6, "key-value cache", 10**15


@dataclass(frozen=True, kw_only=True)
class Bytes:
    """A piece of a bar."""

    name: str
    kind: str
    count: int


@dataclass(frozen=True, kw_only=True)
class Bar:
    """What a device holds in a phase.

    Args:
        phase: which.
        pieces: that add up to it.
        needed: bytes with libraries and fragmentation on top.
    """

    phase: str
    pieces: tuple[Bytes, ...]
    needed: int

    @property
    def held(self) -> int:
        return sum(piece.count for piece in self.pieces)


@dataclass(frozen=True, kw_only=True)
class Bars:
    """A group of devices.

    Args:
        title: which devices.
        roles: on them.
        bars: of the phases.
        has: bytes of a device; none if that is not known.
        elsewhere: what is kept in other places, in words.
    """

    title: str
    roles: tuple[str, ...]
    bars: tuple[Bar, ...]
    has: int | None
    elsewhere: tuple[str, ...] = ()


def memory_bars(plan: Plan) -> Markup | None:
    """The bars of a plan; none if it has no memory ledger."""
    groups = tuple(_one_device(plan.lines)) or tuple(_groups(plan))
    if not groups:
        return None
    scale = max(max(group.has or 0, *(bar.needed for bar in group.bars)) for group in groups)
    kinds = {piece.kind for group in groups for bar in group.bars for piece in bar.pieces}
    legend = (el("span", el("i", class_=f"swatch bytes-{kind}"), _KINDS[kind]) for kind in _KINDS if kind in kinds)
    on_top = el("span", el("i", class_="swatch on-top"), "libraries and fragmentation, an allowance")
    allowance = on_top if any(bar.needed > bar.held for group in groups for bar in group.bars) else None
    return join([*(_group(group, scale) for group in groups), el("p", legend, allowance, class_="legend")])


def kind_of_bytes(name: str) -> str:
    """Which kind of bytes a line of the ledger is."""
    return next((kind for part, kind in _NAMES if part in name), "weights")


def _groups(plan: Plan) -> Iterator[Bars]:
    """Of a plan over devices."""
    if plan.outlook is None or plan.layout is None:
        return
    for group in plan.outlook.groups:
        bars = tuple(_bar(group, phase) for phase in group.ledger.phases)
        elsewhere = tuple(
            f"{bytes_text(count)} on the {place}"
            for place in (Residency.HOST, Residency.DISK)
            if (count := group.ledger.elsewhere(place))
        )
        yield Bars(
            title=_title(plan.layout, group),
            roles=tuple(map(str, group.roles)),
            bars=bars,
            has=group.ledger.memory_bytes,
            elsewhere=elsewhere,
        )


def _title(layout: Layout, group: Group) -> str:
    if layout.topology.num_devices == 1:
        return "the device"
    entries = layout.topology.entries(group.devices)
    named = ", ".join(entries[:_MOST_NAMES]) + (", …" if len(entries) > _MOST_NAMES else "")
    return f"each of {plural(len(group.devices), 'device')}: {named}" if len(group.devices) > 1 else named


def _bar(group: Group, phase: Phase) -> Bar:
    ledger = group.ledger
    here = [holding for holding in ledger.holdings if phase in holding.phases and holding.bytes]
    fleeting: dict[str, int] = {}
    for holding in here:
        if holding.fleeting:
            fleeting[holding.role] = fleeting.get(holding.role, 0) + holding.bytes
    largest = max(fleeting, key=lambda role: fleeting[role], default="")
    counted = (holding for holding in here if not holding.fleeting or holding.role == largest)
    return Bar(phase=str(phase), pieces=_pieces(counted), needed=ledger.needed(phase))


def _pieces(holdings: Iterable[Holding]) -> tuple[Bytes, ...]:
    """Pieces in the order of their kinds."""
    found = [
        Bytes(name=f"{held.role}: {held.name}", kind=kind_of_bytes(held.name), count=held.bytes) for held in holdings
    ]
    order = list(_KINDS)
    return tuple(sorted(found, key=lambda piece: order.index(piece.kind)))


def _one_device(lines: Sequence[LedgerLine]) -> Iterator[Bars]:
    """Of a run on one device, from the lines of its ledger."""
    sizes = {line.name: line.value for line in lines if line.section == "memory"}
    has = sizes.get(GPU, sizes.get(MACHINE))
    bars: list[Bar] = []
    for phase, peak in (("generate", GENERATING), ("update", UPDATING)):
        held = [line for line in lines if phase in line.phases and isinstance(line.value, int) and line.value]
        pieces = [Bytes(name=line.name, kind=kind_of_bytes(line.name), count=int(line.value or 0)) for line in held]
        if isinstance(total := sizes.get(peak), int):
            cache = next((line for line in held if line.name == _CACHE and line.source == DERIVED), None)
            if cache is not None and isinstance(room := sizes.get(GPU), int):
                pieces = list(_with_room(pieces, room))
                total = sum(piece.count for piece in pieces)
            order = list(_KINDS)
            needed = total if MACHINE in sizes else needed_bytes(total)
            pieces.sort(key=lambda piece: order.index(piece.kind))
            bars.append(Bar(phase=phase, pieces=tuple(pieces), needed=needed))
    if bars:
        title = "this machine" if MACHINE in sizes else "the device"
        yield Bars(title=title, roles=(), bars=tuple(bars), has=has if isinstance(has, int) else None)


def _with_room(pieces: Sequence[Bytes], has: int) -> Iterator[Bytes]:
    """With a cache that is not given no larger than what the others leave of the device."""
    others = sum(piece.count for piece in pieces if piece.name != _CACHE)
    for piece in pieces:
        least = min(piece.count, max(0, _most_held(has) - others))
        yield replace(piece, count=least) if piece.name == _CACHE else piece


def _most_held(has: int) -> int:
    """The most bytes that a device has room for, with libraries and fragmentation on top."""
    base = needed_bytes(0)
    return int((has - base) * _MANY / (needed_bytes(_MANY) - base))


def _group(group: Bars, scale: int) -> Markup:
    peak = max(group.bars, key=lambda bar: bar.held)
    roles = join((el("span", role, class_=f"role role-{role}") for role in group.roles), " ")
    has = None if group.has is None else el("span", f"has {bytes_text(group.has)}")
    head = el("div", el("h3", group.title), el("span", roles), class_="node-head")
    told = [el("span", f"peak {bytes_text(peak.held)} in {peak.phase}"), has]
    told += [el("span", text) for text in group.elsewhere]
    rows = (_row(bar, group.has, scale, bar is peak) for bar in group.bars)
    return el("figure", head, el("p", told, class_="told"), el("div", rows, class_="bars"), class_="memory card")


def _row(bar: Bar, has: int | None, scale: int, is_peak: bool) -> Markup:
    name = el("span", bar.phase, class_="bar-name peak" if is_peak else "bar-name")
    return el("div", name, _picture(bar, has, scale), _numbers(bar, has), class_="bar-row")


def _picture(bar: Bar, has: int | None, scale: int) -> Markup:
    shapes: list[Markup] = []
    at = 0
    for piece in bar.pieces:
        told = el("title", f"{piece.name}: {bytes_text(piece.count)}")
        width = _percent(piece.count, scale)
        shapes.append(
            el("rect", told, class_=f"bytes-{piece.kind}", x=_percent(at, scale), y=2, width=width, height=20)
        )
        at += piece.count
    if bar.needed > at:
        told = el("title", f"libraries and fragmentation, an allowance: {bytes_text(bar.needed - at)}")
        width = _percent(bar.needed - at, scale)
        shapes.append(el("rect", told, class_="on-top", x=_percent(at, scale), y=2, width=width, height=20))
    ground = void("rect", class_="bar-all", x=0, y=2, width=_percent(has or scale, scale), height=20)
    edge = None
    if has is not None:
        x = _percent(has, scale)
        edge = el("line", el("title", f"a device has {bytes_text(has)}"), class_="edge", x1=x, x2=x, y1=0, y2=24)
    text = "; ".join(f"{piece.name} {bytes_text(piece.count)}" for piece in bar.pieces)
    return el("svg", ground, shapes, edge, width="100%", height=24, role="img", aria_label=f"{bar.phase}: {text}")


def _percent(count: int, scale: int) -> str:
    return f"{100 * count / max(scale, 1):.3f}%"


def _numbers(bar: Bar, has: int | None) -> Markup:
    held = el("b", bytes_text(bar.held))
    if has is None:
        return el("span", held, class_="bar-numbers")
    left = has - bar.needed
    if bar.held > has:
        margin = el("span", f"{bytes_text(bar.held - has)} too much", class_="bad")
    elif left < 0:
        margin = el("span", f"{bytes_text(-left)} short", class_="warn")
    else:
        margin = el("span", f"{bytes_text(left)} left", class_="left")
    return el("span", held, margin, class_="bar-numbers")
