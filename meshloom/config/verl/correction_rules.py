"""verl's keys of the correction between sampler and trainer, in their present form and two earlier ones.

Owns: their meaning here. Always holds: a weight or rejection that has no exact counterpart is refused, never replaced.
"""

from math import isclose, log

from meshloom.config.verl.actor_rules import ACTOR
from meshloom.config.verl.sheet import Sheet

GROUP = "algorithm.rollout_correction"
_OURS = "algorithm.correction"
_LEVELS = {"token": "token", "seq_mean": "sequence-mean", "seq_max": "sequence-max"}
_EARLIER = {"token": "token_k1", "geometric": "seq_mean_k1"}
"""Names of rejections that had no measure in them."""


def correction_rules(sheet: Sheet) -> None:
    """Importance weights, rejection, and whose log-probs the ratio is to."""
    bypass = f"{GROUP}.bypass_mode"
    if sheet.flag(bypass):
        sheet.set("algorithm.proximal", "sampler", bypass)
        mode = sheet.text(f"{ACTOR}.policy_loss.loss_mode")
        if mode not in ("", "vanilla", "dppo_tv", "dppo_kl"):
            sheet.warn(bypass, f"verl computes PPO's clipped loss with it, whatever loss_mode says; here it is {mode}")
    weighs = _weights(sheet)
    rejects = _rejection(sheet)
    if rejects and sheet.flag(bypass):
        sheet.refuse(rejects, "with bypass_mode the ratio is to the sampler itself, and no gap is left; set it to null")
    if weighs and sheet.flag(bypass):
        _leave_unweighed(sheet)
    if sheet.flag(f"{GROUP}.use_policy_gradient") or sheet.text(f"{GROUP}.loss_type") not in ("", "ppo_clip"):
        key = f"{GROUP}.use_policy_gradient" if sheet.flag(f"{GROUP}.use_policy_gradient") else f"{GROUP}.loss_type"
        sheet.refuse(key, "the loss is chosen by actor.policy_loss.loss_mode; leave this out, and set that to gpg")
    for name, off in (("rollout_token_veto_threshold", None), ("rollout_is_batch_normalize", False)):
        if sheet.value(f"{GROUP}.{name}") not in (None, False, off):
            sheet.refuse(f"{GROUP}.{name}", "it is not offered; set it to null")
    refused = [key for key in sheet.refused if key.startswith((GROUP, "algorithm.rollout_is"))]
    why = f"it belongs to {refused[0]}, which is refused" if refused else "no correction that is on uses it"
    names = [key for key in sheet.given.entries if key.startswith((f"{GROUP}.", "algorithm.rollout_is"))]
    sheet.ignore(why, *names, f"{ACTOR}.tis_imp_ratio_cap")


def _leave_unweighed(sheet: Sheet) -> None:
    """With ``bypass_mode`` the ratio of the clipped loss is the whole correction, in verl too: weights are only measured."""
    for path in [path for path in sheet.settings if path.startswith(f"{_OURS}.")]:
        if not path.startswith(f"{_OURS}.reject"):
            del sheet.settings[path]
    keys = [key for key, paths in sheet.translated.items() if all(path.startswith(_OURS) for path in paths)]
    for key in keys:
        del sheet.translated[key]
    why = "with bypass_mode the clipped ratio to the sampler corrects, and weights are not applied, in verl either"
    sheet.ignore(why, *keys)


def _is_on(sheet: Sheet, key: str) -> bool:
    return sheet.value(key) not in (None, False, "null", "None")


def _weights(sheet: Sheet) -> str:
    """The weights; the key that asks for them, or empty."""
    key, threshold = f"{GROUP}.rollout_is", f"{GROUP}.rollout_is_threshold"
    cap = f"{ACTOR}.tis_imp_ratio_cap"
    if _is_on(sheet, key):
        level, keys = sheet.text(key), (key,)
    elif _is_on(sheet, "algorithm.rollout_is") and not sheet.has(threshold):
        sheet.warn(
            "algorithm.rollout_is", "nothing is weighed, as in verl: algorithm.rollout_is_threshold is not given"
        )
        return ""
    elif _is_on(sheet, "algorithm.rollout_is"):
        key, keys = "algorithm.rollout_is", ("algorithm.rollout_is", "algorithm.rollout_is_level")
        level = sheet.text("algorithm.rollout_is_level", "token")
        mode = sheet.text("algorithm.rollout_is_mode", "truncate")
        if mode != "truncate":
            sheet.refuse("algorithm.rollout_is_mode", f"{mode!r} has no counterpart; use rollout_correction.rollout_is")
        sheet.count(f"{_OURS}.weights", "algorithm.rollout_is_mode")
    elif (sheet.number(cap) or 0) > 0:
        sheet.set(f"{_OURS}.weights", "truncated", cap)
        sheet.set(f"{_OURS}.threshold", sheet.number(cap), cap)
        return cap
    else:
        return ""
    if level not in ("token", "sequence"):
        sheet.refuse(key, f"weights of the level {level!r} have no counterpart here; use token or sequence")
        return key
    sheet.set(f"{_OURS}.level", level, *keys)
    bounds = _bounds(sheet, threshold)
    sheet.set(f"{_OURS}.weights", "truncated" if bounds[0] is None else "banded", key, threshold)
    if bounds[0] is not None:
        sheet.set(f"{_OURS}.low", bounds[0], threshold)
    sheet.set(f"{_OURS}.threshold", bounds[1], threshold)
    return key


def _bounds(sheet: Sheet, key: str) -> tuple[float | None, float]:
    """A threshold, or a band written ``low_high``."""
    low, between, high = sheet.text(key, "2.0").partition("_")
    try:
        return (float(low), float(high)) if between else (None, float(low))
    except ValueError:
        sheet.refuse(key, f"{sheet.text(key)!r} is neither a number nor a band such as 0.5_2.0")
        return None, 2.0


def _rejection(sheet: Sheet) -> str:
    """The rejection; the key that asks for it, or empty."""
    key, threshold = f"{GROUP}.rollout_rs", f"{GROUP}.rollout_rs_threshold"
    if not _is_on(sheet, key):
        return ""
    name = _EARLIER.get(sheet.text(key), sheet.text(key))
    if "," in name:
        sheet.refuse(key, f"one rejection is offered at a time; set it to one of {name.replace(',', ', ')}")
        return key
    level, _, measure = name.rpartition("_")
    if level not in _LEVELS or measure not in ("k1", "k2", "k3"):
        known = ", ".join(f"{one}_{of}" for one in _LEVELS for of in ("k1", "k2", "k3"))
        sheet.refuse(key, f"the rejection {sheet.text(key)!r} has no counterpart here; use one of {known}")
        return key
    if not sheet.has(threshold):
        sheet.refuse(key, f"verl has no default of its bound; give {threshold}")
    low, high = _bounds(sheet, threshold)
    lower = f"{GROUP}.rollout_rs_threshold_lower"
    low = sheet.number(lower) if _is_on(sheet, lower) else low
    if measure == "k1":
        if high <= 1 or (low is not None and not isclose(low * high, 1.0, rel_tol=1e-3)):
            text = "rejection by k1 bounds |log w| here, so the ratio's bounds are 1/x and x with x above 1"
            sheet.refuse(threshold, f"{text}; set it to {max(high, 1.5):g}")
        high = log(max(high, 1.0 + 1e-9))
    sheet.set(f"{_OURS}.reject", measure, key)
    sheet.set(f"{_OURS}.reject_level", _LEVELS[level], key)
    sheet.set(f"{_OURS}.reject_threshold", high, threshold, lower)
    return key
