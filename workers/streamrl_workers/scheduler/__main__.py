"""`python -m streamrl_workers.scheduler`"""

import sys

from streamrl.errors import EXIT_RETRY
from streamrl_workers.hearing import hear

hear(exit_code=EXIT_RETRY)

from streamrl_workers.scheduler.main import main  # noqa: E402 - these imports take a while

sys.exit(main())
