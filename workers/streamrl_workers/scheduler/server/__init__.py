"""What surrounds the pure core: connections, effects carried out, the task pool, the status endpoint, the process's life."""
