"""`python -m streamrl_workers.trackers FD`: the process of one tracker."""

import os
import sys

if __name__ == "__main__":
    # Before anything heavy is imported: what starts here must not hold up the scheduler and the trainer.
    os.nice(5)
    from streamrl_workers.trackers.main import main

    status = main()
    sys.stderr.flush()
    os._exit(status)  # a tracker's threads may wait for a network that never answers
