"""What of episodes stays in an engine's cache between their turns.

Owns: how many tokens that can be. Refuses to know: how it is kept (``meshloom.rollout.prefix_tree``). Always holds: an episode
counts as if it was as long as it may be.
"""

from meshloom.config.settings import EvalSettings, TrainSettings


def later_turns(settings: TrainSettings | EvalSettings) -> int:
    """Turns of the model that an episode may have after its first; 0 where prompts are answered in one."""
    environment = settings.environment
    return 0 if environment is None or environment.reasoning_gym else environment.max_turns - 1


def kept_tokens(
    settings: TrainSettings | EvalSettings, *, samples: int, sequences: int, slot: int, longest: int, gpu: bool
) -> int:
    """Tokens that a replica of the embedded engine keeps at most, beside those of its slots; vLLM's are in a cache of a fixed
    size.

    Args:
        settings: of the run.
        samples: of a replica.
        sequences: of them, that it generates at once.
        slot: tokens of a slot.
        longest: tokens of the longest sample.
        gpu: whether keys and values are in pages. There an episode has its pages whether it runs or waits; elsewhere what is
            kept is a copy.
    """
    if not later_turns(settings) or settings.rollout.engine == "vllm":
        return 0
    return max(0, samples - sequences) * slot if gpu else samples * longest
