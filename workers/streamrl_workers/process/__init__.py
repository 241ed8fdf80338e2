"""What every worker process does alike: signals, heartbeat, environment variables, its clock, its end."""
