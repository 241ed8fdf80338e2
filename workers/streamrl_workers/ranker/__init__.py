"""The ranker's process: a transformers model that scores prompts for the scheduler and is re-tuned while the run goes on.

    main.py       the process: scores first, tunes within its budget        budget.py            how much CPU time tuning may take
    protocol.py   frames between the scheduler and this process             pairs.py             pairs (prompt, tokens), on disk
    folders.py    what a fitted ranker's folder must hold, without torch    tuner.py             which pairs are learnt when
    state.py      the re-tuned model in the run's folder                    language_model.py    the model that is tuned
    backbone.py   a transformers model without its head                     policy_features.py   a solution on frozen features

The scheduler imports `protocol` and `folders`, which are light, and starts `python -m streamrl_workers.ranker`.
"""
