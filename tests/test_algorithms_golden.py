"""Algebra: every recorded case of every algorithm comes out the same, gradients included."""

from pathlib import Path

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
    import json

    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    case = next(c for c in CASES if c["kind"] == "policy_loss")
    good.write_text(json.dumps({"cases": [case]}))
    bad.write_text(json.dumps({"cases": [{**case, "loss": case["loss"] + 2e-9}]}))
    assert main([str(good)]) == 0
    assert main([str(bad)]) == 1
