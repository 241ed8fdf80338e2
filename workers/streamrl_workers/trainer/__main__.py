"""`python -m streamrl_workers.trainer`.

It ends without tearing the interpreter down: threads of torch's communication sometimes abort the process there (seen: SIGABRT,
"terminate called without an active exception"), and a rank that has done its work would count as one that died.
"""

import logging
import os
import sys

from streamrl.errors import EXIT_DONE
from streamrl_workers.process.early_sigterm import exit_on_sigterm

exit_on_sigterm(exit_code=EXIT_DONE)

from streamrl_workers.process.heartbeat import start_heartbeat  # noqa: E402 - SIGTERM first

start_heartbeat()

from streamrl_workers.trainer.main import main  # noqa: E402 - these imports take seconds

code = main()
logging.shutdown()
sys.stdout.flush()
sys.stderr.flush()
os._exit(code)
