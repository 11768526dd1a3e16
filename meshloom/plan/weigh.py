"""What an arrangement takes, by the cost model of the plan, and the budget of memory that suits it best.

Owns: the room of an arrangement, bounds on its seconds that cost little, and the choice of its budget. Refuses to know: which
arrangements there are, how seconds are counted (``plan.weigh_times``). Always holds: what is said of a budget is what the plan
forecasts of those settings; a bound is never above what is forecast.

A microbatch is as large as it fits, since larger ones never take longer; but pipeline stages stand empty the longer the fewer
microbatches there are: there smaller ones are tried too.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from math import ceil, floor, inf

from meshloom.config.settings import TrainSettings
from meshloom.plan.arrangement import CACHE_SHARE, RECOMPUTE, TOKENS, Arrangement, Budget, Placed
from meshloom.plan.candidates import Family, Given
from meshloom.plan.constants import Cluster
from meshloom.plan.faults import Change, with_values
from meshloom.plan.fitting import GIB, Case
from meshloom.plan.forecast import (
    device_groups,
    forecast,
    share_devices,
)
from meshloom.plan.headroom import FRAGMENTS
from meshloom.plan.ledger import longest_sample_tokens
from meshloom.plan.memory import on_gpu
from meshloom.plan.placement import Role
from meshloom.plan.residency import EngineRole, Phase
from meshloom.plan.role_numbers import engine_role
from meshloom.plan.sharded_memory import engine_holdings
from meshloom.plan.shards import cached_values, ceil_div
from meshloom.plan.time import PhaseTime
from meshloom.plan.weigh_times import NO_MODEL, ArrangementTimes
from meshloom.plan.weighed import (
    GRAIN,
    Lack,
    Option,
    Weighed,
    better_of,
    lack_of,
    largest_that_fits,
    rounded,
    without_bubble,
)

_MOST_TOKENS, _MOST_SHARE, _PERCENT = 2**20, 0.95, 100
_STEPS = 3
"""Sizes of microbatches that are tried from one to its half."""
_TRAINED = (Role.ACTOR, Role.CRITIC)


class Scales:
    """Weighs arrangements of one run.

    Args:
        case: the run, with what its devices are.
        cluster: the devices.
        given: settings that must be kept.
    """

    def __init__(self, case: Case, cluster: Cluster, given: Given) -> None:
        self.case, self.cluster, self.given = case, cluster, given
        self.free = self._with({TOKENS: _MOST_TOKENS, RECOMPUTE: False})
        self.times = ArrangementTimes(case, cluster, self.free)
        self._trained: dict[object, tuple[Option, ...] | Lack] = {}
        self._budgets: dict[object, Budget | None] = {}
        self._asleep: dict[Placed, int] = {}

    def _with(self, change: Change) -> TrainSettings:
        """The settings after a change, but for what is given."""
        return with_values(self.case.settings, {path: it for path, it in change.items() if path not in self.given})

    def family_bound(self, family: Family) -> float:
        """Seconds of a step, if memory were no matter and each role were placed as suits it best."""
        first = next(family.arrangements())
        recompute, chosen = self.free.model.gradient_checkpointing is True, list(first.roles)
        for at, (role, choices) in enumerate(family.choices):
            tried = [replace(first, roles=(*first.roles[:at], (role, one), *first.roles[at + 1 :])) for one in choices]
            if role is Role.ROLLOUT:
                seconds = [sum(phase.seconds for phase in self.times.engine(each)) for each in tried]
            elif len(choices) > 1:
                times = (self.times.models(each, self.free, recompute, _MOST_TOKENS) for each in tried)
                seconds = [sum(without_bubble(it).seconds for it in each if it.role == role) for each in times]
            else:
                continue
            chosen[at] = role, choices[seconds.index(min(seconds))]
        return self.bound(replace(first, roles=tuple(chosen)))

    def bound(self, arrangement: Arrangement) -> float:
        """Seconds of a step, if memory were no matter."""
        recompute = self.free.model.gradient_checkpointing is True
        models = self.times.models(arrangement, self.free, recompute, _MOST_TOKENS)
        return self.times.step(arrangement, list(map(without_bubble, models)), 0.0)

    def closer_bound(self, arrangement: Arrangement) -> float | Lack:
        """Seconds of a step, if only the models that train and compute log-probs had to fit; or why these do not."""
        options = self._options(arrangement)
        if isinstance(options, Lack):
            return options
        best = inf
        for bound, option in self._by_bound(arrangement, options):
            if bound >= best:
                break
            if (budget := self._budget(arrangement, option)) is not None:
                best = min(best, self.times.step(arrangement, self._of_budget(arrangement, budget), option.moved))
        return best

    def weigh(self, arrangement: Arrangement) -> Weighed | Lack:
        """The arrangement with its best budget; or why none fits."""
        options = self._options(arrangement)
        if isinstance(options, Lack):
            return options
        best: Weighed | Lack | None = None
        for bound, option in self._by_bound(arrangement, options):
            if isinstance(best, Weighed) and bound >= best.step_s:
                break
            for budget in self._tried(arrangement, option):
                best = better_of(best, self._complete(arrangement, budget))
        if best is None:
            raise AssertionError("what fits at its most frugal has a budget")
        return best

    def _by_bound(self, arrangement: Arrangement, options: Sequence[Option]) -> list[tuple[float, Option]]:
        """Options with the seconds of a step that they take at least, the fastest first."""
        found = []
        for option in options:
            settings = self.free if not option.recompute else self._with({TOKENS: _MOST_TOKENS, RECOMPUTE: True})
            models = self.times.models(arrangement, settings, option.recompute, _MOST_TOKENS)
            found.append((self.times.step(arrangement, list(map(without_bubble, models)), option.moved), option))
        return sorted(found, key=lambda each: each[0])

    def _options(self, arrangement: Arrangement) -> tuple[Option, ...] | Lack:
        """What may be recomputed and moved away; or what the models lack at their most frugal."""
        if (key := (self._training_key(arrangement), self._room(arrangement))) not in self._trained:
            self._trained[key] = self._least(arrangement) or tuple(self._all_options(arrangement))
        return self._trained[key]

    def _all_options(self, arrangement: Arrangement) -> Iterator[Option]:
        for optimizer, parameters in self._offloads(arrangement):
            settings = self._budgeted(Budget(recompute=True, tokens=1, optimizer=optimizer, parameters=parameters))
            moved = self.times.moved(arrangement, settings)
            for recompute in self._recompute():
                yield Option(recompute=recompute, optimizer=optimizer, parameters=parameters, moved=moved)

    def _tried(self, arrangement: Arrangement, option: Option) -> Iterator[Budget]:
        """The best budget of an option; with smaller microbatches too, where the engine's cache stays while models train."""
        if (budget := self._budget(arrangement, option)) is None:
            return
        yield budget
        engine = engine_role(self.case.settings, arrangement.layout, self.case.model)
        if engine is not None and not engine.sleeps and TOKENS not in self.given:
            while (tokens := budget.tokens // 2) >= self._least_tokens(arrangement):
                budget = replace(budget, tokens=tokens)
                yield budget

    def _budget(self, arrangement: Arrangement, option: Option) -> Budget | None:
        """The best microbatch that the models fit with, while the engine is asleep; none if none does."""
        key = (self._training_key(arrangement), option, self._room(arrangement))
        if key not in self._budgets:
            budget = Budget(
                recompute=option.recompute, tokens=1, optimizer=option.optimizer, parameters=option.parameters
            )
            tokens = self._most_tokens(arrangement, self._budgeted(budget), option.recompute)
            choices = (
                [] if tokens is None else [replace(budget, tokens=size) for size in self._halves(arrangement, tokens)]
            )

            def seconds(choice: Budget) -> float:
                return sum(phase.seconds for phase in self._of_budget(arrangement, choice))

            self._budgets[key] = min(choices, key=seconds, default=None)
        return self._budgets[key]

    @staticmethod
    def _training_key(arrangement: Arrangement) -> object:
        """What of an arrangement the models of training depend on: all but how the engine is cut."""
        return tuple((role, it.devices if role is Role.ROLLOUT else it) for role, it in arrangement.roles)

    def _halves(self, arrangement: Arrangement, tokens: int) -> Iterator[int]:
        """Sizes of microbatches to choose from: the largest that fits, and where there are stages, smaller ones."""
        yield tokens
        if TOKENS not in self.given and any(placed.cut.pipeline > 1 for _, placed in arrangement.roles):
            least = self._least_tokens(arrangement)
            sizes = (int(tokens / 2 ** (step / _STEPS)) // GRAIN * GRAIN for step in range(1, 16 * _STEPS))
            yield from (size for size in dict.fromkeys(sizes) if size >= least)

    def _least_tokens(self, arrangement: Arrangement) -> int:
        """What the longest sample needs."""
        parts = min(it.cut.sequence for role, it in arrangement.roles if role not in NO_MODEL)
        return ceil_div(longest_sample_tokens(self.case.settings), parts)

    def _recompute(self) -> list[bool]:
        given = self.case.settings.model.gradient_checkpointing
        return [given] if RECOMPUTE in self.given and isinstance(given, bool) else [False, True]

    def _offloads(self, arrangement: Arrangement) -> list[tuple[tuple[Role, ...], tuple[Role, ...]]]:
        """Roles whose optimizer, and whose weights, wait in the host's memory: the fewest first."""
        models = [role for role in arrangement.placed if role in (Role.ACTOR, Role.REFERENCE, Role.CRITIC)]
        can = {
            name: [role for role in models if f"offload.{role}.{name}" not in self.given]
            for name in ("optimizer", "parameters")
        }
        trained = tuple(role for role in can["optimizer"] if role in _TRAINED)
        reference = tuple(role for role in can["parameters"] if role is Role.REFERENCE)
        optimizers: Sequence[tuple[Role, ...]] = dict.fromkeys([(), trained])
        parameters: Sequence[tuple[Role, ...]] = dict.fromkeys([(), reference, tuple(can["parameters"])])
        return list(product(optimizers, parameters))

    def settings_of(self, arrangement: Arrangement, budget: Budget | None = None) -> TrainSettings:
        """Settings of a run that is arranged like this; with a budget, if one is given."""
        more = {} if budget is None else budget.change(self.case.settings)
        return self._with({**arrangement.change(self.case.settings), **more})

    def _budgeted(self, budget: Budget) -> TrainSettings:
        """The settings with a budget, for ledgers that take all else from a layout."""
        return self._with(budget.change(self.case.settings))

    def _tokens(self, settings: TrainSettings, tokens: int) -> TrainSettings:
        return settings if TOKENS in self.given else with_values(settings, {TOKENS: tokens})

    def _most_tokens(self, arrangement: Arrangement, settings: TrainSettings, recompute: bool) -> int | None:
        """The largest microbatch that fits in the models' phases; none if none does."""
        if TOKENS in self.given:
            tokens, memory = self.case.settings.batch.tokens_per_microbatch, self._room(arrangement)
            fits = memory is None or self._needed(arrangement, settings, recompute) <= memory
            return tokens if fits else None
        longest, least = longest_sample_tokens(settings), self._least_tokens(arrangement)
        samples = settings.batch.prompts_per_step * settings.batch.samples_per_prompt
        enough = max(
            ceil_div(samples, it.whole_fsdp) * longest // it.cut.sequence + 1
            for role, it in arrangement.roles
            if role not in NO_MODEL
        )
        memory, most = self._room(arrangement), max(0, min(_MOST_TOKENS, enough) - least) // GRAIN + 1
        if memory is None:
            return rounded(least, most)

        def needed(grains: int) -> int:
            tokens = with_values(settings, {TOKENS: rounded(least, grains)})
            return self._needed(arrangement, tokens, recompute)

        fitting = largest_that_fits(needed, most, memory)
        return None if fitting is None else rounded(least, fitting)

    def _room(self, arrangement: Arrangement) -> int | None:
        """Memory that is left for the models beside what the engine holds while it is asleep; none if that is not known."""
        memory = self.case.memory
        if memory is None or not share_devices(*map(arrangement.layout.role, (Role.ROLLOUT, Role.ACTOR))):
            return memory
        rollout = arrangement.placed[Role.ROLLOUT]
        if rollout not in self._asleep:
            engine = engine_role(self.case.settings, arrangement.layout, self.case.model)
            holdings = () if engine is None else engine_holdings(replace(engine, cache_bytes=0))
            steady = (held.bytes for held in holdings if Phase.UPDATE in held.phases and not held.fleeting)
            self._asleep[rollout] = ceil(sum(steady) * (1 + FRAGMENTS)) + 1
        return memory - self._asleep[rollout]

    def _needed(self, arrangement: Arrangement, settings: TrainSettings, recompute: bool) -> int:
        """Bytes that the fullest device needs for the models, while the engine is asleep."""
        roles = replace(self.times.count(arrangement, settings, recompute), engine=None)
        groups = device_groups(arrangement.layout, roles, None)
        return max((group.ledger.needed(phase) for group in groups for phase in Phase), default=0)

    def _of_budget(self, arrangement: Arrangement, budget: Budget) -> list[PhaseTime]:
        settings = self._tokens(self.case.settings, budget.tokens)
        return self.times.models(arrangement, settings, budget.recompute, budget.tokens)

    def _complete(self, arrangement: Arrangement, budget: Budget) -> Weighed | Lack:
        """The budget with a share for the cache, forecast; or what generation lacks."""
        case, recompute = self.case, budget.recompute
        settings = self._budgeted(budget)
        room = self._cache(arrangement, settings, recompute)
        if isinstance(room, Lack):
            return room
        if room is not None:
            budget = replace(budget, cache_share=room)
            settings = self._budgeted(budget)
        ahead = forecast(
            settings,
            case.model,
            arrangement.layout,
            self.cluster,
            recompute=recompute,
            adapters=case.adapters,
            critic=case.critic,
            constants=case.constants,
            device_memory=case.memory,
        )
        if case.memory is not None and (lack := lack_of(ahead.groups)) is not None:
            return lack
        settings = self.settings_of(arrangement, budget)
        return Weighed(arrangement=arrangement, budget=budget, settings=settings, forecast=ahead)

    def _cache(self, arrangement: Arrangement, settings: TrainSettings, recompute: bool) -> float | Lack | None:
        """vLLM's share of a device's memory: what its sequences need, or what is left; none where it is given or means
        nothing. A cache without room for the longest sample is a lack."""
        memory, engine = self.case.memory, engine_role(settings, arrangement.layout, self.case.model)
        if memory is None or engine is None or engine.cache_bytes is not None or not on_gpu(settings.device):
            return None
        taken, roles = self._taken(arrangement, settings, engine, recompute, memory)
        each = engine.slot_tokens * cached_values(engine.model, engine.tensor) * engine.width
        vllm, room = settings.rollout.engine == "vllm", int((memory - taken) / (1 + FRAGMENTS))
        weights = ceil_div(engine.model.total, engine.tensor) * engine.width
        share = settings.rollout.vllm.gpu_memory_utilization
        if vllm and CACHE_SHARE in self.given:
            room = min(room, int(share * memory) - weights)
        elif vllm:
            most = floor(_PERCENT * (weights + room) / memory)
            wanted = ceil(_PERCENT * (weights + engine.sequences * each) / memory)
            share = min(most, wanted, int(_PERCENT * _MOST_SHARE)) / _PERCENT
            room = min(room, int(share * memory) - weights)
        if room < each:
            what = (
                f"the cache of one sequence, {each / GIB:,.2f} GiB, does not fit beside what is held while generating"
            )
            return Lack(roles=roles, phase=Phase.GENERATE, lacking=each - room, what=what)
        return share if vllm and CACHE_SHARE not in self.given else None

    def _taken(
        self, arrangement: Arrangement, settings: TrainSettings, engine: EngineRole, recompute: bool, memory: int
    ) -> tuple[int, tuple[Role, ...]]:
        """Bytes that the engine's devices need without its cache while it is awake, and the roles of the fullest."""
        empty = replace(engine, cache_bytes=0)
        roles = replace(self.times.count(arrangement, settings, recompute), engine=empty)
        groups = device_groups(arrangement.layout, roles, memory)
        awake = (Phase.GENERATE,) if engine.sleeps else tuple(Phase)
        with_engine = [group for group in groups if Role.ROLLOUT in group.roles]
        needs = [(max(group.ledger.needed(phase) for phase in awake), group.roles) for group in with_engine]
        return max(needs, key=lambda need: need[0], default=(0, ()))

    def _least(self, arrangement: Arrangement) -> Lack | None:
        """What the models lack at their most frugal; none if they fit then."""
        recompute, (optimizer, parameters) = self._recompute()[-1], self._offloads(arrangement)[-1]
        tokens = self._least_tokens(arrangement)
        budget = Budget(recompute=recompute, tokens=tokens, optimizer=optimizer, parameters=parameters)
        roles = replace(self.times.count(arrangement, self._budgeted(budget), recompute), engine=None)
        return lack_of(device_groups(arrangement.layout, roles, self._room(arrangement)))
