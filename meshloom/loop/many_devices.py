"""A run over several devices: its workers, and the roles on them behind the objects that the loop uses.

Owns: starting the workers of a run and giving each role its ranks. Refuses to know: the algorithm (``loop.rl``), the order of
a run (``loop.control``), how processes are started (``fabric``). Always holds: everything that can be wrong with the input is
found before the run folder is touched; the order of prompts, the buffer and the records are this process's, the models the
workers'.
"""

import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import torch
from rich.console import Console

from meshloom.algorithms.own_checks import check_own
from meshloom.config.errors import RunFault, UserError
from meshloom.config.settings import KlPlace, SftSettings, TrainSettings
from meshloom.data.order import PromptOrder
from meshloom.fabric.dispatch import GroupLayout
from meshloom.fabric.groups import WorkerGroup
from meshloom.fabric.launch import PlannedNode, open_site
from meshloom.fabric.workers import Workers
from meshloom.loop.build import (
    build_collector,
    build_validator,
    find_checkpoint,
    finish_plan,
    load_prompts,
    open_run,
    require_tokens,
    texts_decoder,
)
from meshloom.loop.control import ControlLoop
from meshloom.loop.critic_role import critic_bound, critic_model_settings
from meshloom.loop.environments import open_environments, open_scorer, run_prompts, unseen_tools
from meshloom.loop.groups import standing
from meshloom.loop.isolation import check_isolation, tell_isolation
from meshloom.loop.model_role import RemoteModel, RemoteReference, Sharing
from meshloom.loop.remote import RankMemory, RemoteResidents, RemoteStage
from meshloom.loop.remote_scores import asked_on_ranks
from meshloom.loop.replay import dump_samples, saved_jobs, schedule_of
from meshloom.loop.replicas import RemoteEngine
from meshloom.loop.rl import Roles
from meshloom.loop.saved_samples import read_saved
from meshloom.loop.session import Cut, Session, read_cut
from meshloom.loop.worker_host import WorkerHost
from meshloom.observe.loggers import check_loggers
from meshloom.observe.run_folder import LOGS_FOLDER, SETTINGS_FILE, check_free
from meshloom.plan.arithmetic import pass_cost
from meshloom.plan.build import build_plan
from meshloom.plan.carried_out import Carried
from meshloom.plan.lag import steps_ahead
from meshloom.plan.layout import Layout, RoleLayout, share_devices
from meshloom.plan.model_folder import read_model_folder
from meshloom.plan.parameters import UnknownFamily, count_parameters
from meshloom.plan.placement import Role, has_critic
from meshloom.plan.reference import refreshes
from meshloom.rollout.vllm_build import require_vllm
from meshloom.train.load import check_model_folder, load_tokenizer, pick_device

_HOST = "meshloom.loop.worker_host:WorkerHost"
DATA_AXES = ("replicate", "fsdp")
"""Axes of a model's mesh over which samples are divided."""
BUILD_S, ASK_S = 3600.0, 300.0
_MOVE_S = 1800.0


def run_over_devices(carried: Carried, *, resume: bool, only_rollout: bool = False) -> int:
    """Train; the exit code: 0 done, 130 stopped and saved.

    Args:
        carried: the run.
        resume: go on from the newest checkpoint.
        only_rollout: generate and score the prompts of all steps, and train on nothing.

    Raises:
        UserError: if the input is bad; nothing has been written then.
        WorkerFault: if a worker fails; the run goes on from its newest checkpoint.
        RunFault: if the run stops itself.
    """
    settings = carried.settings
    check_model_folder(settings.model.path)
    if has_critic(settings):
        check_model_folder(critic_model_settings(settings).path, "critic.model")
    if settings.reference.model is not None:
        check_model_folder(settings.reference.model)
    check_free(settings.run_dir, resume=resume)
    check_loggers(settings.logging.loggers)
    check_own(settings.algorithm)
    if settings.rollout.engine == "vllm":
        require_vllm()
    checkpoint, settings = find_checkpoint(settings) if resume else (None, settings)
    cut = None if checkpoint is None else read_cut(checkpoint)
    tokenizer = load_tokenizer(settings.model.path)
    rendered = run_prompts(settings, tokenizer)
    prompts, held_out, dropped = load_prompts(settings, rendered)
    sources = {prompt.row.data_source for prompt in (*prompts, *held_out)}
    saved = read_saved(settings, texts_decoder(tokenizer))
    if saved is not None:
        prompts, settings = saved.prompts, saved.with_steps(settings)
    build_plan(settings, len(prompts)).require()
    order = PromptOrder(len(prompts), settings.seed, settings.data.shuffle)
    if cut is not None:
        order.load(cut.values["order"])
    with ExitStack() as resources:
        workers = resources.enter_context(start_workers(settings, carried.layout, _HOST))
        told = workers.call("device_facts", phase="start", deadline_s=ASK_S)
        free = [facts.free_bytes for facts in told if facts.free_bytes is not None]
        plan, settings = finish_plan(settings, len(prompts), min(free, default=None))
        isolation = check_isolation(settings.reward)
        samples = [prompt.ids for prompt in (*prompts, *held_out)] + ([] if saved is None else list(saved.ids()))
        roles = _Ranks(settings, plan.layout, workers)
        scorers = resources.enter_context(asked_on_ranks(workers, roles.scoring, meanwhile=roles.scores_meanwhile))
        pool = open_scorer(resources, settings, sources, tokenizer, scorers)
        environments = open_environments(resources, settings, rendered)
        checkpoint_bytes = roles.build(checkpoint, cut, samples)
        engine = roles.engine()
        found = Roles(
            actor=roles.actor,
            reference=roles.reference(),
            critic=roles.critic,
            engine=engine,
            collector=build_collector(settings, engine, pool, tokenizer, prompts, environments),
            validator=build_validator(settings, engine, pool, tokenizer, held_out, environments) if held_out else None,
        )
        found.check()
        session = resources.enter_context(
            open_run(settings, plan, checkpoint_bytes, told[0].described, resume=resume, cut=cut)
        )
        resources.enter_context(stopping_at_once(workers, session))
        tell_isolation(isolation, session.display.notice, session.folder.path)
        if dropped:
            session.display.notice(f"{dropped} prompts longer than data.max_prompt_tokens were dropped")
        if unseen := unseen_tools(rendered):
            session.display.notice(unseen)
        session.measure_memory = RankMemory(workers, roles.free_between_steps, engine.memory).metrics
        stage = RemoteStage(
            settings,
            session,
            found,
            tokenizer,
            plan.updates,
            RemoteResidents(roles.models, session.folder.log_memory),
            plan.critic_updates,
            critic_rows=roles.critic_rows,
            trained_group=roles.trained,
            background=None if roles.takes_turns else resources.enter_context(_background(settings)),
            beside=resources.enter_context(_background(settings)) if roles.critic_is_apart else None,
        )
        if saved is not None:
            stage.replay = saved_jobs(saved, settings, session.display.notice)
        control = ControlLoop(schedule_of(settings, plan.steps), stage, order)
        if cut is not None:
            control.load(*standing(cut, settings))
            stage.load(cut)
        engine.load_weights(control.version)
        torch.manual_seed(settings.seed)
        finished = dump_samples(stage, order, plan.steps) if only_rollout else control.run()
        code = session.end(step=stage.step, stopped=not finished)
        workers.ends_with(code)
        return code


@contextmanager
def start_workers(settings: TrainSettings | SftSettings, layout: Layout, host: str) -> Iterator[Workers]:
    """The workers of a run, one a device; their logs are in the run folder, and leave with what ends it before it begins.

    Args:
        settings: of the run.
        layout: of its roles.
        host: class of the object in each worker, as ``module:name``.
    """
    topology = layout.topology
    nodes = _nodes(settings, layout)
    run_dir = Path(settings.run_dir)
    logs = run_dir / LOGS_FOLDER
    made = [folder for folder in (run_dir, *run_dir.parents) if not folder.exists()]
    roles = {rank: _roles_text(layout, rank) for rank in range(topology.num_devices)}
    count, on = topology.num_devices, f" on {topology.num_nodes} nodes" if topology.num_nodes > 1 else ""
    starting = f"starting {count} {'worker' if count == 1 else 'workers'}{on}; what they print: {logs}"
    Console().print(starting, markup=False, highlight=False, soft_wrap=True)
    try:
        with (
            open_site(
                nodes,
                fabric=settings.fabric,
                ray_address=settings.cluster.ray_address,
                named=bool(topology.names),
            ) as site,
            Workers(host, site=site, logs=logs, roles=roles) as workers,
        ):
            yield workers
    except (UserError, KeyboardInterrupt) as error:
        if not isinstance(error, RunFault) and not (run_dir / SETTINGS_FILE).exists():
            shutil.rmtree(logs, ignore_errors=True)
            for folder in made:
                with suppress(OSError):  # others may have put something there
                    folder.rmdir()
        raise


def _nodes(settings: TrainSettings | SftSettings, layout: Layout) -> list[PlannedNode]:
    """What each worker of each node computes on.

    Raises:
        UserError: if this machine has fewer GPUs than each node is asked for.
    """
    topology, device = layout.topology, pick_device(settings.device)
    count = topology.devices_per_node
    if device.index is not None:
        what = f"device={settings.device} names one GPU, and the run is over {topology.num_devices} devices"
        raise UserError(what, where="device", fix="device=cuda; CUDA_VISIBLE_DEVICES says which GPUs there are")
    if device.type == "cuda" and (found := torch.cuda.device_count()) < count:
        raise UserError(
            f"the run is over {count} devices of a node, and this machine shows {found}",
            where="cluster.devices_per_node",
            fix=f"cluster.devices_per_node={found}, or device=cpu",
        )
    devices = tuple(f"cuda:{index}" if device.type == "cuda" else "cpu" for index in range(count))
    return [PlannedNode(topology.node_name(node), devices) for node in range(topology.num_nodes)]


def _roles_text(layout: Layout, rank: int) -> str:
    return ", ".join(str(found.role) for found in layout.roles if found.devices.rank_of(rank) is not None)


@contextmanager
def _background(settings: TrainSettings) -> Iterator[ThreadPoolExecutor]:
    """Threads for the rollouts that may be in flight; what is in flight at the end is left to its workers' end."""
    threads = ThreadPoolExecutor(steps_ahead(settings) + 2, thread_name_prefix="rollout")
    try:
        yield threads
    finally:
        threads.shutdown(wait=False, cancel_futures=True)


@contextmanager
def stopping_at_once(workers: Workers, session: Session) -> Iterator[None]:
    """Who asks twice waits neither for what workers do nor for a checkpoint that they have yet to write."""
    try:
        yield
    except KeyboardInterrupt:
        workers.close(at_once=True)
        with suppress(RuntimeError, UserError):  # what is not whole is taken away
            session.store.wait()
        raise


class _Ranks:
    """The roles of a run on its workers.

    Args:
        settings: of the run.
        layout: of its roles; a device's number is its worker's rank.
        workers: of the run.
    """

    def __init__(self, settings: TrainSettings, layout: Layout, workers: Workers) -> None:
        self._settings, self._layout, self._workers = settings, layout, workers
        self._actor, self._rollout = layout.role(Role.ACTOR), layout.role(Role.ROLLOUT)
        self._reference = layout.role(Role.REFERENCE)
        self.takes_turns = share_devices(self._actor, self._rollout)
        self.actor = RemoteModel(self._group(self._actor), self._sharing(self._actor, backward=True))
        reward = layout.role(Role.REWARD)
        self.scoring = () if reward is None else tuple(reward.ranks)
        self.scores_meanwhile = not share_devices(reward, self._rollout)
        critic = layout.role(Role.CRITIC)
        self.critic = None if critic is None else self._remote_critic(critic)
        self.critic_rows: int | None = None
        self.critic_is_apart = critic is not None and not share_devices(critic, self._actor)
        self.models, self.trained = (
            self._all(self._actor, self._reference, critic, reward),
            self._all(self._actor, critic),
        )
        self._vocabulary = 0

    @property
    def free_between_steps(self) -> list[int]:
        """Ranks that do nothing between two steps: engines with devices of their own may generate then."""
        generating = set() if self.takes_turns else set(self._rollout.devices)
        return [seat.rank for seat in self._workers.seats if seat.rank not in generating]

    def build(self, checkpoint: Path | None, cut: Cut | None, samples: Sequence[Sequence[int]]) -> int:
        """Build all models; about what a checkpoint takes, in bytes.

        Args:
            checkpoint: that the run goes on from.
            cut: what it holds beside the model.
            samples: token ids that the model must have.

        Raises:
            UserError: if a model cannot be loaded, or lacks tokens.
        """
        arguments = {
            "settings": self._settings,
            "layout": self._layout,
            "checkpoint": None if checkpoint is None else checkpoint.absolute(),
            "updates": 0 if cut is None else cut.values["version"],
            "critic_updates": 0 if cut is None else cut.values["algorithm"]["critic_updates"],
        }
        self._workers.call("build", arguments, phase="start", deadline_s=BUILD_S)
        told = self.actor.group.call("facts", {"role": Role.ACTOR}, phase="start", deadline_s=ASK_S)
        self._vocabulary = max(facts.vocabulary for facts in told)
        require_tokens(self._vocabulary, samples)
        if self.critic is not None:
            of_critic = self.critic.group.call("facts", {"role": Role.CRITIC}, phase="start", deadline_s=ASK_S)
            self.critic_rows = max(facts.vocabulary for facts in of_critic)
            require_tokens(self.critic_rows, samples, "critic.model")
            told = [*told, *of_critic]
        if self._reference is not None and refreshes(self._settings):
            group = self._group(self._reference)
            told = [*told, *group.call("facts", {"role": Role.REFERENCE}, phase="start", deadline_s=ASK_S)]
        return sum(facts.checkpoint_bytes for facts in told)

    def engine(self) -> RemoteEngine:
        """All replicas of the engine."""
        tensor = self._rollout.mesh.size("tp")
        ranks = self._rollout.ranks
        movers = sorted({*self._actor.devices, *ranks})

        def move_weights(version: int) -> None:
            self._workers.call("move_weights", {"version": version}, ranks=movers, phase="sync", deadline_s=_MOVE_S)

        return RemoteEngine(
            self._workers,
            [ranks[at : at + tensor] for at in range(0, len(ranks), tensor)],
            vocabulary=self._vocabulary,
            move_weights=move_weights,
            takes_turns=self.takes_turns,
        )

    def reference(self) -> RemoteReference | None:
        """What the divergence is measured from, where one is used: a frozen model, or the base under the actor's adapters."""
        if self._settings.algorithm.kl is KlPlace.NONE:
            return None
        if self._reference is None:
            return RemoteReference(self.actor.group, Role.ACTOR, self.actor.sharing)
        group = self._group(self._reference)
        sharing = self._sharing(self._reference, backward=False)
        both = None
        if refreshes(self._settings):
            ranks = sorted({*self._actor.devices, *self._reference.devices})
            both = WorkerGroup(self._workers, GroupLayout.data_parallel(ranks), WorkerHost)
        return RemoteReference(group, Role.REFERENCE, sharing, both)

    def _remote_critic(self, found: RoleLayout) -> RemoteModel:
        settings = self._settings
        tokens = critic_bound(settings).tokens
        path = critic_model_settings(settings).path
        sharing = sharing_of(settings, found, backward=True, tokens=tokens, path=path)
        return RemoteModel(self._group(found), sharing, Role.CRITIC)

    def _all(self, *roles: RoleLayout | None) -> WorkerGroup:
        """All ranks of roles, each by itself."""
        ranks = {rank for found in roles if found is not None for rank in found.devices}
        return WorkerGroup(self._workers, GroupLayout.data_parallel(sorted(ranks)), WorkerHost)

    def _group(self, found: RoleLayout) -> WorkerGroup:
        ranks = GroupLayout.of_mesh(found.ranks, found.mesh.axes, DATA_AXES)
        return WorkerGroup(self._workers, ranks, WorkerHost)

    def _sharing(self, found: RoleLayout, *, backward: bool) -> Sharing:
        return sharing_of(self._settings, found, backward=backward)


def sharing_of(
    settings: TrainSettings | SftSettings,
    found: RoleLayout,
    *,
    backward: bool,
    tokens: int | None = None,
    path: str | None = None,
) -> Sharing:
    """How samples are shared out over a role's replicas. Ranks that split sequences hold a microbatch's tokens each.

    Args:
        settings: of the run.
        found: the role on its devices.
        backward: whether its passes are those of training.
        tokens: of a microbatch, if it is not ``batch.tokens_per_microbatch``.
        path: folder of its model, if it is not ``model.path``.
    """
    tokens = (tokens or settings.batch.tokens_per_microbatch) * found.mesh.size("sp")
    try:
        numbers = count_parameters(read_model_folder(Path(path or settings.model.path)).text_config)
    except UnknownFamily:
        return Sharing(tokens_per_microbatch=tokens)
    cost = pass_cost(numbers, backward=backward)
    return Sharing(tokens_per_microbatch=tokens, pair_cost=cost.per_pair / cost.per_token)
