"""The truth of a captured call: what its outputs should have been for the inputs it had."""

from __future__ import annotations

import torch

from ditorch.precision.call import Call
from ditorch.precision.captures.arguments import NotReplayable
from ditorch.precision.captures.recording import Recording
from ditorch.precision.captures.records import CallRecord
from ditorch.precision.captures.remake import remake_call
from ditorch.precision.reference import Reference, reference_of
from ditorch.precision.standards import Standards


def truth_of(call: Call, standards: Standards) -> Reference:
    """Raises NotReplayable: nothing says what this call's outputs should be."""
    reference = reference_of(call, standards)
    if not reference.tensors:
        raise NotReplayable(reference.note or "there is no reference to judge it by")
    return reference


def truth_of_record(
    recording: Recording, step: int, record: CallRecord, standards: Standards
) -> Reference:
    """Raises NotReplayable: an input was not kept, or there is no truth."""
    return truth_of(remake_call(recording, step, record, torch.device("cpu")), standards)
