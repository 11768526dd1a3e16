"""verl's ``algorithm``, ``critic`` and ``distillation`` keys.

Owns: their meaning here. Always holds: an estimator or correction that is not here is refused, never replaced.
"""

from meshloom.config.names import REFUSED_ADVANTAGES, Advantage
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
        sheet.ignore("gae alone uses it", "algorithm.lam")
        return
    others = ", ".join(_ESTIMATORS)
    if name in REFUSED_ADVANTAGES:
        given = "" if key in sheet.given.entries else ", verl's default,"
        text = f"{name}{given} {REFUSED_ADVANTAGES[name]}, which a run does not have yet"
        sheet.set("algorithm.advantage", name, key)
        sheet.translated.pop(key, None)
        sheet.refuse(key, f"{text}; set it to one of {others}")
    else:
        sheet.refuse(key, f"the estimator {name!r} has no counterpart here; set it to one of {others}")
    if name == "gae":
        sheet.set("algorithm.lam", sheet.number("algorithm.lam"), "algorithm.lam")
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


def critic_rules(sheet: Sheet) -> None:
    """The critic, which no run has yet: cuts and offload are translated, what would train it is not."""
    wanted = sheet.text("algorithm.adv_estimator") == "gae" or sheet.flag("critic.enable")
    names = [key for key in sheet.open() if key.startswith(("critic.", "trainer.max_critic_ckpt"))]
    if not wanted:
        sheet.ignore("the estimator needs no critic", *names)
        return
    if sheet.flag("critic.enable"):
        sheet.refuse("critic.enable", "a run has no critic yet; set it to False, with an estimator that needs none")
    for key in names:
        quiet = ("profiler", "checkpoint", "nccl_timeout", "use_remove_padding", "max_critic_ckpt")
        if any(part in key for part in quiet):
            sheet.ignore("it decides nothing that is learned", key)
        else:
            sheet.refuse(key, "a run has no critic yet; set algorithm.adv_estimator=grpo, or another that needs none")


def distillation_rules(sheet: Sheet) -> None:
    """Teachers, which no run has."""
    key = "distillation.enabled"
    if sheet.flag(key):
        sheet.refuse(
            key, "learning from a teacher's log-probs is not offered; set it to False to train on rewards alone"
        )
    why = f"it belongs to {key}, which is refused" if key in sheet.refused else "there is no teacher"
    sheet.ignore(why, *[name for name in sheet.given.entries if name.startswith("distillation.")])
