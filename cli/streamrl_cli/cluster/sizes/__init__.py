"""`streamrl plan --optimize`: from a job and its profile to the sizes that `streamrl_operator.allocation` chooses, and to why.

optimize    flags; one pool and the trainer
clusters    all pools, over several clusters
stages      what both read from job and profile, and write into the job
"""
