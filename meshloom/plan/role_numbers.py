"""Roles of a run as plain numbers: from settings and a layout to what the ledgers of memory and time count with.

Owns: which setting becomes which number. Refuses to know: formulas of bytes and seconds. Always holds: what a run of these
settings does is what is counted, by the rules that the trainer and the engines go by.
"""

from dataclasses import replace

from meshloom.config.cluster_settings import RoleOffloadSettings
from meshloom.config.settings import KlPlace, TrainSettings
from meshloom.plan.compute import compiles, logits_chunk_bytes
from meshloom.plan.decoder_numbers import DecoderNumbers
from meshloom.plan.generated import prompts_at_once, samples_each
from meshloom.plan.layout import Layout, RoleLayout, share_devices
from meshloom.plan.ledger import (
    fewest_in_full,
    longest_sample_tokens,
    most_computed_tokens,
    most_microbatches,
    samples_per_update,
)
from meshloom.plan.memory import compute_bytes, on_gpu
from meshloom.plan.placement import PHASES, Role
from meshloom.plan.reference import has_own_reference, refreshes
from meshloom.plan.residency import EngineRole, ModelRole, Phase, Residency
from meshloom.plan.saved_logprobs import lacks_logprobs
from meshloom.plan.sharded_memory import FLOAT32
from meshloom.plan.shards import Cut, ceil_div
from meshloom.plan.turns import kept_tokens

_PAGE = 64
_CACHE_SHARE = 0.9
"""Of the memory that is left, what the embedded engine's cache takes at most."""
_READ_BYTES, _VERSION_BYTES = 9, 4
"""Of a token's id and mask, and of the version that sampled it."""
PLACES = {"none": Residency.DEVICE, "host": Residency.HOST, "disk": Residency.DISK}
"""Where bytes are that a setting moves away."""


def cut_of(found: RoleLayout) -> Cut:
    """How a role's mesh cuts its model."""
    size = found.mesh.size
    return Cut(
        replicate=size("replicate"),
        fsdp=size("fsdp"),
        sequence=size("sp"),
        tensor=size("tp"),
        pipeline=size("pp"),
        stages_per_device=found.stages_per_device,
    )


def samples_per_step(settings: TrainSettings) -> int:
    """Samples of all prompts of a step."""
    return settings.batch.prompts_per_step * settings.batch.samples_per_prompt


def updates_per_step(settings: TrainSettings) -> int:
    """Optimizer updates of a step, rounded down where they do not come out even."""
    batch = settings.batch
    return batch.prompts_per_step // (batch.prompts_per_update or batch.prompts_per_step) * batch.epochs_per_step


def computes_old_logprobs(settings: TrainSettings) -> bool:
    """Whether the actor computes log-probs before its updates.

    Before the only one of a step they are the update's own, unless something needs them before it: a divergence in the reward,
    a rejection, which denominators must know of, or samples of older weights, with a lag or a surplus. Where the sampler's own
    are the proximal policy's, none are computed.
    """
    algorithm, sifted = settings.algorithm, settings.algorithm.filter_groups
    if algorithm.proximal == "sampler":
        return False
    older = algorithm.max_lag_versions > 0 or (sifted.enabled and sifted.surplus_steps > 0)
    before = algorithm.kl is KlPlace.REWARD or algorithm.correction.reject != "none"
    return updates_per_step(settings) != 1 or older or before


def computes_logprobs(settings: TrainSettings) -> bool:
    """Whether the actor computes log-probs before its updates: its own, also where a file of samples lacks the sampler's, or,
    without its adapters, those of the reference."""
    is_reference = settings.algorithm.kl is not KlPlace.NONE and not has_own_reference(settings)
    return computes_old_logprobs(settings) or is_reference or lacks_logprobs(settings.rollout.from_samples)


def busy_phases(settings: TrainSettings, role: Role) -> tuple[Phase, ...]:
    """Phases of a step in which a role works, in their order: samples of a file are neither generated nor scored, and the actor
    computes log-probs only where something needs them before its update."""
    idle = {Phase.GENERATE, Phase.SCORE} if settings.rollout.from_samples is not None else set()
    if role == Role.ACTOR and not computes_logprobs(settings):
        idle.add(Phase.LOGPROB)
    return tuple(phase for phase in map(Phase, PHASES[role]) if phase not in idle)


def unread_logprobs(settings: TrainSettings) -> tuple[str, ...]:
    """Columns of log-probs that only the actor's loss reads, and no reward, rejection or record: they may stay on its ranks.

    A file of samples may lack what their sampler thought, in whose place the actor's own log-probs are then.
    """
    algorithm = settings.algorithm
    if algorithm.kl is KlPlace.REWARD:
        return ()
    reads_old = algorithm.correction.reject != "none" or settings.rollout.from_samples is not None
    return ("reference_logprob",) if reads_old else ("old_logprob", "reference_logprob")


def model_role(
    settings: TrainSettings,
    found: RoleLayout,
    model: DecoderNumbers,
    *,
    recompute: bool,
    adapters: int | None = None,
    lends_to_engine: bool = False,
    over_ranks: bool = False,
    apart: bool = False,
) -> ModelRole:
    """A role that computes with a model.

    Args:
        settings: of the run.
        found: the role on its devices.
        model: of the role, as a language model.
        recompute: whether layers are recomputed in the backward pass.
        adapters: parameters of its adapters; none where all are trained.
        lends_to_engine: whether the engine samples from its very weights.
        over_ranks: whether the run is over several devices.
        apart: whether the engines are on devices of their own.
    """
    gpu, width = on_gpu(settings.device), compute_bytes(settings.model.dtype, settings.device)
    cut, longest, most_samples = cut_of(found), longest_sample_tokens(settings), settings.batch.samples_per_microbatch
    computes, lends = _phases(settings, found.role, lends_to_engine=lends_to_engine)
    samples = ceil_div(_samples_of_pass(settings, found.role), cut.replicas)
    bound = _bound_of_microbatch(settings, found.role) * cut.sequence
    tokens = min(bound, min(samples, most_samples or samples) * longest)
    offload = _offload(settings, found.role)
    return ModelRole(
        name=str(found.role),
        model=model.with_scalar_head() if found.role == Role.CRITIC else model,
        cut=cut,
        computes=computes,
        lends=lends,
        width=width,
        trained=adapters if found.role == Role.ACTOR else None,
        tokens=most_computed_tokens(settings, tokens),
        bound=bound,
        samples=most_samples,
        group=settings.batch.samples_per_prompt,
        microbatches=_most_microbatches(settings, found, longest, bound),
        recompute=recompute,
        compiled=compiles(settings.model, gpu=gpu),
        chunk_bytes=logits_chunk_bytes(settings.model, gpu=gpu),
        logit_bytes=FLOAT32 + (width if gpu and width < FLOAT32 else 0),
        over_ranks=over_ranks,
        apart=apart,
        parameters_at=PLACES[offload.parameters],
        optimizer_at=PLACES[offload.optimizer],
        kept_tokens=samples_per_step(settings) * longest if over_ranks else 0,
        kept_width=kept_width(settings, found.role),
        kept_at=Residency.HOST if gpu else Residency.DEVICE,
    )


def _most_microbatches(settings: TrainSettings, found: RoleLayout, longest: int, bound: int) -> int:
    """The most that a replica makes of a pass, however samples are shared out: others have one at least."""
    batch, replicas, samples = settings.batch, cut_of(found).replicas, _samples_of_pass(settings, found.role)
    given = longest, bound, batch.samples_per_microbatch, batch.samples_per_prompt
    if replicas == 1:
        return most_microbatches(samples, *given)
    return ceil_div(samples - replicas + 1, fewest_in_full(*given))


def kept_width(settings: TrainSettings, role: Role) -> int:
    """Bytes of a token of the samples that a model's ranks keep: ids and mask, and what its loss reads. Advantages and returns
    come anew with each update."""
    if role == Role.CRITIC:
        return _READ_BYTES + FLOAT32
    log_probs = 1 + computes_old_logprobs(settings) + (settings.algorithm.kl is not KlPlace.NONE)
    return _READ_BYTES + _VERSION_BYTES + log_probs * FLOAT32


def _phases(
    settings: TrainSettings, role: Role, *, lends_to_engine: bool
) -> tuple[tuple[Phase, ...], tuple[Phase, ...]]:
    """Phases in which a role's model computes, and those in which others read its weights."""
    phases = busy_phases(settings, role)
    lends = [Phase.SYNC] if Phase.SYNC in phases else []
    if role == Role.ACTOR and refreshes(settings) and Phase.LOGPROB not in phases:
        lends.append(Phase.LOGPROB)
    if lends_to_engine:
        lends.append(Phase.GENERATE)
    return tuple(phase for phase in phases if phase is not Phase.SYNC), tuple(lends)


def _samples_of_pass(settings: TrainSettings, role: Role) -> int:
    """Samples that a role's model sees at once: those of an update where it learns, else those of a step."""
    if Phase.UPDATE in PHASES[role]:
        return samples_per_update(settings)
    return samples_per_step(settings)


def _bound_of_microbatch(settings: TrainSettings, role: Role) -> int:
    """Tokens that bound a microbatch on each of the devices that share its sequences."""
    own = settings.critic.tokens_per_microbatch if role == Role.CRITIC else None
    return own or settings.batch.tokens_per_microbatch


def _offload(settings: TrainSettings, role: Role) -> RoleOffloadSettings:
    """What of a role's model leaves its devices between phases."""
    of_roles: dict[Role, RoleOffloadSettings] = {
        Role.ACTOR: settings.offload.actor,
        Role.REFERENCE: settings.offload.reference,
        Role.CRITIC: settings.offload.critic,
    }
    return of_roles[role]


def engine_owns_weights(settings: TrainSettings, layout: Layout) -> bool:
    """Whether the engine has a copy of the weights. On one device the embedded one samples from the actor's very weights; over
    several, the actor's are parts in float32, which no engine samples from. vLLM always has its own."""
    return layout.topology.num_devices > 1 or settings.rollout.engine == "vllm"


def engine_role(settings: TrainSettings, layout: Layout, model: DecoderNumbers) -> EngineRole | None:
    """A replica of the engine; none if the rollout could not be laid out."""
    found = layout.role(Role.ROLLOUT)
    if found is None:
        return None
    rollout, gpu, vllm = settings.rollout, on_gpu(settings.device), settings.rollout.engine == "vllm"
    tensor, longest = found.mesh.size("tp"), longest_sample_tokens(settings)
    samples = ceil_div(prompts_at_once(settings), found.replicas) * samples_each(settings)
    apart = not share_devices(found, layout.role(Role.ACTOR))
    sequences = min(rollout.max_sequences, samples)
    slot = longest if vllm or not gpu else (ceil_div(longest, _PAGE) + 1) * _PAGE
    return EngineRole(
        name=str(Role.ROLLOUT),
        model=model if vllm else model.with_whole_cache(),
        tensor=tensor,
        width=compute_bytes(settings.model.dtype, settings.device),
        own_weights=engine_owns_weights(settings, layout),
        # Engines make room for training where that is on the same devices, and nowhere else; vLLM can on a GPU only.
        sleeps=not apart and (not vllm or (gpu and rollout.vllm.sleep)),
        sequences=sequences,
        slot_tokens=slot,
        kept_tokens=kept_tokens(settings, samples=samples, sequences=sequences, slot=slot, longest=longest, gpu=gpu),
        cache_bytes=rollout.kv_cache_bytes,
        fills_cache=vllm,
        keeps_logits=gpu and not vllm,
        over_ranks=layout.topology.num_devices > 1,
        apart=apart,
        loads_whole=vllm and layout.topology.num_devices > 1,
    )


def with_room_for_cache(settings: TrainSettings, engine: EngineRole, taken: int, memory: int) -> EngineRole:
    """The engine with the bound on its cache that follows from a GPU's memory, where the settings give none. The embedded one
    has room for one sequence at least, whether or not that is left.

    Args:
        settings: of the run.
        engine: that has none.
        taken: bytes that the device needs while it generates, without the cache.
        memory: of the device.
    """
    if engine.cache_bytes is not None or not on_gpu(settings.device):
        return engine
    if settings.rollout.engine == "vllm":
        weights = ceil_div(engine.model.total, engine.tensor) * engine.width
        share = settings.rollout.vllm.gpu_memory_utilization
        bound = f"{share:g} of the device's memory, less the engine's weights"
        return replace(engine, cache_bytes=max(0, int(share * memory) - weights), cache_bound=bound)
    bound, left = f"{_CACHE_SHARE:g} of what is left while generating", int(_CACHE_SHARE * (memory - taken))
    if left < engine.longest_sample_bytes:
        bound, left = "the longest sample alone", engine.longest_sample_bytes
    return replace(engine, cache_bytes=left, cache_bound=bound)
