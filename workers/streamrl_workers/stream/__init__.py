"""gRPC between the parts: stubs, channels with the run's token, token packing, bounded queues."""
