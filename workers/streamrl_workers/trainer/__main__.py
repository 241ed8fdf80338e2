"""`python -m streamrl_workers.trainer`."""

import sys

from streamrl_workers.trainer.main import main

sys.exit(main())
