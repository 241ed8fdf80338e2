"""The messages between the parts, generated from `stream.proto`."""
