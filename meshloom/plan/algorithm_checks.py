"""Rules across the settings of the algorithm: correction, control of the divergence, functions of the user's own, values that
nothing uses.

Owns: these rules, codes A020 to A029. Refuses to know: devices, models, what such a function computes. Always holds: a refusal
names values that work.
"""

from math import log
from typing import TYPE_CHECKING

from meshloom.config.own import OWN_CHOICES, OwnName
from meshloom.config.settings import AlgorithmSettings, CorrectionSettings, KlPlace

if TYPE_CHECKING:
    from meshloom.plan.checks import Findings

_CORRECTION = "algorithm.correction"
_BOUNDS = {"k1": round(log(2.0), 2), "k2": 0.25, "k3": 0.3}
"""Thresholds of rejection that leave out a ratio of about 2."""
_CONTROL_STEPS = 5
"""Samples of a step, in horizons, at which the weight of the divergence could fall to 0 in one step."""
_READERS = {
    "gamma": ("gae", "reinforce_plus_plus"),
    "lam": ("gae",),
    "normalize_by_std": ("grpo", "grpo_passk"),
    "tau_positive": ("sapo",),
    "tau_negative": ("sapo",),
}
"""Names of estimators and losses that read a key; other keys have other rules."""


def check_choices(found: "Findings", algorithm: AlgorithmSettings, *, samples_per_step: int) -> None:
    """All rules of this module."""
    _check_rejection(found, algorithm.correction)
    _check_weights(found, algorithm.correction)
    _check_proximal(found, algorithm)
    _check_control(found, algorithm, samples_per_step)
    _check_unread(found, algorithm)
    for name in OWN_CHOICES:
        if (own := OwnName.of(getattr(algorithm, name))) is not None and (fault := own.lacking()) is not None:
            found.refuse("A027", f"algorithm.{name}", fault.what, why=fault.why, fix=fault.fix)


def _default(name: str, kind: type[AlgorithmSettings] | type[CorrectionSettings] = AlgorithmSettings) -> object:
    return kind.model_fields[name].default


def _check_rejection(found: "Findings", correction: CorrectionSettings) -> None:
    path = f"{_CORRECTION}.reject_threshold"
    if correction.reject != "none" and correction.reject_threshold is None:
        value = f"{path}={_BOUNDS[correction.reject]:g}"
        what = f"{_CORRECTION}.reject is {correction.reject}, and nothing says what is too much"
        found.refuse("A020", path, what, fix=f"set {value}, for example", suggestions=((value,),))
    if correction.reject == "none":
        for name in ("reject_level", "reject_threshold"):
            if getattr(correction, name) != _default(name, CorrectionSettings):
                what = f"{_CORRECTION}.{name} is not used, as {_CORRECTION}.reject is none"
                found.warn("A022", f"{_CORRECTION}.{name}", what, fix=f"set {_CORRECTION}.reject to k1, k2 or k3")


def _check_weights(found: "Findings", correction: CorrectionSettings) -> None:
    if correction.weights == "banded" and correction.low >= correction.threshold:
        values = (f"{_CORRECTION}.low={correction.threshold / 4:g}", f"{_CORRECTION}.threshold={correction.low * 4:g}")
        found.refuse(
            "A021",
            f"{_CORRECTION}.low",
            f"no weight is in the band from {correction.low:g} to {correction.threshold:g}",
            why="every token's loss would be 0",
            fix=f"set {' or '.join(values if correction.low else values[:1])}",
            suggestions=tuple((value,) for value in (values if correction.low else values[:1])),
        )
    unread = {"none": ("level", "threshold", "low"), "truncated": ("low",)}.get(correction.weights, ())
    for name in unread:
        if getattr(correction, name) != _default(name, CorrectionSettings):
            what = f"{_CORRECTION}.{name} is not used, as {_CORRECTION}.weights is {correction.weights}"
            fix = f"set {_CORRECTION}.weights={'banded' if name == 'low' else 'truncated'}"
            found.warn("A022", f"{_CORRECTION}.{name}", what, fix=fix)


def _check_proximal(found: "Findings", algorithm: AlgorithmSettings) -> None:
    correction = algorithm.correction
    if algorithm.proximal != "sampler" or (correction.weights == "none" and correction.reject == "none"):
        return
    off = (f"{_CORRECTION}.weights=none", f"{_CORRECTION}.reject=none")
    found.refuse(
        "A023",
        "algorithm.proximal",
        "algorithm.proximal is sampler, and a correction is on",
        why="the ratio is then to the sampler itself: there is no gap left to correct",
        fix=f"set algorithm.proximal=trainer, or {' '.join(off)}",
        suggestions=(("algorithm.proximal=trainer",), off),
    )


def _check_control(found: "Findings", algorithm: AlgorithmSettings, samples_per_step: int) -> None:
    path = "algorithm.kl_control"
    if algorithm.kl_control == "fixed":
        for name in ("kl_target", "kl_horizon"):
            if getattr(algorithm, name) != _default(name):
                what = f"algorithm.{name} is not used, as {path} is fixed"
                found.warn("A025", f"algorithm.{name}", what, fix=f"set {path}=adaptive")
    elif algorithm.kl is not KlPlace.REWARD:
        what = f"the weight of the divergence adapts in the reward only, and algorithm.kl is {algorithm.kl}"
        options = ("algorithm.kl=reward", f"{path}=fixed")
        found.refuse("A024", path, what, fix=" or ".join(options), suggestions=tuple((option,) for option in options))
    elif algorithm.kl_coefficient == 0:
        what = "a weight of 0 stays 0: it is multiplied as it adapts"
        value = "algorithm.kl_coefficient=0.001"
        found.refuse("A024", "algorithm.kl_coefficient", what, fix=f"set {value}", suggestions=((value,),))
    elif samples_per_step >= (most := _CONTROL_STEPS * algorithm.kl_horizon):
        value = f"algorithm.kl_horizon={samples_per_step * 10}"
        found.refuse(
            "A028",
            "algorithm.kl_horizon",
            f"a step has {samples_per_step} samples, and algorithm.kl_horizon is {algorithm.kl_horizon:g}",
            why=f"a weight is multiplied by 1 - 0.2 x samples / horizon at the least: from {most:g} samples on, by 0 or less",
            fix=f"set {value}, or a horizon of many steps",
            suggestions=((value,),),
        )


def _check_unread(found: "Findings", algorithm: AlgorithmSettings) -> None:
    """Values that are set and that the chosen estimator and loss do not read; functions of the user's own may."""
    for name, readers in _READERS.items():
        key = "policy_loss" if name.startswith("tau") else "advantage"
        chosen = getattr(algorithm, key)
        if getattr(algorithm, name) != _default(name) and chosen not in readers and ":" not in chosen:
            what = f"algorithm.{name} is not used by algorithm.{key} {chosen}"
            found.warn("A026", f"algorithm.{name}", what, fix=f"{' and '.join(readers)} use it")
