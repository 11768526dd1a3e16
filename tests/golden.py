"""Run recorded cases of every algorithm and compare: ``python -m tests.golden FILE.json [FILE.json.gz …]``.

The cases were computed in float64 by an independent public implementation; a file says by which (``source``). Each has its
inputs as ragged rows (one list a sample) and the numbers that must come out, gradients included. Names are ours or those of
that implementation; keys of a case that are optional may be missing, as may expected numbers that it does not have. Prints the
worst error of each kind and name; the exit code is 1 if one exceeds 1e-9 or a case cannot be run, which is then explained.
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
    check_reduction,
    denominators,
    reduce,
    value_loss,
)
from meshloom.config.errors import UserError

Case = dict[str, Any]
Pairs = list[tuple[Tensor, Tensor]]
TOLERANCE = 1e-9
OUR_NAMES = {
    "vanilla": "ppo",
    "geo_mean": "gmpo",
    "reinforce_pp": "reinforce_plus_plus",
    "reinforce_pp_baseline": "reinforce_plus_plus_baseline",
    "grpo_vectorized": "grpo",
    "rloo_vectorized": "rloo",
}
"""Names of the implementation that made the cases, and of recipes, that are others here."""
WITHOUT_STD = {"dr_grpo": "grpo"}
"""Names that are an estimator without the division by the deviation."""


class CannotRun(ValueError):
    """A case that is not understood, or that says nothing to compare with."""


def load(path: Path) -> list[Case]:
    """The cases of a JSON file, compressed or not: a list, or an object with ``cases``.

    Raises:
        CannotRun: if it holds neither.
    """
    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    document = json.loads(raw)
    cases = document.get("cases") if isinstance(document, dict) else document
    if not isinstance(cases, list) or not all(isinstance(case, dict) for case in cases):
        raise CannotRun(f"{path} holds no cases")
    return cases


def error(case: Case) -> float:
    """The largest absolute difference between what a case says and what comes out, its loss and gradient included.

    Raises:
        CannotRun: if the case cannot be run.
    """
    kind = case.get("kind")
    if kind not in RUN:
        raise CannotRun(f"the kind {kind!r} is none of {', '.join(RUN)}")
    try:
        pairs = RUN[kind](case)
    except KeyError as missing:
        raise CannotRun(f"the case has no {missing}") from missing
    except UserError as refused:
        raise CannotRun(str(refused).replace("\n", ";")) from refused
    if not pairs:
        raise CannotRun("the case expects no number")
    return max(_differences(pairs))


def _differences(pairs: Iterable[tuple[Tensor, Tensor]]) -> Iterable[float]:
    for ours, theirs in pairs:
        if ours.shape != theirs.shape or not bool(torch.isfinite(ours).all()):
            raise CannotRun(f"shape {tuple(ours.shape)} for {tuple(theirs.shape)}, or not finite")
        yield float((ours.detach() - theirs).abs().max()) if ours.numel() else 0.0


def _tokens(case: Case, key: str) -> Tensor:
    """A ragged column end to end, float64 [T]."""
    return torch.tensor([x for row in case[key] for x in row], dtype=torch.float64)


def _expected(case: Case, key: str, mask_T: Tensor) -> Tensor:
    """A ragged column of expected numbers, those of the tokens in the mask."""
    found_T = _tokens(case, key)
    if len(found_T) != len(mask_T):
        raise CannotRun(f"{key} has {len(found_T)} numbers for {len(mask_T)} tokens")
    return found_T[mask_T]


def _optional(case: Case, key: str) -> Tensor | None:
    return _tokens(case, key) if case.get(key) is not None else None


def _layout(case: Case, like: str) -> tuple[Tensor, Tensor]:
    """mask_T and lengths_S; without a mask every token of the column ``like`` counts."""
    rows = case.get("mask") or [[1] * len(row) for row in case[like]]
    return torch.tensor([bool(x) for row in rows for x in row]), torch.tensor([len(row) for row in rows])


def _param(case: Case, default: Any, *names: str) -> Any:
    """A parameter under the first of its names that the case has, among its parameters or beside them."""
    params = case.get("params") or {}
    return next((where[name] for where in (params, case) for name in names if name in where), default)


def _advantage(case: Case) -> Pairs:
    mask_T, lengths_S = _layout(case, "token_rewards")
    name = case["name"]
    groups = case.get("group", case.get("index"))
    labels = list(range(len(lengths_S))) if groups is None else groups
    places = {label: number for number, label in enumerate(dict.fromkeys(labels))}
    greedy = case.get("greedy_reward", case.get("reward_baselines"))
    valid = case.get("valid")
    outputs = ADVANTAGES.find(WITHOUT_STD.get(name, OUR_NAMES.get(name, name)))(
        AdvantageInputs(
            token_rewards_T=_tokens(case, "token_rewards"),
            mask_T=mask_T,
            lengths_S=lengths_S,
            group_S=torch.tensor([places[label] for label in labels]),
            valid_S=None if valid is None else torch.tensor([bool(x) for x in valid]),
            values_T=_optional(case, "values"),
            greedy_reward_S=None if greedy is None else torch.tensor(greedy, dtype=torch.float64),
            gamma=_param(case, 1.0, "gamma"),
            lam=_param(case, 1.0, "lam", "lambda"),
            normalize_by_std=name not in WITHOUT_STD
            and _param(case, True, "norm_adv_by_std_in_grpo", "normalize_by_std"),
        )
    )
    pairs = [(outputs.advantages_T[mask_T], _expected(case, "advantages", mask_T))]
    if case.get("returns") is not None:
        returns_T = outputs.advantages_T if outputs.returns_T is None else outputs.returns_T
        pairs.append((returns_T[mask_T], _expected(case, "returns", mask_T)))
    return pairs


def _policy_loss(case: Case) -> Pairs:
    mask_T, lengths_S = _layout(case, "logprob")
    loss = POLICY_LOSSES.find(OUR_NAMES.get(case["name"], case["name"]))
    mode, constant = _mode(case, loss.reduction or "token-mean")
    if loss.reduction not in (None, mode):
        raise CannotRun(f"{loss.name} is reduced as {loss.reduction}, the case says {mode}")
    logprob_T = _tokens(case, "logprob").requires_grad_()
    both = _param(case, 0.2, "clip_ratio")
    weighted = case.get("use_correction_weights", "correction_weights" in case)
    outputs = loss(
        PolicyInputs(
            logprob_T=logprob_T,
            old_logprob_T=_tokens(case, "old_logprob"),
            advantages_T=_tokens(case, "advantages"),
            mask_T=mask_T,
            lengths_S=lengths_S,
            correction_weights_T=_tokens(case, "correction_weights") if weighted else None,
        ),
        PolicySettings(
            clip_low=_param(case, both, "clip_ratio_low", "clip_low"),
            clip_high=_param(case, both, "clip_ratio_high", "clip_high"),
            dual_clip=_param(case, 3.0, "clip_ratio_c", "dual_clip"),
            tau_positive=_param(case, 1.0, "tau_pos", "tau_positive"),
            tau_negative=_param(case, 1.05, "tau_neg", "tau_negative"),
        ),
    )
    divisors = denominators(mask_T, lengths_S, constant=constant)
    return _loss_and_gradient(case, reduce(outputs.per_token_T, mask_T, lengths_S, mode, divisors), logprob_T, mask_T)


def _mode(case: Case, default: str) -> tuple[str, float | None]:
    """The reduction and its constant."""
    mode = _param(case, default, "loss_agg_mode", "reduction")
    constant = _param(case, None, "loss_scale_factor", "reduction_constant")
    check_reduction(mode, constant)
    return mode, constant


def _kl(case: Case) -> Pairs:
    mask_T, _ = _layout(case, "logprob")
    logprob_T = _tokens(case, "logprob").requires_grad_()
    kl_T = KL_ESTIMATORS.find(case["name"])(logprob_T, _tokens(case, "ref_logprob"), mask_T)
    kl_T.sum().backward()
    pairs = [(kl_T[mask_T], _expected(case, "value", mask_T))]
    return pairs if case.get("grad") is None else [*pairs, (logprob_T.grad[mask_T], _expected(case, "grad", mask_T))]


def _value_loss(case: Case) -> Pairs:
    mask_T, lengths_S = _layout(case, "predictions")
    value_T = _tokens(case, "predictions").requires_grad_()
    clip = _param(case, 0.5, "cliprange_value", "clip")
    mode, constant = _mode(case, "token-mean")
    loss_T = value_loss(value_T, _tokens(case, "old_values"), _tokens(case, "returns"), mask_T, clip=clip)
    total = reduce(loss_T, mask_T, lengths_S, mode, denominators(mask_T, lengths_S, constant=constant))
    return _loss_and_gradient(case, total, value_T, mask_T)


def _loss_and_gradient(case: Case, total: Tensor, of: Tensor, mask_T: Tensor) -> Pairs:
    total.backward()
    pairs = [(total, torch.tensor(case["loss"], dtype=torch.float64))] if case.get("loss") is not None else []
    return pairs if case.get("grad") is None else [*pairs, (of.grad[mask_T], _expected(case, "grad", mask_T))]


RUN: dict[str, Callable[[Case], Pairs]] = {
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
    reasons: dict[tuple[str, str], str] = {}
    for case in (case for path in paths for case in load(Path(path))):
        key = (str(case.get("kind")), str(case.get("name")))
        try:
            found = error(case)
        except CannotRun as reason:
            found = float("inf")
            reasons.setdefault(key, str(reason))
        worst.setdefault(key, []).append(found)
    for (kind, name), errors in sorted(worst.items()):
        reason = f"  cannot be run: {reasons[kind, name]}" if (kind, name) in reasons else ""
        print(f"{kind:12} {name:30} {len(errors):4} cases  worst error {max(errors):.1e}{reason}")
    failed = [key for key, errors in worst.items() if not max(errors) <= TOLERANCE]
    print(f"{sum(map(len, worst.values()))} cases, {len(failed)} names above {TOLERANCE:.0e}")
    return 1 if failed or not worst else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
