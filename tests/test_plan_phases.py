"""Phases of a step: the picture, the ledger of time and the page show the passes that the loop makes, and no others."""

import json
from pathlib import Path

import pytest

from meshloom.observe.plan_page import Planned, plan_page
from meshloom.plan.placement import Role
from meshloom.plan.report import plan_text
from meshloom.plan.residency import Phase
from meshloom.plan.role_numbers import computes_logprobs
from tests.test_plan_outlook import folder, plan
from tests.test_plan_page import TINY, settings_of

PAIR = ("cluster.devices_per_node=2", "cluster.device=h200", "batch.prompts_per_step=64")
LORA = "model.lora.rank=4"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return folder(tmp_path / "m", TINY, 100)


def samples_of(path: Path, logprobs: list[float] | None) -> str:
    record = {"step": 1, "kind": "train", "group": 0, "prompt_ids": [1], "response_ids": [2], "reward": 1.0}
    path.write_text(json.dumps({**record, "kind": "greedy"}) + "\n" + json.dumps({**record, "logprobs": logprobs}))
    return f"rollout.from_samples={path}"


@pytest.mark.parametrize(
    ("given", "actor", "reference"),
    [
        ((), False, None),
        (("batch.prompts_per_update=32",), True, None),
        (("batch.epochs_per_step=2",), True, None),
        (("algorithm.kl=loss",), False, True),
        (("algorithm.kl=reward",), True, True),
        (("algorithm.kl=loss", LORA), True, None),
        ((LORA,), False, None),
        (("algorithm.correction.reject=k1", "algorithm.correction.reject_threshold=0.5"), True, None),
        (("algorithm.filter_groups.enabled=true",), True, None),
        (("algorithm.proximal=sampler", "batch.epochs_per_step=2"), False, None),
        (("with log-probs",), False, None),
        (("without log-probs",), True, None),
    ],
)
def test_the_pass_of_log_probs_is_shown_where_it_is_made(
    given: tuple[str, ...], actor: bool, reference: bool | None, model: Path, tmp_path: Path
) -> None:
    """The picture showed one for every actor, also where the only update of a step computes them itself."""
    if given[:1] in (("with log-probs",), ("without log-probs",)):
        given = (samples_of(tmp_path / "samples.jsonl", [-0.5] if given[0].startswith("with ") else None),)
    found = plan(model, *PAIR, *given)
    assert {problem.code for problem in found.problems} <= {
        "L002"
    }  # the folder has no layers that adapters could be on
    settings = settings_of(model, *PAIR, *given)
    expected = {Role.ACTOR: actor, Role.REFERENCE: reference}
    assert computes_logprobs(settings) is actor
    for role, makes in expected.items():
        laid_out = found.layout.role(role)
        assert (laid_out is None) is (makes is None)
        assert laid_out is None or ("log-prob" in laid_out.phases) is makes
        assert (found.outlook.forecast.seconds(role, Phase.LOGPROB) > 0) is bool(makes)
    rows = [line for line in plan_text(found).splitlines() if line.startswith("phase ")]
    assert ("log-prob" in rows[0]) is (actor or bool(reference))
    page = plan_page(Planned(plan=found, settings=settings))
    assert ("busy phase-log_prob" in page) is (actor or bool(reference))
    formula = next(line.formula for line in found.lines if line.name == "log-prob microbatches per device")
    assert formula.startswith("no such pass is made") is not actor
