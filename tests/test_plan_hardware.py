"""The table of devices, and the formula of operations without torch against the one that reads a model's modules."""

import pytest

from meshloom.plan.arithmetic import Work, pass_cost
from meshloom.plan.hardware import DEVICES, MEASURED_H200, find_device, known_peak
from meshloom.plan.parameters import count_parameters
from tests.models import FAMILIES, tiny_model


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("NVIDIA A100-SXM4-40GB", "A100 40GB"),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB"),
        ("NVIDIA A100 80GB PCIe", "A100 80GB"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 NVL", "H100 NVL"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("AMD Instinct MI300X OAM", "MI300X"),
        ("h200", "H200"),
        ("a100-40gb", "A100 40GB"),
        ("Tesla V100-SXM2-16GB", None),
        ("NVIDIA L40", None),
    ],
)
def test_devices_are_found_by_the_drivers_name_and_by_peoples(name: str, found: str | None) -> None:
    device = find_device(name)
    assert (device and device.name) == found
    assert known_peak(name) == (device and device.matrix_flops)


def test_every_device_is_found_by_its_own_name_and_is_plausible() -> None:
    """What a row mixes up or misses by a thousand is seen: each rate has a range that all devices of ten years keep to."""
    for device in DEVICES:
        assert find_device(device.name) is device
        assert 20 * 2**30 < device.memory_bytes < 300 * 2**30
        assert 50e12 < device.matrix_flops < 5000e12
        assert 200e9 < device.memory_bandwidth < 10e12
        assert device.network_bandwidth < device.host_bandwidth <= device.peer_bandwidth < device.memory_bandwidth


def test_no_program_gets_more_than_the_maker_says() -> None:
    h200 = find_device("H200")
    assert h200 is not None
    for name in ("matrix_flops", "memory_bandwidth", "host_bandwidth", "peer_bandwidth"):
        assert 0.5 < getattr(MEASURED_H200, name) / getattr(h200, name) <= 1
    assert MEASURED_H200.all_gather_bandwidth < MEASURED_H200.broadcast_bandwidth < MEASURED_H200.peer_bandwidth


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tokens_cost_is_the_same_by_config_and_by_modules(family: str) -> None:
    from meshloom.train.flops import Cost

    model = tiny_model(family)
    by_modules = Cost.of(model.model, model.get_output_embeddings().weight, layers=3, query_width=64)
    numbers = count_parameters(model.config.to_dict())
    by_config = pass_cost(numbers, backward=True)
    assert by_modules is not None
    for part in ("per_token", "per_prediction", "per_pair"):
        assert getattr(by_config, part) == getattr(by_modules, part)
    work = Work(tokens=10, predictions=3, pairs=55)
    assert 3 * work.flops(pass_cost(numbers, backward=False)) == work.flops(by_config)
