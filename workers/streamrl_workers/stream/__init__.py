"""gRPC between the parts: services, channels with the run's token, number packing, endpoints."""
