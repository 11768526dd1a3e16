"""verl's ``algorithm`` and ``distillation`` keys.

Owns: their meaning here. Always holds: an estimator or correction that is not here is refused, never replaced.
"""

from meshloom.config.names import Advantage
from meshloom.config.verl.correction_rules import correction_rules
from meshloom.config.verl.sheet import Sheet

_ESTIMATORS = {str(name): str(name) for name in Advantage} | {"grpo_vectorized": "grpo", "rloo_vectorized": "rloo"}


def algorithm_rules(sheet: Sheet) -> None:
    """Advantages, discount, choice of groups, off-policy correction."""
    _estimator(sheet)
    sheet.set("algorithm.gamma", sheet.number("algorithm.gamma"), "algorithm.gamma")
    key = "algorithm.norm_adv_by_std_in_grpo"
    sheet.set("algorithm.normalize_by_std", sheet.flag(key), key)
    _groups(sheet)
    correction_rules(sheet)
    if sheet.flag("algorithm.use_pf_ppo"):
        sheet.refuse("algorithm.use_pf_ppo", "samples are not drawn again by their weight; set it to False")
    names = [key for key in sheet.given.entries if key.startswith("algorithm.pf_ppo.")]
    sheet.ignore("it is off", "algorithm.use_pf_ppo", *names)


def _estimator(sheet: Sheet) -> None:
    key = "algorithm.adv_estimator"
    name = sheet.text(key)
    if name in _ESTIMATORS:
        sheet.set("algorithm.advantage", _ESTIMATORS[name], key)
        if name != _ESTIMATORS[name]:
            sheet.warn(key, f"{name} is {_ESTIMATORS[name]}, computed in another way")
        if name != "gae":
            sheet.ignore("gae alone uses it", "algorithm.lam")
        return
    others = ", ".join(_ESTIMATORS)
    sheet.refuse(key, f"the estimator {name!r} has no counterpart here; set it to one of {others}")
    sheet.ignore(f"it belongs to {key}, which is refused", "algorithm.lam")


_GROUP_METRICS = {"reward": "reward", "score": "reward", "seq_reward": "reward", "seq_final_reward": "reward"}
"""verl's names for a sample's reward; another one is a number that the reward function returns."""


def _groups(sheet: Sheet) -> None:
    """Dynamic sampling."""
    group = "algorithm.filter_groups"
    key, ours = f"{group}.enable", "algorithm.filter_groups"
    if not sheet.flag(key):
        names = [name for name in sheet.given.entries if name.startswith(f"{group}.") and name != key]
        sheet.set(f"{ours}.enabled", False, key)
        sheet.ignore("groups are not filtered", *names)
        return
    sheet.set(f"{ours}.enabled", True, key)
    metric, most = f"{group}.metric", f"{group}.max_num_gen_batches"
    name = sheet.text(metric) or "reward"
    if name == "acc" and not sheet.text("reward.custom_reward_function.path"):
        name = "reward"  # the verifiers here have no other number
    sheet.set(f"{ours}.metric", _GROUP_METRICS.get(name, name), metric)
    if name == "seq_final_reward" and sheet.flag("algorithm.use_kl_in_reward"):
        sheet.warn(metric, "groups are filtered by rewards without the divergence")
    rounds = sheet.whole(most)
    if rounds and rounds > 0:
        sheet.set(f"{ours}.max_rounds", rounds, most)
    elif most in sheet.given.entries:
        sheet.count(f"{ours}.max_rounds", most)
        sheet.warn(
            most, f"a step ends after {ours}.max_rounds rounds and trains on what there is; verl's 0 has no bound"
        )
    sheet.ignore(
        "how many rounds are in flight follows from algorithm.max_lag_versions", f"{group}.max_inflight_gen_batches"
    )


def distillation_rules(sheet: Sheet) -> None:
    """Teachers, which no run has."""
    key = "distillation.enabled"
    if sheet.flag(key):
        sheet.refuse(
            key, "learning from a teacher's log-probs is not offered; set it to False to train on rewards alone"
        )
    why = f"it belongs to {key}, which is refused" if key in sheet.refused else "there is no teacher"
    sheet.ignore(why, *[name for name in sheet.given.entries if name.startswith("distillation.")])
