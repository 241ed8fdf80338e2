"""Functions that the jobs of this corpus name; each is wrong in its own way."""


def too_few(prompt, completion):
    return 0.0


async def waits(*, prompt, completion, answer, metadata):
    return 0.0


def plays(*, question, answer, metadata, seed):
    return None
