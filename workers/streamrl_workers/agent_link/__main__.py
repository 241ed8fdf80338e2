"""`python -m streamrl_workers.agent_link`."""

import sys

from streamrl.errors import EXIT_DONE
from streamrl_workers.process.early_sigterm import exit_on_sigterm

exit_on_sigterm(exit_code=EXIT_DONE)

from streamrl_workers.process.heartbeat import start_heartbeat  # noqa: E402 - SIGTERM first

start_heartbeat()

from streamrl_workers.agent_link.main import main  # noqa: E402

sys.exit(main())
