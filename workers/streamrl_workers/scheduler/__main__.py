"""`python -m streamrl_workers.scheduler`"""

import sys

from streamrl_workers.scheduler.main import main

sys.exit(main())
