"""The plan of a run, made before a device is touched. Imports without torch."""

from meshloom.plan.build import Plan, build_plan
from meshloom.plan.ledger import LedgerLine

__all__ = ["LedgerLine", "Plan", "build_plan"]
