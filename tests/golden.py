"""Run recorded cases of every algorithm and compare: ``python -m tests.golden FILE.json [FILE.json.gz …]``.

The cases were computed in float64 by an independent public implementation; a file says by which (``source``). Each has its
inputs as ragged rows (one list a sample) and the numbers that must come out, gradients included. Prints the worst error of
each kind and name; the exit code is 1 if one exceeds 1e-9 or a case cannot be run.
"""

import gzip
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshloom.algorithms import (
    ADVANTAGES,
    KL_ESTIMATORS,
    POLICY_LOSSES,
    AdvantageInputs,
    PolicyInputs,
    PolicySettings,
    denominators,
    reduce,
    value_loss,
)

Case = dict[str, Any]
TOLERANCE = 1e-9
OUR_NAMES = {"vanilla": "ppo", "geo_mean": "gmpo"}


def load(path: Path) -> list[Case]:
    """The cases of a JSON file, compressed or not."""
    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return json.loads(raw)["cases"]


def error(case: Case) -> float:
    """The largest absolute difference between what a case says and what comes out, its loss and gradient included."""
    return max(_differences(RUN[case["kind"]](case)))


def _differences(pairs: Iterable[tuple[Tensor, Tensor]]) -> Iterable[float]:
    for ours, theirs in pairs:
        if ours.shape != theirs.shape or not bool(torch.isfinite(ours).all()):
            raise ValueError(f"shape {tuple(ours.shape)} for {tuple(theirs.shape)}, or not finite")
        yield float((ours.detach() - theirs).abs().max())


def _tokens(case: Case, key: str) -> Tensor:
    """A ragged column end to end, float64 [T]."""
    return torch.tensor([x for row in case[key] for x in row], dtype=torch.float64)


def _layout(case: Case) -> tuple[Tensor, Tensor]:
    """mask_T and lengths_S."""
    return _tokens(case, "mask").bool(), torch.tensor([len(row) for row in case["mask"]])


def _advantage(case: Case) -> list[tuple[Tensor, Tensor]]:
    mask_T, lengths_S = _layout(case)
    names = sorted(set(case["group"]))
    params = dict(case["params"])
    outputs = ADVANTAGES.find(case["name"])(
        AdvantageInputs(
            token_rewards_T=_tokens(case, "token_rewards"),
            mask_T=mask_T,
            lengths_S=lengths_S,
            group_S=torch.tensor([names.index(name) for name in case["group"]]),
            values_T=_tokens(case, "values") if "values" in case else None,
            greedy_reward_S=torch.tensor(case["greedy_reward"], dtype=torch.float64)
            if "greedy_reward" in case
            else None,
            normalize_by_std=params.pop("norm_adv_by_std_in_grpo", True),
            **params,
        )
    )
    returns_T = outputs.advantages_T if outputs.returns_T is None else outputs.returns_T
    return [(outputs.advantages_T, _tokens(case, "advantages")), (returns_T[mask_T], _tokens(case, "returns")[mask_T])]


def _policy_loss(case: Case) -> list[tuple[Tensor, Tensor]]:
    mask_T, lengths_S = _layout(case)
    params = case["params"]
    loss = POLICY_LOSSES.find(OUR_NAMES.get(case["name"], case["name"]))
    if loss.reduction not in (None, case["loss_agg_mode"]):
        raise ValueError(f"{loss.name} is reduced as {loss.reduction}, the case says {case['loss_agg_mode']}")
    logprob_T = _tokens(case, "logprob").requires_grad_()
    outputs = loss(
        PolicyInputs(
            logprob_T=logprob_T,
            old_logprob_T=_tokens(case, "old_logprob"),
            advantages_T=_tokens(case, "advantages"),
            mask_T=mask_T,
            lengths_S=lengths_S,
            correction_weights_T=_tokens(case, "correction_weights") if case["use_correction_weights"] else None,
        ),
        PolicySettings(
            clip_low=params["clip_ratio_low"],
            clip_high=params["clip_ratio_high"],
            dual_clip=params["clip_ratio_c"],
            tau_positive=params["tau_pos"],
            tau_negative=params["tau_neg"],
        ),
    )
    divisors = denominators(mask_T, lengths_S, constant=params["loss_scale_factor"])
    total = reduce(outputs.per_token_T, mask_T, lengths_S, case["loss_agg_mode"], divisors)
    return _loss_and_gradient(case, total, logprob_T)


def _kl(case: Case) -> list[tuple[Tensor, Tensor]]:
    mask_T, _ = _layout(case)
    logprob_T = _tokens(case, "logprob").requires_grad_()
    kl_T = KL_ESTIMATORS.find(case["name"])(logprob_T, _tokens(case, "ref_logprob"), mask_T)
    kl_T.sum().backward()
    return [(kl_T[mask_T], _tokens(case, "value")[mask_T]), (logprob_T.grad[mask_T], _tokens(case, "grad")[mask_T])]


def _value_loss(case: Case) -> list[tuple[Tensor, Tensor]]:
    mask_T, lengths_S = _layout(case)
    value_T = _tokens(case, "predictions").requires_grad_()
    clip = case["params"]["cliprange_value"]
    loss_T = value_loss(value_T, _tokens(case, "old_values"), _tokens(case, "returns"), mask_T, clip=clip)
    total = reduce(loss_T, mask_T, lengths_S, case["loss_agg_mode"], denominators(mask_T, lengths_S))
    return _loss_and_gradient(case, total, value_T)


def _loss_and_gradient(case: Case, total: Tensor, of: Tensor) -> list[tuple[Tensor, Tensor]]:
    total.backward()
    return [(total, torch.tensor(case["loss"], dtype=torch.float64)), (of.grad, _tokens(case, "grad"))]


RUN: dict[str, Callable[[Case], list[tuple[Tensor, Tensor]]]] = {
    "advantage": _advantage,
    "policy_loss": _policy_loss,
    "kl": _kl,
    "value_loss": _value_loss,
}


def main(paths: list[str]) -> int:
    """Run all cases of all files; the exit code."""
    if not paths:
        print(__doc__)
        return 2
    worst: dict[tuple[str, str], list[float]] = {}
    for case in (case for path in paths for case in load(Path(path))):
        worst.setdefault((case["kind"], case["name"]), []).append(error(case))
    for (kind, name), errors in sorted(worst.items()):
        print(f"{kind:12} {name:30} {len(errors):4} cases  worst error {max(errors):.1e}")
    failed = [key for key, errors in worst.items() if not max(errors) <= TOLERANCE]
    print(f"{sum(map(len, worst.values()))} cases, {len(failed)} names above {TOLERANCE:.0e}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
