"""What ranks do in tests of engines whose model is cut over them."""

import threading
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from meshloom.config.errors import RunFault
from meshloom.loop.engine_copies import cut_copy, peers_of
from meshloom.rollout.endings import Decision
from meshloom.rollout.feed import ReplicaFeed
from meshloom.rollout.paged_engine import PagedEngine
from meshloom.rollout.peers import OverRanks
from meshloom.rollout.protocol import Completion, Engine, FinishReason, Request, SamplingParams
from meshloom.rollout.torch_engine import TorchEngine
from meshloom.train.mesh import make_mesh
from meshloom.weights.engine_copy import EngineCopy
from meshloom.weights.mesh_giver import MeshGiver
from meshloom.weights.mesh_probe import Asked, MeshProbe
from meshloom.weights.reshard import Resharder
from tests.mesh_checks import CPU, Axes, model_on

ENGINES = {"torch": TorchEngine, "paged": PagedEngine}
Told = dict[tuple[int, int], tuple[list[int], list[float], str]]
"""Tokens, log-probabilities and why it ended, of each sample."""


def requests() -> list[Request]:
    """Prompts and distributions of several kinds, more samples than run at once."""
    kinds = [
        {"max_tokens": 24},
        {"max_tokens": 9, "top_k": 9},
        {"max_tokens": 13, "temperature": 1.3},
        {"max_tokens": 15, "top_p": 0.9, "min_p": 0.01},
        {"max_tokens": 6, "temperature": 0.0},
    ]
    generator = torch.Generator().manual_seed(7)
    return [
        Request(
            id=number,
            prompt_ids=torch.randint(2, 96, (3 + 11 * number,), generator=generator).tolist(),
            params=SamplingParams(**kind),
            seeds=[10 * number + k for k in range(3)],
        )
        for number, kind in enumerate(kinds)
    ]


def engine_of(kind: str, module: torch.nn.Module, peers: OverRanks | None = None, cache_tokens: int = 250) -> Engine:
    """An engine whose cache is so small that samples are set back, unless it is given more."""
    more = {"page": 16} if kind == "paged" else {}
    heads = 2 if peers is None else max(1, 2 // peers.count)
    bytes_per_token = 2 * 2 * heads * 16 * 4
    return ENGINES[kind](
        module, eos_ids=(1,), max_sequences=6, kv_cache_bytes=cache_tokens * bytes_per_token, peers=peers, **more
    )


def told(completions: Sequence[Completion]) -> Told:
    return {(c.request_id, c.index): (c.ids, c.logprobs, str(c.finish)) for c in completions}


def generate(kind: str, module: torch.nn.Module) -> Told:
    """What one device gives."""
    return told(list(engine_of(kind, module).generate(requests(), deadline_s=60)))


def generate_cut(
    kinds: Sequence[str], meshes: list[tuple[Axes, list[int]]], folder: str, engines: list[int], tensor: int
) -> list[Told]:
    """Bring a trainer's weights to engines that are cut, let them generate, sleep, and generate with weights moved again."""
    made = [make_mesh(axes, ranks, CPU) for axes, ranks in meshes]
    mesh = next((mesh for mesh in made if mesh is not None), None)
    model = model_on(mesh, folder) if mesh is not None else None
    peers = peers_of(engines, tensor, dist.get_rank())
    copy = None if peers is None else cut_copy(folder, peers, torch.float32, CPU)
    mover = Resharder(
        None if model is None else MeshGiver(model),
        None if copy is None else copy.taker,
        device=CPU,
        bucket_bytes=9_000,
    )
    mover.move(0)
    probe = MeshProbe(model, None if copy is None else Asked.of_module(copy.module, copy.peers), None)
    assert probe.prove() < 1e-5
    return [_slept_and_told(kind, copy, mover, number) for number, kind in enumerate(kinds)]


def _slept_and_told(kind: str, copy: EngineCopy | None, mover: Resharder, number: int) -> Told:
    engine = None if copy is None else engine_of(kind, copy.module, copy.peers)
    first = {} if engine is None else told(list(engine.generate(requests(), deadline_s=60)))
    if engine is not None:
        engine.sleep()
        copy.empty()
        copy.take_memory()
    mover.move(number + 1)
    if engine is None:
        return first
    engine.wake()
    assert told(list(engine.generate(requests(), deadline_s=60))) == first
    return first


def end_at_once(kind: str, folder: str) -> tuple[Told, Told]:
    """Ranks that differ about the time and about what is aborted: all end what the first one ends."""
    peers = peers_of([0, 1, 2, 3], 2, dist.get_rank())
    copy = cut_copy(folder, peers, torch.float32, CPU)
    for parameter in copy.module.parameters():
        torch.nn.init.constant_(parameter, 0.01)
    engine = engine_of(kind, copy.module, peers)
    late = told(list(engine.generate(requests(), deadline_s=0.0 if peers.rank == 0 else 1e9)))
    found: list[Completion] = []
    for completion in engine.generate(requests(), deadline_s=1e9 if peers.rank == 0 else 0.0):
        if not found:
            engine.abort(2 if peers.rank == 0 else 3)
        found.append(completion)
    return late, told(found)


def join_at_once(kind: str, folder: str) -> tuple[Told, Told]:
    """Requests that come to ranks at different times, the last ones while others run, and one of them goes on from what is kept
    of another: what all of them tell, and one device without a feed, from the beginning."""
    peers = peers_of([0, 1, 2, 3], 2, dist.get_rank())
    copy = cut_copy(folder, peers, torch.float32, CPU)
    for parameter in copy.module.parameters():
        torch.nn.init.constant_(parameter, 0.01)
    engine = engine_of(kind, copy.module, peers, 2000)
    stops = tuple(range(2, 20))
    asked = [replace(each, params=replace(each.params, stop_ids=stops), keep=True) for each in requests()]
    found: list[Completion] = []
    longest = SamplingParams(max_tokens=24, stop_ids=stops)
    feed = ReplicaFeed(replace(asked[-1], params=longest, seeds=range(16)), engine.first_says)
    threading.Timer(0.2 * peers.rank, lambda: feed.offer(asked[1:2])).start()
    for completion in engine.generate(asked[:1], deadline_s=60, feed=feed):
        if not found:
            feed.offer(asked[2:])
        found.append(completion)
        if len(asked) == 5 and completion.finish is FinishReason.STOP:
            before = asked[completion.request_id].prompt_ids
            asked.append(Request(id=9, prompt_ids=[*before, *completion.ids, 5, 6], params=longest, seeds=[4]))
            feed.offer(asked[5:])
    joined = told(found)
    assert engine.take_prompts().reused > 0
    alone = [replace(each, keep=False) for each in asked if (each.id, 0) in joined]
    return joined, told(list(engine.generate(alone, deadline_s=60)))


def draw_apart() -> str:
    """What a rank is told that has drawn something else than the first one."""
    peers = peers_of([0, 1, 2, 3], 4, dist.get_rank())
    mine = Decision(peers.rank == 3, frozenset({peers.rank}), frozenset({8, 9 + peers.rank}))
    assert peers.follow(mine, 5) == Decision(False, frozenset({0}), frozenset({8, 9}))
    try:
        peers.follow(Decision(False), 6 if peers.rank == 2 else 5)
    except RunFault as error:
        return str(error)
    return ""
