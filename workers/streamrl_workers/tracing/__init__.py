"""Spans of OpenTelemetry: what they are, what their attributes are called, how they are sent."""
