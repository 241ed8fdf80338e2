"""Builds every Kubernetes object of a job but the Secrets with its certificates. Pure: the same input gives the same bytes."""

from streamrl_operator.planning.objects.generators import pool_replicas
from streamrl_operator.planning.objects.plan import plan_objects

__all__ = ["plan_objects", "pool_replicas"]
