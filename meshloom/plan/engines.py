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
        path = "rollout.vllm.max_model_len"
        changes = ((f"{path}={longest}",), (f"{path}=null",))
        found.refuse("E004", path, what, fix=f"at least {longest}, or leave it out", suggestions=changes)


def _check_sampling(found: Findings, path: str, sampling: SamplingSettings) -> None:
    if sampling.temperature == 0:
        return
    coldest, hottest = VLLM_TEMPERATURES
    if not coldest <= sampling.temperature <= hottest:
        what = f"vLLM does not sample at a temperature of {sampling.temperature:g}"
        fix = f"0, {coldest:g} to {hottest:g}, or rollout.engine=torch"
        nearest = coldest if sampling.temperature < coldest else hottest
        changes: tuple[tuple[str, ...], ...] = ((f"{path}.temperature={nearest}",), ("rollout.engine=torch",))
        found.refuse("E002", f"{path}.temperature", what, fix=fix, suggestions=changes)
    if sampling.top_p < 1 and sampling.min_p:
        what = "vLLM cannot use top_p and min_p together as they are meant here"
        why = "it applies min-p before top-p: the share that top-p keeps would be another one"
        changes = ((f"{path}.min_p=0",), (f"{path}.top_p=1",), ("rollout.engine=torch",))
        fix = "use one of them, or rollout.engine=torch"
        found.refuse("E003", f"{path}.min_p", what, why=why, fix=fix, suggestions=changes)
