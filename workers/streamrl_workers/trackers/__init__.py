"""Experiment trackers, each in a process of its own beside the scheduler's loop.

registry   the trackers by the key that users write, and what each must be able to do
scalars    what a line of the run's metrics becomes: names that do not change
feed       follows the run folder and remembers how far a tracker came
main       the process; one file more for each tracker, the only one that imports its package
"""
