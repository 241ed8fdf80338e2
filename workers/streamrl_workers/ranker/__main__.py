"""`python -m streamrl_workers.ranker FD`: the ranker's process."""

import os
import sys

if __name__ == "__main__":
    # Before anything heavy is imported: what starts here must not hold up the scheduler and the trainer.
    os.nice(19)
    from streamrl_workers.ranker.main import main

    status = main()
    sys.stderr.flush()
    os._exit(status)  # taking torch down takes seconds, and has nothing left to do
