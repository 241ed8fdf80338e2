"""The control plane of StreamRL: what decides about a job from outside it."""
