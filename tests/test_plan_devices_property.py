"""Any settings of devices: laid out consistently, or refused with a change that is then accepted; and runs of any size."""

from itertools import product
from math import prod

from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from meshloom.config.load import load_settings
from meshloom.config.settings import TrainSettings
from meshloom.plan.checks import check_settings
from meshloom.plan.device_checks import LaidOut, check_devices, lay_out
from meshloom.plan.faults import with_values
from meshloom.plan.ledger import samples_per_update
from meshloom.plan.meshes import Divisible
from meshloom.plan.placement import Role
from meshloom.plan.spread import Share, even_batches, ledger_over_devices, uneven

REQUIRED = ["run_dir=runs/a", "model.path=models/a", "data.train.reasoning_gym=basic_arithmetic"]
LONG = ["batch.tokens_per_microbatch=1000000"]

degree = st.sampled_from([1, 1, 1, 2, 2, 3, 4, 5, 8, 16])
models = st.none() | st.builds(
    Divisible,
    layers=st.sampled_from([24, 28, 61]),
    heads=st.sampled_from([12, 14, 16, 32]),
    key_value_heads=st.sampled_from([2, 4]),
    intermediate=st.sampled_from([8960, 4864]),
).filter(lambda model: model.heads % model.key_value_heads == 0)


@st.composite
def device_lists(draw: st.DrawFn, nodes: int, size: int) -> str:
    """A list of devices, mostly of those that are there."""
    kind = draw(st.sampled_from(["all", "all", "all", "good", "good", "any"]))
    if kind == "all":
        return "all"
    if kind == "good":
        chosen = draw(st.lists(st.integers(0, nodes * size - 1), min_size=1, max_size=6, unique=True))
        names = [f"node{device // size + 1}:{device % size}" for device in chosen]
        return f"[{','.join(names)}]"
    entries = st.one_of(
        st.integers(-1, size + 1).map(str),
        st.builds("node{}:{}".format, st.integers(1, nodes + 1), st.integers(0, size)),
        st.builds("node{}:all".format, st.integers(1, nodes)),
        st.builds("node{}:{}-{}".format, st.integers(1, nodes), st.integers(0, size), st.integers(0, size)),
        st.sampled_from(["cuda:0", "gpu:1", "nod1:0", "node1", "''", "'node[1-2]:0'", "'node[:0'"]),
    )
    return f"[{','.join(draw(st.lists(entries, max_size=4)))}]"


@st.composite
def any_settings(draw: st.DrawFn) -> list[str]:
    """Overrides about nodes, placement, cuts and batches; some cannot work."""
    nodes, size = draw(st.sampled_from([1, 1, 2, 3, 4])), draw(st.integers(1, 9))
    given = [f"cluster.nodes={nodes}", f"cluster.devices_per_node={size}"]
    if draw(st.integers(0, 5)) == 0:
        given.append("algorithm.max_lag_versions=1")
    for role in ("actor", "rollout", "reference", "critic", "reward"):
        if role in ("actor", "rollout") or draw(st.integers(0, 5)) == 0:
            given.append(f"placement.{role}={draw(device_lists(nodes, size))}")
    for role in ("actor", "reference", "critic"):
        for name in ("tensor", "pipeline", "stages_per_device", "sequence", "fsdp_size"):
            if draw(st.integers(0, 3)) == 0:
                given.append(f"parallel.{role}.{name}={draw(degree)}")
    given.append(f"parallel.rollout.tensor={draw(degree)}")
    given.append(f"algorithm.kl={draw(st.sampled_from(['none', 'loss']))}")
    update = draw(st.integers(1, 24))
    step = update * draw(st.integers(1, 3)) if draw(st.booleans()) else draw(st.integers(1, 64))
    given += [f"batch.prompts_per_step={step}", f"batch.samples_per_prompt={draw(st.integers(1, 6))}"]
    if step % update == 0 and draw(st.booleans()):
        given.append(f"batch.prompts_per_update={update}")
    return given


def loaded(*overrides: str) -> TrainSettings:
    return load_settings(TrainSettings, None, [*REQUIRED, *LONG, *overrides])


def require_consistent(found: LaidOut, model: Divisible | None) -> None:
    """Checked by counting every rank, which the plan itself never does."""
    settings, layout = found.settings, found.layout
    size, total = layout.topology.devices_per_node, layout.topology.num_devices
    for role in layout.roles:
        devices, mesh = list(role.devices), role.mesh
        assert len(set(devices)) == len(devices) == len(role.devices) == prod(mesh.shape)
        assert all(0 <= device < total and role.devices.rank_of(device) == rank for rank, device in enumerate(devices))
        places = [mesh.coordinates(rank) for rank in range(len(devices))]
        assert places == list(product(*(range(axis) for axis in mesh.shape)))
        tensor = mesh.size("tp")
        for first in range(0, len(devices), tensor):
            assert len({device // size for device in devices[first : first + tensor]}) == 1
        if model is not None and role.role not in (Role.REWARD, Role.CRITIC):
            stages = mesh.size("pp") * role.stages_per_device
            assert model.layers % stages == 0 == model.heads % (tensor * mesh.size("sp"))
            assert role.stages_per_device == 1 or mesh.size("pp") > 1
        trained = role.role in (Role.ACTOR, Role.CRITIC)
        step = settings.batch.prompts_per_step * (1 if role.role == Role.ROLLOUT else settings.batch.samples_per_prompt)
        work = samples_per_update(settings) if trained else step
        share = Share(work, role.replicas)
        held = [work // role.replicas + (replica < work % role.replicas) for replica in range(role.replicas)]
        assert sum(held) == work
        assert (min(held), max(held)) == (share.least, share.most)
        assert min(held) >= 1
        assert role.replicas * mesh.size("tp") * mesh.size("sp") * mesh.size("pp") == len(devices)
    grouped = [device for group in layout.shared for device in group.devices]
    assert sorted(grouped) == list(range(total))
    for group in layout.shared:
        for device in group.devices:
            on = tuple(role.role for role in layout.roles if role.devices.rank_of(device) is not None)
            assert on == group.roles
    assert ledger_over_devices(settings, layout)


@hypothesis_settings(max_examples=2000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(any_settings(), models)
def test_settings_are_consistent_or_refused_with_a_change_that_is_accepted(
    overrides: list[str], model: Divisible | None
) -> None:
    found_in = lay_out(loaded(*overrides), model, 0)
    if not found_in.faults:
        require_consistent(found_in, model)
        for change in even_batches(found_in.settings, found_in.layout):
            even = lay_out(with_values(found_in.settings, change), model, 0)
            assert uneven(even.settings, even.layout) == ""
        return
    found = check_settings(found_in.settings, None)
    already = len(found.problems)
    together = check_devices(found, found_in, model, 0, None)
    problems = found.problems[already:]
    assert all(problem.suggestions for problem in problems), problems
    change = together if len(problems) > 1 else problems[0].suggestions[0]
    accepted = lay_out(loaded(*overrides, *change), model, 0)
    assert accepted.faults == (), (problems, change)
    assert len(check_settings(accepted.settings, None).problems) <= already
    require_consistent(accepted, model)


def test_a_thousand_nodes_are_laid_out_and_refused_in_the_time_and_memory_of_one() -> None:
    """By the allocations and steps that it takes, not by the clock: no list of all devices is made."""
    import tracemalloc

    from meshloom.plan.picture import draw

    big = ["cluster.nodes=1024", "cluster.devices_per_node=8", "batch.prompts_per_step=8192", "algorithm.kl=loss"]
    split = ["placement.actor=['node[1-512]:all']", "placement.rollout=['node[513-1024]:0-3','node[513-1024]:4-7']"]
    lists = [f"placement.actor=[{','.join(f'node{node}:{index}' for node in range(1, 1025) for index in (0, 1))}]"]
    for given_too in ([], split, lists):
        given_all = [*big, *given_too, "parallel.actor.tensor=2", "parallel.rollout.tensor=4"]
        tracemalloc.start()
        found = lay_out(loaded(*given_all), None, 0)
        assert found.faults == ()
        text = draw(found.layout)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 20 * 2**20
        assert len(text.splitlines()) < 60
        assert max(map(len, text.splitlines())) <= 80
        assert sum(map(len, (role.devices.ranges for role in found.layout.roles))) <= 3 * 1024
    wrong = lay_out(loaded(*big, "parallel.actor.tensor=16", "parallel.rollout.tensor=3"), None, 0)
    found_in = check_settings(wrong.settings, None)
    assert check_devices(found_in, wrong, None, 0, None)
    assert [problem.code for problem in found_in.problems] == ["G004", "G002"]
