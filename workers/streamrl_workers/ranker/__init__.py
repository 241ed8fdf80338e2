"""The ranker's process: a model that scores prompts for the scheduler and learns while the run goes on.

    main.py       the process: scores first, tunes within its budget     folder.py           a fitted ranker's folder; the registry
    protocol.py   frames between the scheduler and this process          hashing.py          a linear model on features of the text
    tuning.py     which pairs are learnt when, and what is kept          language_model.py   a fine-tuned transformers model
    pairs.py      pairs (prompt, tokens), on disk

The scheduler imports `protocol` and `folder`, which are light, and starts `python -m streamrl_workers.ranker`.
"""
