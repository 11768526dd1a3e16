"""What stays of a run's steps: nothing in memory, and their tokens and seconds in the records."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from meshloom.loop.rl import RLStage
from meshloom.loop.stage import StepDone
from meshloom.loop.train import run_training
from meshloom.observe.records import read_metrics, read_samples
from tests.lesson_runs import train_settings, write_inputs

SETTLED, LAST = 4, 10
"""Steps: until everything that a run makes once is there, and of the run."""

KINDS = (torch.Tensor, torch.nn.Parameter)


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, tuple[int, int]]]:
    """A run, and after two of its steps the bytes of all tensors and the number of all objects."""
    counts: dict[int, tuple[int, int]] = {}
    report = RLStage.report

    def counting(stage: RLStage, done: StepDone[Any, Any]) -> None:
        report(stage, done)
        if done.step in (SETTLED, LAST):
            gc.collect()
            there = gc.get_objects()
            dense = [each for each in there if type(each) in KINDS and each.layout is torch.strided]
            tensors = sum(each.nbytes for each in dense)
            counts[done.step] = tensors, len(there)

    inputs = write_inputs(tmp_path_factory.mktemp("inputs"))
    changes = (f"batch.steps={LAST}", "data.validation=null", "checkpoint.every_steps=0", "optimizer.schedule=constant")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RLStage, "report", counting)
        assert run_training(train_settings(inputs, inputs / "run", *changes), resume=False) == 0
    return inputs / "run", counts


def test_no_tensor_and_no_object_is_kept_of_a_step(counted: tuple[Path, dict[int, tuple[int, int]]]) -> None:
    """Tensors are as many bytes as before; of other objects, no more than a step's few numbers stay."""
    _, counts = counted
    (tensors, objects), (tensors_later, objects_later) = counts[SETTLED], counts[LAST]
    # What is made of a step for its samples' file may still be there, and is about 2 %.
    assert tensors_later < tensors * 1.05
    assert objects_later - objects < 50 * (LAST - SETTLED)


def test_tokens_that_are_read_and_tokens_that_are_generated_are_told_apart(
    counted: tuple[Path, dict[int, tuple[int, int]]],
) -> None:
    """Throughput that counts prompts is one number, that of what the model wrote another."""
    run, _ = counted
    samples = list(read_samples(run))
    for record in read_metrics(run):
        of_step = [sample for sample in samples if sample["step"] == record["step"]]
        written = sum(len(sample["response_ids"]) for sample in of_step)
        read = sum(len(sample["prompt_ids"]) for sample in of_step)
        metrics = record["metrics"]
        seconds = written / metrics["response_tokens_per_second"]
        assert (read + written) / metrics["tokens_per_second"] == pytest.approx(seconds)
        assert 0 < seconds <= sum(record["phases"].values()) + 1e-6
