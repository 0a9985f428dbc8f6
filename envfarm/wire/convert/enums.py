"""Enumerations: ``core`` string enums to protobuf numbers and back."""

from __future__ import annotations

from envfarm.core.messages import Diagnosis, ToolStatus
from envfarm.core.outcome import Outcome, OutcomeKind
from envfarm.core.run import RunState
from envfarm.core.sandbox import Isolation
from envfarm.wire.v1 import run_pb2, types_pb2

DIAGNOSIS_TO_PB = {d: types_pb2.Diagnosis.Value(f"DIAGNOSIS_{d.name}") for d in Diagnosis}
DIAGNOSIS_FROM_PB = {number: d for d, number in DIAGNOSIS_TO_PB.items()}
STATUS_TO_PB = {s: types_pb2.ToolStatus.Value(f"TOOL_STATUS_{s.name}") for s in ToolStatus}
STATUS_FROM_PB = {number: s for s, number in STATUS_TO_PB.items()}
ISOLATION_TO_PB = {i: types_pb2.Isolation.Value(f"ISOLATION_{i.name}") for i in Isolation}
ISOLATION_FROM_PB = {number: i for i, number in ISOLATION_TO_PB.items()}
STATE_TO_PB = {s: run_pb2.RunState.Value(f"RUN_STATE_{s.name}") for s in RunState}
STATE_FROM_PB = {number: s for s, number in STATE_TO_PB.items()}
_KIND_TO_PB = {k: types_pb2.OutcomeKind.Value(f"OUTCOME_KIND_{k.name}") for k in OutcomeKind}
_KIND_FROM_PB = {number: k for k, number in _KIND_TO_PB.items()}


def outcome_to_pb(outcome: Outcome) -> types_pb2.Outcome:
    """Outcome to protobuf."""
    return types_pb2.Outcome(kind=_KIND_TO_PB[outcome.kind], detail=outcome.detail)


def outcome_from_pb(pb: types_pb2.Outcome) -> Outcome:
    """Outcome from protobuf; an unknown kind carries no reward, so it is an infrastructure failure."""
    kind = _KIND_FROM_PB.get(pb.kind)
    if kind is None:
        return Outcome.infra_failed(f"unknown outcome kind {int(pb.kind)}")
    return Outcome(kind, pb.detail)
