"""The ranker's process: a model that scores prompts for the scheduler and learns while the run goes on.

    main.py     the process: scores first, tunes within its budget     folder.py           a fitted ranker's folder; the registry
    tuning.py   which pairs are learnt when, and what is kept          hashing.py          a linear model on features of the text
    pairs.py    pairs (prompt, tokens), on disk                        language_model.py   a fine-tuned transformers model

The scheduler imports `folder`, which is light, and starts `python -m streamrl_workers.ranker`.
"""
