"""Operations of a pass, against a count of the products that are made."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from meshloom.config.settings import LoraSettings
from meshloom.train.attention import use_layouts
from meshloom.train.flops import Cost, Work, known_peak
from meshloom.train.load import add_lora
from meshloom.train.model import TrainedModel
from tests.models import tiny_model
from tests.test_train_model import SETTINGS, make_samples, trained, weighted
from tests.test_train_sharing import make_groups


def cost_of(model: TrainedModel) -> Cost:
    cost = Cost.of(model.decoder, model.head.weight, layers=3, query_width=64)
    assert cost is not None
    return cost


@pytest.mark.parametrize("family", ["qwen2", "llama"])
@pytest.mark.parametrize("lora", [None, LoraSettings(rank=4)])
def test_operations_are_those_of_the_products(family: str, lora: LoraSettings | None) -> None:
    """Tied and untied heads, whole models and adapters; the log-probs' second product of logits is recompute."""
    module = tiny_model(family)
    use_layouts(module)
    if lora is not None:
        module = add_lora(module, lora, seed=0)
    model = trained(module, 100, settings=SETTINGS.model_copy(update={"logits_chunk_bytes": 2**20}))
    with FlopCounterMode(display=False) as counter:
        model.forward_backward(make_groups(), weighted, temperature=1.0)
    counts = counter.get_flop_counts()["Global"]
    products = sum(count for op, count in counts.items() if "mm" in str(op))
    predicted = int(make_groups()["mask"].sum())
    again = 2 * model.head.weight.numel() * predicted
    # Vectors take part in no product, and the first layer's input needs no gradient if nothing below it is trained.
    assert model._work.predictions == predicted
    assert products - again == pytest.approx(model._work.flops(cost_of(model)), rel=0.1)


def test_a_shared_prompt_counts_once_and_attention_apart() -> None:
    module = tiny_model("llama")
    use_layouts(module)
    model = trained(module, 100)
    model.forward_backward(make_samples(), weighted, temperature=1.0)
    assert model.take_utilization(1.0) == {}  # the peak of a processor is not known
    assert model._work == Work()
    cost = Cost(per_token=2.0, per_prediction=3.0, per_pair=5.0)
    work = Work(10, 7, 30) + Work(1, 1, 1)
    assert (work.flops(cost), work.attention_flops(cost)) == (46.0, 155.0)


def test_pairs_are_counted_as_a_mask_counts_them() -> None:
    from meshloom.train.sharing import Computed

    computed = Computed.of(make_groups())
    counted = 0
    for length, queries in zip(computed.lengths, computed.query_lengths, strict=True):
        counted += int(torch.ones(length, length).tril()[length - queries :].sum())
    assert computed.pairs() == counted


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H200 NVL", 836e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40", None),
        ("Tesla V100-SXM2-16GB", None),
    ],
)
def test_peaks_are_found_by_the_whole_name(name: str, peak: float | None) -> None:
    assert known_peak(name) == peak
