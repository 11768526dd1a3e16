"""One program against one file of tests, from the command line: what a run would make of it.

    python -m meshloom.rewards.code program.py tests.json

Prints the isolation that was achieved, then the reward with its reason; exit code 0 if all tests passed, 1 if not, 2 if the
tests or this machine are at fault.
"""

import sys
from pathlib import Path

from meshloom.config.code_settings import CodeSettings
from meshloom.config.errors import UserError
from meshloom.rewards.code.judge import CodeJudge
from meshloom.rewards.isolation import require_isolation
from meshloom.rewards.outcome import RewardRequest

_BUDGET_S = 300.0


def main(words: list[str]) -> int:
    """Judge a program; see the module."""
    if len(words) != 2:
        print("usage: python -m meshloom.rewards.code program.py tests.json", file=sys.stderr)
        return 2
    program, tests = (Path(word).read_text(encoding="utf-8") for word in words)
    settings = CodeSettings(enabled=True)
    request = RewardRequest(
        response=f"~~~python\n{program}\n~~~", answer=tests, data_source="", extra={}, prompt="", finish="stop"
    )
    try:
        print(require_isolation(settings).text())
        with CodeJudge(settings, _BUDGET_S) as judge:
            found = judge.score(request)
    except (UserError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{found['score']:g}  {found['remark']}")
    return 0 if found["tests_passed"] == 1 else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
