"""gRPC between the parts: stubs, channels with the run's token, number packing, endpoints, lifelines."""
