"""The generator process: an engine behind one gRPC link to the scheduler."""
