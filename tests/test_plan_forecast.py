"""Ledgers of memory and time of whole settings, over one device and many."""

import json
import random
import time
from pathlib import Path
from typing import Any

import pytest

from meshloom.config.load import load_settings
from meshloom.config.settings import TrainSettings
from meshloom.plan import build_plan
from meshloom.plan.constants import Cluster, Constants
from meshloom.plan.device_checks import lay_out
from meshloom.plan.forecast import Forecast, Lengths, forecast
from meshloom.plan.hardware import find_device
from meshloom.plan.parameters import count_parameters
from meshloom.plan.placement import Role
from meshloom.plan.residency import Phase
from meshloom.plan.role_numbers import computes_old_logprobs

PUBLIC: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "data" / "public_models.json").read_text())
GIB = 2**30
EXACT = Lengths(prompt=34, response=512, longest=512)


def settings_of(*given: str, path: Path | str = "models/a") -> TrainSettings:
    required = ["run_dir=r", f"model.path={path}", "data.train.reasoning_gym=basic_arithmetic"]
    return load_settings(TrainSettings, None, [*required, *given])


def over(name: str, *given: str, device: str = "H200", recompute: bool = False, **more: Any) -> Forecast:
    """The forecast of a public shape on devices of a kind."""
    found = lay_out(settings_of("device=cuda", *given), None, 1)
    assert found.faults == ()
    kind = find_device(device)
    assert kind is not None
    cluster = Cluster(device=kind, devices_per_node=found.layout.topology.devices_per_node)
    model = count_parameters(PUBLIC[name])
    return forecast(found.settings, model, found.layout, cluster, recompute=recompute, **more)


def holdings(found: Forecast, group: int = 0) -> dict[str, int]:
    return {f"{held.role}: {held.name}": held.bytes for held in found.groups[group].ledger.holdings}


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "gemma3"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    "given",
    [
        (),
        ("model.gradient_checkpointing=true", "batch.samples_per_microbatch=2"),
        ("algorithm.kl=loss", "model.dtype=float32"),
        ("algorithm.kl=reward", "model.lora.rank=4", "batch.prompts_per_update=16"),
        ("model.compile=false", "batch.tokens_per_microbatch=3000", "model.logits_chunk_bytes=1000000"),
    ],
    ids=str,
)
def test_one_device_is_as_the_ledger_of_one_device_has_it(
    tmp_path: Path, family: str, device: str, given: tuple[str, ...]
) -> None:
    from meshloom.plan.memory import trainable_parameters
    from meshloom.plan.model_folder import read_model_folder
    from tests.models import tiny_model

    tiny_model(family).save_pretrained(tmp_path)
    settings = settings_of(f"device={device}", "rollout.kv_cache_bytes=1000000", *given, path=tmp_path)
    plan, laid_out = build_plan(settings, 1000), lay_out(settings, None, 1)
    folder = read_model_folder(tmp_path)
    kind = find_device("H200")
    assert kind is not None
    found = forecast(
        settings,
        count_parameters(folder.config),
        laid_out.layout,
        Cluster(device=kind),
        recompute=settings.model.gradient_checkpointing is True,
        adapters=trainable_parameters(settings, folder) if settings.model.lora else None,
    )
    mine = holdings(found)
    for name in (
        "weights",
        "adapter weights",
        "float32 masters",
        "optimizer moments",
        "gradients",
        "logits",
        "activations",
    ):
        assert mine.get(f"actor: {name}", 0) == next((line.value for line in plan.lines if line.name == name), 0), name
    assert mine["rollout: key-value cache"] == plan.value("key-value cache")
    (group,) = found.groups
    assert group.ledger.held(Phase.UPDATE) == plan.value("peak while updating")
    assert group.ledger.held(Phase.GENERATE) == plan.value("peak while generating")


@pytest.mark.parametrize(
    ("name", "generate_s", "update_s", "step_s"),
    [("Qwen2.5-0.5B", 1.43, 2.04, 3.51), ("Qwen2.5-1.5B", 2.75, 4.97, 7.77)],
)
def test_a_step_of_a_run_takes_what_was_measured(name: str, generate_s: float, update_s: float, step_s: float) -> None:
    """On one H200: 64 prompts of about 34 tokens × 8 samples of 512, all in flight."""
    given = ("rollout.max_sequences=512", "batch.tokens_per_microbatch=32768", "rollout.max_response_tokens=512")
    found = over(name, *given, lengths=EXACT)
    assert found.seconds(Role.ROLLOUT, Phase.GENERATE) == pytest.approx(generate_s, rel=0.13)
    assert found.seconds(Role.ACTOR, Phase.UPDATE) == pytest.approx(update_s, rel=0.12)
    assert found.seconds(Role.ACTOR, Phase.LOGPROB) == 0
    assert found.step_s == pytest.approx(step_s, rel=0.1)


@pytest.mark.parametrize(
    ("name", "tokens", "moments", "measured_gib"),
    [
        ("Qwen2.5-0.5B", 16380, False, 20),
        ("Qwen2.5-1.5B", 16380, False, 46),
        ("Qwen2.5-0.5B", 32768, True, 38),
        ("Qwen2.5-1.5B", 32768, True, 91),
    ],
)
def test_the_peak_of_a_run_is_near_what_a_gpu_held(name: str, tokens: int, moments: bool, measured_gib: int) -> None:
    found = over(name, f"batch.tokens_per_microbatch={tokens}")
    held = found.groups[0].ledger.held(Phase.UPDATE)
    held -= 0 if moments else holdings(found)["actor: optimizer moments"]
    assert held / GIB == pytest.approx(measured_gib, rel=0.025)


EIGHT = ("cluster.devices_per_node=8", "batch.prompts_per_step=512")


def test_eight_devices_shard_and_share_the_work() -> None:
    one = over("Qwen2.5-7B", "batch.prompts_per_step=512", lengths=EXACT)
    eight = over("Qwen2.5-7B", *EIGHT, lengths=EXACT)
    assert holdings(eight)["actor: optimizer moments"] == -(-count_parameters(PUBLIC["Qwen2.5-7B"]).total // 8) * 8
    # The engine needs whole weights, which shards are not: it has a copy, and the copy is moved.
    assert "rollout: engine's weights" not in holdings(one)
    assert holdings(eight)["rollout: engine's weights"] == 2 * count_parameters(PUBLIC["Qwen2.5-7B"]).total
    assert one.seconds(Role.ROLLOUT, Phase.SYNC) == 0 < eight.seconds(Role.ROLLOUT, Phase.SYNC) < 0.2
    assert one.step_s / 9 < eight.step_s < one.step_s / 6
    (group,) = eight.groups
    assert (len(group.devices), group.roles) == (8, (Role.ACTOR, Role.ROLLOUT))
    assert group.ledger.margin(Phase.UPDATE) > 0


def test_replicas_have_whole_weights_and_add_up_their_gradients() -> None:
    found = over("Qwen2.5-1.5B", *EIGHT, "parallel.actor.fsdp_size=1", lengths=EXACT)
    assert "rollout: engine's weights" in holdings(found)
    update = next(phase for phase in found.phases if phase.phase is Phase.UPDATE)
    assert "sums over replicas" in [part.name for part in update.parts]


def test_pools_of_their_own_hold_their_own() -> None:
    split = ("placement.actor=[0, 1, 2, 3]", "placement.rollout=[4, 5, 6, 7]")
    found = over("Qwen2.5-7B", *EIGHT, *split, lengths=EXACT)
    assert [group.roles for group in found.groups] == [(Role.ACTOR,), (Role.ROLLOUT,)]
    training, rollout = (group.ledger for group in found.groups)
    assert training.held(Phase.GENERATE) < training.held(Phase.UPDATE)
    assert not any(held.role == "actor" for held in rollout.holdings)
    together = over("Qwen2.5-7B", *EIGHT, lengths=EXACT)
    assert found.step_s > together.step_s
    lagged = over("Qwen2.5-7B", *EIGHT, *split, "algorithm.max_lag_versions=1", lengths=EXACT)
    slowest = max(lagged.seconds(Role.ROLLOUT, Phase.GENERATE), sum(p.seconds for p in lagged.phases[1:]))
    assert lagged.step_s == pytest.approx(slowest + Constants().beside_phases_s)
    assert lagged.step_s < found.step_s
    assert lagged.seconds(Role.ACTOR, Phase.LOGPROB) > 0


def test_roles_on_devices_of_their_own_work_at_once() -> None:
    """Reference and actor: their log-probs add up on shared devices, and the slower counts on others."""
    given = ("algorithm.kl=reward", "cluster.devices_per_node=8")
    shared = over("Qwen2.5-7B", *given, lengths=EXACT)
    apart = over(
        "Qwen2.5-7B", *given, "placement.reference=[4, 5, 6, 7]", "placement.actor=[0, 1, 2, 3]", lengths=EXACT
    )
    both = [shared.seconds(role, Phase.LOGPROB) for role in (Role.ACTOR, Role.REFERENCE)]
    assert both[0] == both[1] > 0
    steps = {}
    for name, found in (("shared", shared), ("apart", apart)):
        rest = [phase.seconds for phase in found.phases if phase.phase is not Phase.LOGPROB]
        steps[name] = found.step_s - sum(rest) - Constants().beside_phases_s
    assert steps["shared"] == pytest.approx(sum(both))
    assert steps["apart"] == pytest.approx(apart.seconds(Role.ACTOR, Phase.LOGPROB))


def test_a_critic_has_a_head_of_one_output_and_its_own_update() -> None:
    found = over("Qwen2.5-1.5B", "algorithm.advantage=gae", "cluster.devices_per_node=1", "algorithm.kl=none")
    model = count_parameters(PUBLIC["Qwen2.5-1.5B"])
    assert holdings(found)["critic: weights"] == 2 * (model.total + model.hidden + 1)
    critic, actor = (found.seconds(role, Phase.UPDATE) for role in (Role.CRITIC, Role.ACTOR))
    assert 0.7 * actor < critic < actor
    assert 0 < found.seconds(Role.CRITIC, Phase.VALUES) < critic
    assert found.seconds(Role.CRITIC, Phase.LOGPROB) == 0
    names = {holding.name for holding in found.groups[0].ledger.holdings if holding.role == "critic"}
    assert {"weights", "optimizer moments", "gradients", "activations", "activations in values"} <= names
    assert holdings(found)["critic: logits"] < 2**20 < holdings(found)["actor: logits"]


def test_offload_is_counted_in_memory_and_time() -> None:
    given = ("offload.actor.optimizer=host", "offload.actor.parameters=host", *EIGHT)
    here, away = over("Qwen2.5-7B", *EIGHT), over("Qwen2.5-7B", *given)
    state = sum(holdings(here)[f"actor: {name}"] for name in ("weights", "optimizer moments"))
    before, after = (found.groups[0].ledger.held(Phase.GENERATE) for found in (here, away))
    caches = [holdings(found)["rollout: key-value cache"] for found in (here, away)]
    assert after - before == caches[1] - caches[0] - state
    seconds = sum(part.seconds for part in away.offload)
    assert seconds == pytest.approx(2 * state / 55e9, rel=0.01)
    assert away.step_s - here.step_s == pytest.approx(seconds, rel=0.2)


def test_seventy_billion_on_eight_devices_of_eighty_gigabytes() -> None:
    """16 bytes a parameter and shards of eight: no room without offload; with it there is."""
    given = (
        *EIGHT,
        "parallel.rollout.tensor=8",
        "batch.tokens_per_microbatch=8192",
        "rollout.max_response_tokens=1024",
    )
    plain = over("Llama-3.1-70B", *given, device="H100", recompute=True)
    assert plain.groups[0].ledger.margin(Phase.UPDATE) < 0
    moved = (*given, "offload.actor.optimizer=host", "offload.actor.parameters=host")
    found = over("Llama-3.1-70B", *moved, device="H100", recompute=True).groups[0].ledger
    assert found.margin(Phase.GENERATE) > 0 > found.margin(Phase.UPDATE)
    two = over("Llama-3.1-70B", *moved, "cluster.nodes=4", device="H100", recompute=True).groups[0].ledger
    assert min(two.margin(phase) for phase in Phase) > 0


def test_a_cache_that_is_small_makes_generation_slow() -> None:
    roomy = over("Qwen2.5-7B", "rollout.max_response_tokens=2048")
    tight = over("Qwen2.5-7B", "rollout.max_response_tokens=2048", "rollout.kv_cache_bytes=4000000000")
    assert tight.seconds(Role.ROLLOUT, Phase.GENERATE) > 2 * roomy.seconds(Role.ROLLOUT, Phase.GENERATE)


def test_eight_thousand_devices_take_no_longer_to_plan() -> None:
    given = (
        "cluster.nodes=1024",
        "cluster.devices_per_node=8",
        "parallel.actor.fsdp_size=64",
        "parallel.rollout.tensor=8",
    )
    started = time.process_time()
    found = over("DeepSeek-V3", *given, "batch.prompts_per_step=16384", recompute=True)
    assert time.process_time() - started < 10
    assert len(found.groups) == 1
    assert found.step_s > 0


def test_a_second_pass_is_counted_where_something_needs_log_probs_before_the_update() -> None:
    reject = ("algorithm.correction.reject=k1", "algorithm.correction.reject_threshold=0.5")
    needed = {
        (): False,
        ("algorithm.kl=loss",): False,
        ("algorithm.correction.weights=truncated",): False,
        ("batch.prompts_per_update=64",): False,
        ("batch.prompts_per_update=32",): True,
        ("batch.epochs_per_step=2",): True,
        ("algorithm.max_lag_versions=1",): True,
        ("algorithm.kl=reward",): True,
        ("algorithm.filter_groups.enabled=true",): True,
        ("algorithm.filter_groups={enabled: true, surplus_steps: 0}",): False,
        reject: True,
        ("algorithm.proximal=sampler", "batch.epochs_per_step=2", "algorithm.kl=reward"): False,
    }
    assert {
        given: computes_old_logprobs(settings_of("batch.prompts_per_step=64", *given)) for given in needed
    } == needed


def test_every_run_that_can_be_laid_out_has_a_forecast() -> None:
    """Hundreds of settings by chance: ledgers add up, and nothing is negative."""
    pick, made = random.Random(0), 0
    for _ in range(400):
        given = [
            f"cluster.nodes={pick.choice([1, 2, 4])}",
            f"cluster.devices_per_node={pick.choice([1, 4, 8])}",
            f"parallel.actor.tensor={pick.choice([1, 2, 4])}",
            f"parallel.actor.pipeline={pick.choice([1, 2])}",
            f"parallel.actor.sequence={pick.choice([1, 2])}",
            f"parallel.rollout.tensor={pick.choice([1, 2, 4])}",
            f"batch.prompts_per_step={pick.choice([32, 64, 256])}",
            f"algorithm.kl={pick.choice(['none', 'loss', 'reward'])}",
            f"offload.actor.optimizer={pick.choice(['none', 'host', 'disk'])}",
            f"offload.reference.parameters={pick.choice(['none', 'host'])}",
        ]
        laid_out = lay_out(settings_of("device=cuda", *given), None, 1)
        if laid_out.faults:
            continue
        made += 1
        kind = find_device(pick.choice(["H100", "A100 40GB", "RTX 4090"]))
        assert kind is not None
        topology = laid_out.layout.topology
        cluster = Cluster(device=kind, devices_per_node=topology.devices_per_node)
        model = count_parameters(PUBLIC[pick.choice(["Qwen2.5-0.5B", "Llama-3.1-8B", "Qwen3-30B-A3B"])])
        found = forecast(laid_out.settings, model, laid_out.layout, cluster, recompute=pick.random() < 0.5)
        assert sum(len(group.devices) for group in found.groups) == topology.num_devices
        for group in found.groups:
            held = group.ledger.holdings
            assert min(holding.bytes for holding in held) >= 0
            assert group.ledger.peak[1] <= sum(holding.bytes for holding in held)
            assert len({(holding.role, holding.name) for holding in held}) == len(held)
        assert all(part.seconds >= 0 for phase in found.phases for part in phase.parts)
        assert found.step_s > max(phase.seconds for phase in found.phases)
        names = [line.name for line in found.lines(cluster, Constants())]
        assert len(names) == len(set(names))
    assert made > 100
