# walk: './fenced[opentelemetry]'
"""Numbers that OpenTelemetry reads. Its API alone, without an exporter, reads none."""

from opentelemetry.metrics import get_meter

import fenced
from fenced.metrics import Recorder

recorder = Recorder()
recorder.otel(get_meter("shop"))
with fenced.Client("sqlite:///leases.db", on_event=recorder).hold("orders/42") as lease:
    assert lease.token == 1
