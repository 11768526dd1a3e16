"""The JSON schema that editors use."""

import json

import pytest

from meshloom.config.schema import schema_json
from meshloom.config.settings import EvalSettings, Settings, SftSettings, TrainSettings


def fields_without_description(schema: dict, node: dict) -> list[str]:
    missing = []
    for definition in (node, *schema["$defs"].values()):
        for name, field in definition.get("properties", {}).items():
            referred = schema["$defs"].get(field.get("$ref", "").rpartition("/")[2], {})
            if not (field.get("description") or referred.get("description")):
                missing.append(name)
    return missing


@pytest.mark.parametrize("kind", [TrainSettings, SftSettings, EvalSettings])
def test_every_field_is_described(kind: type[Settings]) -> None:
    schema = json.loads(schema_json(kind))
    assert fields_without_description(schema, schema) == []
    assert schema["additionalProperties"] is False


def test_the_schema_says_ranges_choices_and_docstrings() -> None:
    definitions = json.loads(schema_json(TrainSettings))["$defs"]
    lr = definitions["OptimizerSettings"]["properties"]["lr"]
    assert (lr["minimum"], lr["default"], lr["description"]) == (0, 1e-6, "Peak learning rate.")
    assert "grpo" in definitions["AlgorithmSettings"]["properties"]["advantage"]["examples"]
    assert "token-mean" in definitions["AlgorithmSettings"]["properties"]["reduction"]["enum"]
