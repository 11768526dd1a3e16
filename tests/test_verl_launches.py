"""Twenty-eight public verl commands: each key of each is translated, ignored with a reason, or refused with what to do.

``python -m tests.test_verl_launches`` writes the expected translations anew; a change of them is to be read.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from meshloom.config.verl import Translation, translate

DATA = Path(__file__).with_name("data")
LAUNCHES = json.loads((DATA / "verl_launches.json").read_text())["launches"]
EXPECTED = DATA / "verl_translations.json"
NAMES = [launch["script"].removesuffix(".sh") for launch in LAUNCHES]


def translated(launch: dict[str, Any]) -> Translation:
    words = [f"{key}={value}" for key, value in launch["overrides"].items()]
    return translate(["python3", "-m", *launch["entry"], *words])


def summary(translation: Translation) -> dict[str, Any]:
    """What is compared: the account of the keys, and the values that do not come from verl's defaults."""
    settings = {
        path: native.value for path, native in translation.settings.items() if "verl's default" not in native.origin
    }
    account = {name: dict(getattr(translation, name)) for name in ("translated", "ignored", "refused", "warnings")}
    return {"settings": settings, **account}


def test_there_are_twenty_eight() -> None:
    assert len(LAUNCHES) == len(set(NAMES)) == 28


@pytest.mark.parametrize("launch", LAUNCHES, ids=NAMES)
def test_each_key_is_accounted_for_once(launch: dict[str, Any]) -> None:
    translation = translated(launch)
    accounts = [set(translation.translated), set(translation.ignored), set(translation.refused)]
    assert set(launch["overrides"]) <= set.union(*accounts)
    assert sum(map(len, accounts)) == len(set.union(*accounts))
    assert all(translation.translated.values()) and all(translation.ignored.values())
    assert all(";" in reason for reason in translation.refused.values()), "a refusal says what to do"
    assert not any("no counterpart here; leave it out" in reason for reason in translation.refused.values())


@pytest.mark.parametrize("launch", LAUNCHES, ids=NAMES)
def test_the_translation_is_the_one_that_was_read(launch: dict[str, Any]) -> None:
    expected = json.loads(EXPECTED.read_text())[launch["script"]]
    assert json.loads(json.dumps(summary(translated(launch)))) == expected


def test_what_can_run_and_what_cannot_is_as_read() -> None:
    can = [name for name, launch in zip(NAMES, LAUNCHES, strict=True) if not translated(launch).refused]
    assert len(can) == 13


if __name__ == "__main__":
    written = {launch["script"]: summary(translated(launch)) for launch in LAUNCHES}
    EXPECTED.write_text(json.dumps(written, indent=1, ensure_ascii=False) + "\n")
