"""How many programs code rewards judge in a second, and what one costs.

    python -m bench.code_rewards [--workers 2] [--samples 200]

Each sample is a program of one line with one test; the pool has as many workers as are asked for.
"""

import argparse
import time

from meshloom.config.code_settings import CodeSettings
from meshloom.config.settings import RewardSettings
from meshloom.rewards.code.judge import CodeJudge
from meshloom.rewards.code.tests import read_tests
from meshloom.rewards.outcome import RewardRequest
from meshloom.rewards.pool import RewardPool


def measure(workers: int, samples: int) -> tuple[float, float]:
    """Programs in a second through a pool, and seconds of one alone: the median."""
    code, tests = CodeSettings(enabled=True), [{"stdin": "1 2", "stdout": "3"}]
    response = "```python\nprint(sum(map(int, input().split())))\n```"
    request = RewardRequest(response=response, answer=tests, data_source="", extra={}, prompt="", finish="stop")
    with RewardPool(RewardSettings(function="code", code=code, workers=workers, deadline_s=60)) as pool:
        pool.score([request] * workers)
        began = time.perf_counter()
        values = {reward.value for reward in pool.score([request] * samples)}
        rate = samples / (time.perf_counter() - began)
    if values != {1.0}:
        raise RuntimeError(f"programs were judged {values}")
    alone = []
    with CodeJudge(code, 60.0) as judge:
        for _ in range(50):
            began = time.perf_counter()
            judge.judge("print(3)", read_tests(tests, {}))
            alone.append(time.perf_counter() - began)
    return rate, sorted(alone)[len(alone) // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--samples", type=int, default=200)
    options = parser.parse_args()
    rate, alone_s = measure(options.workers, options.samples)
    print(f"{rate:.0f} programs/s with {options.workers} workers; one alone takes {1000 * alone_s:.1f} ms (median)")


if __name__ == "__main__":
    main()
