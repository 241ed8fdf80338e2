"""Functions that the jobs of this corpus name."""


def present(*, question, answer, metadata):
    return {"prompt": question, "target": answer}


def reward(*, prompt, completion, answer, metadata):
    return float(completion == answer)
