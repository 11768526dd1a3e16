"""Ragged samples and their packing into microbatches."""

from meshloom.samples.packing import SampleTooLong, pack
from meshloom.samples.ragged import Samples, concat

__all__ = ["SampleTooLong", "Samples", "concat", "pack"]
