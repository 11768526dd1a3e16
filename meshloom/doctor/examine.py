"""The examination: everything that can be said of this machine, and of it for a run.

Owns: the order. Refuses to know: each of the parts. Always holds: it goes on after whatever it finds.
"""

from pathlib import Path

from meshloom.config.launch_environment import launch_environment
from meshloom.doctor.devices import examine_devices
from meshloom.doctor.findings import Report
from meshloom.doctor.gpus import find_gpus
from meshloom.doctor.machine import examine_machine
from meshloom.doctor.needs import Needs, RunKind, needs_of
from meshloom.doctor.nodes import examine_nodes
from meshloom.doctor.packages import examine_packages


def examine(settings: RunKind | None = None, host_file: Path | None = None) -> Report:
    """What this machine has, and what it lacks.

    Args:
        settings: of a run; none to look at the machine alone.
        host_file: that names the nodes; none if there is none.
    """
    report, environment, gpus = Report(), launch_environment(), find_gpus()
    seen = gpus.visible(environment.visible_devices)
    least = min((gpu.free_bytes for gpu in seen if gpu.free_bytes is not None), default=None)
    needs = Needs() if settings is None else needs_of(settings, least)
    examine_devices(report, gpus, environment, needs)
    examine_machine(report, environment, needs, len(seen))
    examine_packages(report, needs)
    examine_nodes(report, environment, needs, host_file)
    for problem in needs.problems:
        what = f"the plan refuses the run: [{problem.code}] {problem.what}"
        report.require("N060", what, where=problem.where, why=problem.why, fix=problem.fix)
    return report
