"""`python -m streamrl_workers.generator`."""

import sys

from streamrl_workers.generator.main import main

sys.exit(main())
