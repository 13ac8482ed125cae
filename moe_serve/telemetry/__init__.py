"""Logs and metrics of the parts: JSON lines without payload or secret, and a bounded set of series.

Responsible for their form and their limits. Must never decide what happened: callers hand in
decision records and figures. Called by controller and router.
"""

from moe_serve.telemetry.audit import AuditLog, audit_file
from moe_serve.telemetry.logs import Level, LogFile, make_logger
from moe_serve.telemetry.metrics import Metrics
from moe_serve.telemetry.registry import METRICS
from moe_serve.telemetry.sinks import MemorySink, MetricSink, NullSink, TeeSink
from moe_serve.telemetry.spec import Kind, MetricSpec

__all__ = [
    "METRICS",
    "AuditLog",
    "Kind",
    "Level",
    "LogFile",
    "MemorySink",
    "MetricSink",
    "MetricSpec",
    "Metrics",
    "NullSink",
    "TeeSink",
    "audit_file",
    "make_logger",
]
