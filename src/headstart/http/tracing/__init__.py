"""Traces: spans of requests as plain values, W3C trace context, export over OTLP, which needs the extra [otlp]."""
