"""The algorithm of a run, as lines of the plan.

Owns: which choices are shown, each with where it was made. Refuses to know: what the choices do.
"""

from meshloom.config.names import FIXED_REDUCTIONS
from meshloom.config.settings import AlgorithmSettings, KlPlace, TrainSettings
from meshloom.plan.ledger import LedgerLine


def algorithm_lines(settings: TrainSettings) -> tuple[LedgerLine, ...]:
    """The choices that make the algorithm: given, a recipe's, or defaults."""
    algorithm = settings.algorithm

    def line(name: str, key: str, value: str) -> LedgerLine:
        path = f"algorithm.{key}"
        return LedgerLine(
            section="algorithm", name=name, value=value, formula=path, source=settings.provenance.of(path)
        )

    lines = [] if algorithm.recipe is None else [line("recipe", "recipe", str(algorithm.recipe))]
    lines += [
        line("advantage", "advantage", algorithm.advantage),
        line("policy loss", "policy_loss", algorithm.policy_loss),
        line("reduction", "reduction", _reduction(algorithm)),
        line("clip below", "clip_low", f"{algorithm.clip_low:g}"),
        line("clip above", "clip_high", f"{algorithm.clip_high:g}"),
        line("divergence", "kl", _divergence(algorithm)),
    ]
    correction = algorithm.correction
    if correction.weights != "none":
        band = f"{correction.low:g} to " if correction.weights == "banded" else "at most "
        text = f"{correction.weights}: {band}{correction.threshold:g}, by {correction.level}"
        lines.append(line("weights of the gap", "correction.weights", text))
    if correction.reject != "none" and correction.reject_threshold is not None:
        text = f"{correction.reject} above {correction.reject_threshold:g}, by {correction.reject_level}"
        lines.append(line("rejection", "correction.reject", text))
    if algorithm.proximal == "sampler":
        lines.append(line("ratio to", "proximal", "the sampler"))
    return tuple(lines)


def _reduction(algorithm: AlgorithmSettings) -> str:
    mode = FIXED_REDUCTIONS.get(algorithm.policy_loss, algorithm.reduction)
    return mode if algorithm.reduction_constant is None else f"{mode} ÷ {algorithm.reduction_constant:g}"


def _divergence(algorithm: AlgorithmSettings) -> str:
    if algorithm.kl is KlPlace.NONE:
        return "none"
    return f"{algorithm.kl_coefficient:g} × {algorithm.kl_estimator} in the {algorithm.kl}"
