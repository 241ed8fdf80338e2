"""The seed of one sample: a fixed mix of three numbers, so that a run can be told again.

    seed = mix(mix(mix(job seed) ^ group id) ^ sample index),   mix = the finaliser of SplitMix64

Re-issues keep the seed.
"""

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def _mix(value: int) -> int:
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def sample_seed(job_seed: int, *, group_id: int, sample_index: int) -> int:
    """64-bit seed of one sample."""
    return _mix(_mix(_mix(job_seed) ^ group_id) ^ sample_index)
