"""The only door to an API server: one client per cluster, objects as plain data."""
