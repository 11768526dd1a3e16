"""What a plan knows of a file of samples: whether it says what the sampler thought of each token.

Owns: a look at the file's first training sample. Refuses to know: all else in it, and what is wrong with it. Always
holds: one line is read, again only if the file has changed.
"""

import json
from functools import lru_cache
from pathlib import Path

_SAMPLES = "samples.jsonl"


def lacks_logprobs(from_samples: str | None) -> bool:
    """Whether the actor must compute the log-probs of a file's samples; false where there is no file that can be read.

    Args:
        from_samples: the setting ``rollout.from_samples``: the file, or the run's folder that has it.
    """
    if from_samples is None:
        return False
    path = Path(from_samples)
    try:
        file = path / _SAMPLES if path.is_dir() else path
        return _first_lacks(file, file.stat().st_mtime_ns)
    except (OSError, ValueError):
        return False


@lru_cache(maxsize=8)
def _first_lacks(file: Path, changed_ns: int) -> bool:
    with file.open(encoding="utf-8") as lines:
        for line in lines:
            record = json.loads(line) if line.strip() else None
            if isinstance(record, dict) and record.get("kind") == "train":
                return record.get("logprobs") is None
    return False
