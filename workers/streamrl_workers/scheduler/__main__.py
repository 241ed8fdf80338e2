"""`python -m streamrl_workers.scheduler`"""

import sys

from streamrl.errors import EXIT_RETRY
from streamrl_workers.process.early_sigterm import exit_on_sigterm

exit_on_sigterm(exit_code=EXIT_RETRY)

from streamrl_workers.process.heartbeat import start_heartbeat  # noqa: E402 - SIGTERM first

start_heartbeat()

from streamrl_workers.scheduler.main import main  # noqa: E402 - these imports take a while

sys.exit(main())
