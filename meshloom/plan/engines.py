"""What a rollout engine can do with the settings, checked before any work.

Owns: rules about engines that need none of them. Refuses to know: whether an engine is installed.

Codes: E engines.
"""

from meshloom.config.rollout_settings import VLLM_TEMPERATURES
from meshloom.config.settings import EvalSettings, SamplingSettings, SftSettings, TrainSettings
from meshloom.plan.checks import Findings
from meshloom.plan.ledger import longest_sequence_tokens


def check_engine_settings(found: Findings, settings: TrainSettings | SftSettings | EvalSettings) -> None:
    """Refuse what the chosen engine does not do; warn of settings of another one."""
    if isinstance(settings, SftSettings):
        return
    vllm = settings.rollout.vllm
    if settings.rollout.engine != "vllm":
        if vllm != type(vllm)():
            what = "rollout.vllm is not used, as the engine is another one"
            found.warn("E001", "rollout.vllm", what, fix="set rollout.engine=vllm")
        return
    samplings = {"validation.sampling": settings.validation.sampling}
    if isinstance(settings, TrainSettings):
        samplings["rollout.sampling"] = settings.rollout.sampling
    for path, sampling in samplings.items():
        _check_sampling(found, path, sampling)
    longest = longest_sequence_tokens(settings)
    if vllm.max_model_len is not None and vllm.max_model_len < longest:
        what = f"prompt and response together may take {longest} tokens, vLLM is opened for {vllm.max_model_len}"
        found.refuse("E004", "rollout.vllm.max_model_len", what, fix=f"at least {longest}, or leave it out")


def _check_sampling(found: Findings, path: str, sampling: SamplingSettings) -> None:
    if sampling.temperature == 0:
        return
    coldest, hottest = VLLM_TEMPERATURES
    if not coldest <= sampling.temperature <= hottest:
        what = f"vLLM does not sample at a temperature of {sampling.temperature:g}"
        fix = f"0, {coldest:g} to {hottest:g}, or rollout.engine=torch"
        found.refuse("E002", f"{path}.temperature", what, fix=fix)
    if sampling.top_p < 1 and sampling.min_p:
        what = "vLLM cannot use top_p and min_p together as they are meant here"
        why = "it applies min-p before top-p: the share that top-p keeps would be another one"
        found.refuse("E003", f"{path}.min_p", what, why=why, fix="use one of them, or rollout.engine=torch")
