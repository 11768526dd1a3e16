"""Algebra: every recorded case of every algorithm comes out the same, gradients included."""

import json
from pathlib import Path
from typing import Any

import pytest

from meshloom.algorithms import ADVANTAGES, KL_ESTIMATORS, POLICY_LOSSES, REDUCTIONS
from tests.golden import OUR_NAMES, TOLERANCE, Case, error, load, main

FILE = Path(__file__).parent / "data" / "algorithms.json.gz"
CASES = load(FILE)


def _title(case: Case) -> str:
    details = [case.get("loss_agg_mode"), "weighted" if case.get("use_correction_weights") else None]
    details += ["interleaved" if case.get("interleaved") else None, *map(str, case.get("params", {}).values())]
    return "-".join([case["name"], *(d for d in details if d)])


@pytest.mark.parametrize("case", CASES, ids=_title)
def test_recorded_case_comes_out_the_same(case: Case) -> None:
    assert error(case) <= TOLERANCE


def test_the_recorded_cases_cover_everything_there_is() -> None:
    names = {
        kind: {OUR_NAMES.get(c["name"], c["name"]) for c in CASES if c["kind"] == kind}
        for kind in ("advantage", "policy_loss")
    }
    assert names["advantage"] == set(ADVANTAGES)
    assert names["policy_loss"] == set(POLICY_LOSSES)
    assert {c["loss_agg_mode"] for c in CASES if c["kind"] == "policy_loss"} == set(REDUCTIONS)
    assert {c["name"] for c in CASES if c["kind"] == "kl"} <= set(KL_ESTIMATORS)
    assert len(CASES) == 154


def test_the_program_fails_on_a_wrong_number(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    case = next(c for c in CASES if c["kind"] == "policy_loss")
    good.write_text(json.dumps({"cases": [case]}))
    bad.write_text(json.dumps({"cases": [{**case, "loss": case["loss"] + 2e-9}]}))
    assert main([str(good)]) == 0
    assert main([str(bad)]) == 1


OTHER_NAMES = [
    ("advantage", "grpo", {"name": "grpo_vectorized"}),
    ("advantage", "reinforce_plus_plus", {"name": "reinforce_pp"}),
    ("advantage", "rloo", {"index": [0]}),
    ("policy_loss", "vanilla", {"name": "ppo"}),
    ("kl", "k1", {"name": "kl"}),
    ("kl", "k2", {"name": "mse"}),
    ("kl", "k3", {"name": "low_var_kl"}),
]


@pytest.mark.parametrize(("kind", "name", "changes"), OTHER_NAMES)
def test_cases_may_use_the_other_names_of_a_thing(kind: str, name: str, changes: dict[str, Any]) -> None:
    case = next(case for case in CASES if (case["kind"], case["name"]) == (kind, name))
    if "index" in changes:
        case = {key: value for key, value in case.items() if key != "group"} | {"index": case["group"]}
    else:
        case = {**case, **changes}
    assert error(case) <= TOLERANCE


@pytest.mark.parametrize("kind", ["advantage", "policy_loss", "kl", "value_loss"])
def test_what_is_optional_may_be_missing(kind: str) -> None:
    """Returns, gradients, parameters at their defaults, a mask that is 1 everywhere."""
    case = next(case for case in CASES if case["kind"] == kind)
    expected = ("returns",) if kind == "advantage" else ("grad",)
    bare = {key: value for key, value in case.items() if key not in (*expected, "interleaved")}
    assert error(bare) <= TOLERANCE
    if kind == "policy_loss":
        given = {key: value for key, value in case["params"].items() if key == "clip_ratio_high"}
        assert error({**bare, "params": given, "reduction": bare.pop("loss_agg_mode")}) <= TOLERANCE
    column = {"advantage": "token_rewards", "kl": "logprob"}.get(kind)
    if column is not None:
        full = {**bare, "mask": [[1] * len(row) for row in bare[column]]}
        unmasked = {key: value for key, value in full.items() if key != "mask"}
        assert error(unmasked) == error(full)


def test_what_cannot_be_run_fails_by_name_and_the_rest_is_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case = next(case for case in CASES if case["kind"] == "policy_loss")
    bad = {
        "another_kind": {**case, "kind": "entropy"},
        "nothing_like_it": {**case, "name": "nothing_like_it"},
        "odd_mode": {**case, "name": "gspo", "loss_agg_mode": "token-mean"},
        "no_input": {key: value for key, value in case.items() if key != "old_logprob"},
        "no_number": {key: value for key, value in case.items() if key not in ("loss", "grad")},
        "no_mode": {**case, "loss_agg_mode": "mean-of-means"},
        "short": {**case, "grad": [row[:-1] for row in case["grad"]]},
    }
    for name, broken in bad.items():
        file = tmp_path / f"{name}.json"
        file.write_text(json.dumps([case, broken]))
        assert main([str(file)]) == 1, name
        assert "cannot be run" in capsys.readouterr().out
    (tmp_path / "empty.json").write_text('{"cases": []}')
    assert main([str(tmp_path / "empty.json")]) == 1
